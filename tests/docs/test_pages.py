"""Pages of docs: listed under their headings, linked; their commands and tables are the code's."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from megacpp.cli.main import COMMANDS, find
from megacpp.config.arguments import parse_args, parse_run, split_args
from megacpp.errors import EXIT_CODES
from tests.docs.run_chapter import COMMAND, run_chapter, run_command

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
# Pages for users; the commands that they show are parsed.
# Their commands need another checkout or other machines.
ELSEWHERE = ("install.md", "launch/ssh.md")
USED = sorted({str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")} - {*ELSEWHERE})
# Of runs that a reader makes first.
FOLDERS = ("--checkpoint.init", "--checkpoint.resume")
LINK = re.compile(r"\[([^\]]+)\]\(([^)#]+\.md)\)")
LISTED = re.compile(r"(?:^- (?:\d+ · )?|^\d+\. |(?<=\), ))\[([^\]]+)\]\(([^)#]+\.md)\)", re.M)


def name(path: Path) -> str:
    return str(path.relative_to(DOCS))


def heading(path: Path) -> str:
    return path.read_text().splitlines()[0].removeprefix("# ")


def anchors(path: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub and MkDocs make them."""
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.M | re.S)
    heads = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    for link, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)]*))?\)", text):
        if link.startswith("http"):
            continue
        target = page.parent / link if link else page
        assert target.exists(), f"{name(page)}: broken link {link}"
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), f"{name(page)}: {link}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_a_formula_is_one_line(page: Path) -> None:
    """GitHub draws the lines of a block as one."""
    formulas = re.findall(r"^```math\n(.*?)^```", page.read_text(), re.M | re.S)
    assert not [formula for formula in formulas if formula.strip().count("\n")]


def test_every_page_is_listed_under_its_heading() -> None:
    linked, titles = {DOCS / "README.md"}, {}
    for index in (DOCS / "README.md", DOCS / "assignments/README.md", DOCS / "launch/README.md"):
        text = index.read_text()
        linked |= {(index.parent / link).resolve() for _, link in LINK.findall(text)}
        titles |= {(index.parent / link).resolve(): title for title, link in LISTED.findall(text)}
    assert {name(page) for page in PAGES if page.resolve() not in linked} == set()
    assert len(titles) >= 57
    for path, title in titles.items():
        # Chapters have a number before their question, assignments a word and a number.
        assert re.sub(r"^(\d+\.|Assignment \d+:) ", "", heading(path)).lower() == title.lower()


def commands(page: str) -> list[str]:
    """Lines of the bash blocks of a page."""
    blocks = re.findall(r"^```bash\n(.*?)^```", (DOCS / page).read_text(), re.M | re.S)
    whole = "".join(blocks).replace("\\\n", " ")
    return [line.split("  #")[0] for line in whole.splitlines()]


SHOWN = [(page, line) for page in USED for line in commands(page)]


@pytest.mark.parametrize(("page", "line"), SHOWN, ids=[line for _, line in SHOWN])
def test_a_shown_command_is_legal(page: str, line: str) -> None:
    first, *words = shlex.split(line)
    if first == "make":
        assert re.search(rf"^{words[0]}:", (ROOT / "Makefile").read_text(), re.M)
        return
    ranks = [int(w.partition("=")[2]) for w in words if w.startswith("--nproc-per-node=")]
    for flag in FOLDERS:
        if flag in words:
            del words[words.index(flag) : words.index(flag) + 2]
    if "train.py" in words:
        assert first in ("torchrun", "python")
        parse_run(words[words.index("train.py") + 1 :], ranks[0] if ranks else 1)
    else:
        assert first == "megacpp" or words[1:3] == ["-m", "megacpp"]
        command, rest = find(words if first == "megacpp" else words[3:])
        args = COMMANDS[command].args
        if COMMANDS[command].runs:
            own, run = split_args(args, rest)
            parse_run(run, getattr(own, "world", None) or getattr(own, "nproc", 1))
        else:
            parse_args(args, rest)


def write_texts() -> None:
    """Write what a reader of using.md has: 50 texts, and 100 questions with answers."""
    kinds, names = ["int", "float", "bool", "char"], ["scale", "shift", "count", "mask", "width"]

    def function(n: int) -> str:
        return f"{kinds[n % 4]} {names[n % 5]}{n}(int x) {{ return x + {n * 3 % 10}; }}"

    Path("texts").mkdir()
    for n in range(50):
        Path(f"texts/{n}.txt").write_text("\n".join(function(n + 50 * k) for k in range(12)))
    talks = ({"prompt": function(n), "completion": kinds[n % 4]} for n in range(100))
    Path("talks.jsonl").write_text("\n".join(map(json.dumps, talks)))


def make_a_run() -> None:
    """Write the texts, and run the commands of using.md that make runs/texts of them."""
    write_texts()
    text = (DOCS / "using.md").read_text()
    shown = (
        block[1][2:] for block in re.finditer(rf"^```console\n({COMMAND.pattern})", text, re.M)
    )
    made = [line.replace("\\\n", " ").strip() for line in shown if "data/texts" in line]
    for command in made[:2]:
        run_command(command)
    assert Path("runs/texts/final").is_dir()


@pytest.mark.parametrize(
    ("page", "before", "blocks"), [("using", write_texts, 11), ("after-a-run", make_a_run, 6)]
)
def test_a_page_for_users_prints_what_it_shows(
    page: str, before: Callable[[], None], blocks: int, request: pytest.FixtureRequest
) -> None:
    update = bool(request.config.getoption("--update-docs"))
    assert run_chapter(DOCS / f"{page}.md", update, before) >= blocks


def test_there_are_commands() -> None:
    assert len(SHOWN) >= 6


def test_exit_codes_are_those_of_the_program() -> None:
    text = (DOCS / "when-it-stops.md").read_text()
    table = text.split("## Exit codes")[1].split("## ")[0]
    assert [int(code) for code in re.findall(r"^\| (\d+) \|", table, re.M)] == list(EXIT_CODES)
    recipes = (DOCS / "launch/slurm.sbatch").read_text()
    again = [int(c) for c in re.findall(r"^\| (\d+) \|[^|]*\| yes \|", table, re.M)]
    assert again and all(f'"$code" = {code} ' in recipes for code in again)


def test_symptoms_quote_messages_of_the_program() -> None:
    text = (DOCS / "when-it-stops.md").read_text().split("## Symptoms")[1].split("## ")[0]
    rows = re.findall(r"^\| (\d+) \| `([^`]+)` \|", text, re.M)
    assert len(rows) >= 15 and {int(code) for code, _ in rows} <= EXIT_CODES.keys()
    packages = ("megacpp", "parallel", "optim", "checkpointing")
    files = [ROOT / "train.py", *(p for name in packages for p in (ROOT / name).rglob("*.py"))]
    # A message may be cut over lines of a file.
    code = "\n".join(re.sub(r'"\s*\n\s*f?"', "", p.read_text()) for p in files)
    missing = [words for _, words in rows if words not in code]
    assert not missing


@pytest.mark.parametrize(
    "file",
    [
        "README.md",
        "CITATION.cff",
        "SECURITY.md",
        "pyproject.toml",
        "CONTRIBUTING.md",
        "CHANGELOG.md",
        "bench/site.py",
        "megacpp/__init__.py",
    ],
)
def test_a_file_describes_the_project_in_the_same_words(file: str) -> None:
    text = " ".join((ROOT / file).read_text().split()).lower()
    assert "trainer for hybrid language models in plain pytorch" in text


def test_the_first_run_of_the_readme_is_the_one_that_is_drawn() -> None:
    text = (ROOT / "README.md").read_text()
    found = re.findall(
        r"bpb (\S+)|(\S+) bits per byte of all|gzip -9 at ([\d.]+)|xz -9 at ([\d.]+)", text
    )
    drawn = json.loads((DOCS / "tiny-loss.json").read_text())
    steps = drawn["bits_per_byte"]
    shown = [steps[0], steps[-1], drawn["held_out"], drawn["gzip"], drawn["xz"]]
    assert [float("".join(one)) for one in found] == shown


def rows(text: str) -> set[str]:
    """Return the rows of tables below their heads, without targets of links, numbers of notes."""
    plain = re.sub(r" ?[¹²³⁴-⁹⁰]+", "", re.sub(r"\]\([^)]*\)", "]", text))
    return set(re.findall(r"^\| .*", re.sub(r"^\|.*\n(?=\|---)", "", plain, flags=re.M), re.M))


def test_tables_of_the_readme_are_those_of_the_questions() -> None:
    readme, questions = (ROOT / "README.md").read_text(), (DOCS / "faq.md").read_text()
    compared = rows(readme.partition("\n## Start")[0])
    proven = rows(readme.partition("\n## What is proven")[2])
    assert len(compared) >= 4 and len(proven) >= 5
    assert compared | proven <= rows(questions)
