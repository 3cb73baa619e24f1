"""Reference pages: made from today's program; files of a real run folder each have a row."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bench import reference
from megacpp.cli.main import COMMANDS
from megacpp.config.schema import Config
from megacpp.config.settings import settings_of
from megacpp.data.prepare import CorpusSpec, ensure_corpus
from megacpp.errors import EXIT_CODES
from tests.launch import forked
from tests.test_run import SMALL

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("page", reference.PAGES)
def test_a_page_is_that_of_todays_program(page: str) -> None:
    text = (reference.FOLDER / page).read_text()
    assert text == reference.PAGES[page](), "python -m bench.reference --write"


def test_nothing_is_left_out() -> None:
    settings = reference.settings_page()
    assert all(f"| `{one.flag}` |" in settings for one in settings_of(Config).values())
    commands = reference.commands_page()
    assert all(f"\n## megacpp {name}\n" in commands for name in COMMANDS)
    assert all(f"\n| {code} | {words} |" in commands for code, words in EXIT_CODES.items())


def test_what_chapters_import_has_a_row() -> None:
    found = reference.imported_by_chapters()
    assert found["megacpp.data.prepare"]["ensure_corpus"][0].name == "01-the-run.md"
    page = reference.functions_page()
    assert page.count("\n| [`") > 150 and "`Config`" not in page and "lessons.ranks" not in page
    row = next(line for line in page.splitlines() if line.startswith("| [`clip_gradients`]"))
    assert "(../../optim/clip.py)`(" in row and row.endswith("[46](../46-one-nan.md) |")


def row_of(file: str) -> list[str]:
    """Rows of the table that match a file of a run folder."""
    found = []
    for name in reference.FILES:
        pattern = re.escape(name).replace(r"\*", ".*").replace("N", r"\d+")
        if re.fullmatch(pattern, file):
            found.append(name)
    return found


def test_every_file_of_a_run_has_one_row(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    for i in range(40):
        lines = (f"int add_{i}_{j}(int a) {{ return a + {j}; }}\n" for j in range(9))
        (tmp_path / f"src/file_{i}.h").write_text("".join(lines))
    ensure_corpus(CorpusSpec(source=str(tmp_path / "src"), vocab_size=300), tmp_path / "corpus")
    flags = ["--data.path", str(tmp_path / "corpus"), "--run.dir", str(tmp_path / "run")]
    flags += "--run.steps 2 --memory.snapshot-every 2 --run.eval-rows 2".split()
    flags += ["--memory.calibration", str(tmp_path / "off-by")]
    done = forked("tiny", *SMALL, *flags)
    assert done.returncode == 0, done.stderr
    files = [str(p.relative_to(tmp_path / "run")) for p in (tmp_path / "run").rglob("*")
             if p.is_file()]  # fmt: skip
    assert len(files) > 15
    rows = {file: row_of(file) for file in files}
    assert not {file: found for file, found in rows.items() if len(found) != 1}


@pytest.mark.parametrize("name", reference.FILES)
def test_the_writer_of_a_file_names_it(name: str) -> None:
    text = (ROOT / reference.FILES[name][0]).read_text()
    part = max(re.split(r"[/N*]", name), key=lambda piece: (piece in text, len(piece)))
    assert len(part) >= 4 and part in text, (name, part)
