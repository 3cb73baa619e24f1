"""The list of faults fits the code, and a fault is killed, survives or is timed out as it should.

The tests of the core run against the faults in `make mutants`, not here.
"""

from __future__ import annotations

import json
import subprocess
import tomllib
from pathlib import Path

import pytest

from tests.mutants import __main__ as program
from tests.mutants import judge
from tests.mutants.__main__ import LEAST, shortfalls
from tests.mutants.choose import FIRST, FileChoice, around
from tests.mutants.faults import LIST, Fault, found, listed
from tests.mutants.generate import LEFT_OUT, ROOMS, faults, generated
from tests.mutants.judge import PlantedTree

ROOT = Path(__file__).parents[2]


def test_every_fault_of_the_list_has_one_place() -> None:
    """The pattern occurs once, and the result is another program."""
    every = listed(ROOT)
    assert len(every) >= 120
    names = [(fault.file, fault.name) for fault in every]
    assert len(set(names)) == len(names)
    assert len({fault.planted((ROOT / fault.file).read_text()) for fault in every}) == len(every)
    drawn = (len(every) + 1) // 2
    assert sum(bool(fault.accepted) for fault in every) <= (1 - LEAST) * (len(every) + drawn)


def test_what_a_table_of_verdicts_lacks() -> None:
    def row(outcome: str, accepted: str = "") -> dict[str, str]:
        return {"outcome": outcome, "accepted": accepted, "name": "x", "where": "a:1", "by": "t"}

    sound = [row("killed")] * 19 + [row("survived", "no GPU")]
    assert shortfalls(sound, whole=True) == []
    assert shortfalls([*sound, row("survived", "no GPU")], whole=False) == []
    (line,) = shortfalls([*sound, row("survived", "no GPU")], whole=True)
    assert line == "19 of 21 faults were found, less than 95%"
    for bad, words in (
        (row("survived"), "no test finds x (a:1)"),
        (row("timed out"), "no test finds x (a:1)"),
        (row("killed", "no GPU"), "isn't true any more"),
    ):
        (line,) = shortfalls([row("killed")] * 99 + [bad], whole=True)
        assert words in line


@pytest.mark.parametrize(("only", "code"), [((), 1), (("--only", "a.py"), 0)])
def test_the_program_fails_by_what_the_table_lacks(
    only: tuple[str, ...],
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A share counts of every fault alone; the line that says what is wrong is printed."""
    row = {"outcome": "survived", "accepted": "no GPU", "name": "x", "where": "a:1", "by": ""}
    monkeypatch.setattr("sys.argv", ["mutants", "--generated", "0", "--out", str(tmp_path), *only])
    monkeypatch.setattr(program, "listed", lambda root: [])
    monkeypatch.setattr(program, "Court", lambda *words: None)
    monkeypatch.setattr(program, "judged", lambda *words: [{**row, "seconds": 1.0}])
    assert program.main() == code
    assert ("0 of 1 faults were found, less than 95%" in capsys.readouterr().out) == bool(code)


def test_a_test_that_found_a_fault_is_there() -> None:
    finders = json.loads(Path(__file__).with_name("found_by.json").read_text())
    entries = tomllib.loads(LIST.read_text())["fault"]
    assert finders.keys() <= {f"{entry['file']}: {entry['name']}" for entry in entries}
    for test in finders.values():
        file, _, function = test.partition("::")
        assert f"def {function.split('[')[0]}(" in (ROOT / file).read_text(), test


def test_a_fault_without_one_place_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\ny = 1\n")
    entry = {"name": "n", "file": "a.py"}
    with pytest.raises(ValueError, match=r"a\.py: n: the pattern occurs 2 times"):
        found({**entry, "old": "= 1", "new": "= 2"}, tmp_path)
    with pytest.raises(ValueError, match="occurs 0 times"):
        found({**entry, "old": "= 3", "new": "= 2"}, tmp_path)
    with pytest.raises(ValueError, match="isn't Python"):
        found({**entry, "old": "y = 1", "new": "y ="}, tmp_path)
    with pytest.raises(ValueError, match="changes nothing"):
        found({**entry, "old": "y = 1", "new": "y = 1  # one"}, tmp_path)


def test_a_seed_draws_the_same_faults_again_and_another_seed_others() -> None:
    one, again, other = (generated(ROOT, 15, seed) for seed in (1, 1, 2))
    assert one == again and len({(f.file, f.offset) for f in one}) == 15
    assert len(set(one) & set(other)) < 5
    without = generated(ROOT, 15, 1, one[:1])
    assert set(without) >= set(one[1:]) and one[0] not in without
    rooms = tuple(ROOMS)
    for fault in one:
        assert fault.file.startswith(rooms) and fault.file not in LEFT_OUT
        fault.planted((ROOT / fault.file).read_text())


def test_each_kind_of_fault_is_made() -> None:
    text = (
        'def f(a, b):\n    "Words."\n    assert a < b\n    x = g(a, b, c=a - b, d=1)\n    x.go()\n'
        '    return a < b and not x or world.sum(x, "tp")\n'
    )
    made = {(fault.name, fault.old, fault.new) for fault in faults("a.py", text)}
    assert made == {
        ("argument: first two of g swapped", "a, b", "b, a"),
        ("argument: c dropped", "c=a - b,", ""),
        ("argument: d dropped", ", d=1", ""),
        ("operator: +", "-", "+"),
        ("number: 2", "1", "2"),
        ("call: go dropped", "x.go()", "pass"),
        ("comparison: <=", "<", "<="),
        ("operator: or", "and", "or"),
        ("operator: and", "or", "and"),
        ("operator: not dropped", "not x", "x"),
        ("argument: first two of sum swapped", 'x, "tp"', '"tp", x'),
        ("axis: cp", '"tp"', '"cp"'),
    }


def test_tests_are_chosen_by_what_they_import_the_cheapest_first(tmp_path: Path) -> None:
    """The test of that name, those of the table, then importers, also by a helper of theirs."""
    for name, text in {
        "optim/clip.py": "x = 1",
        "optim/other.py": "import optim.clip",
        "train.py": "",
        "tests/helper.py": "from optim import clip",
        "tests/optim/test_clip.py": "",
        "tests/optim/test_a.py": "from optim.clip import x",
        "tests/optim/test_b.py": "from tests.helper import clip",
        "tests/optim/test_c.py": "import optim.other",
        "tests/gpu/test_d.py": "import optim.clip",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    choice = FileChoice(tmp_path, {"tests/optim/test_a.py": 9.0, "tests/optim/test_b.py": 1.0})
    chosen = choice.files("optim/clip.py")
    importers = ["tests/optim/test_b.py", "tests/optim/test_a.py"]
    assert chosen == ["tests/optim/test_clip.py", *FIRST["optim/"].split(), *importers]
    (tmp_path / "tests/optim/test_d.py").write_text("import x\nx.Clip()")
    (tmp_path / "optim/clip.py").write_text("class Clip:\n    def _norm(self):\n        x = 1\n")
    assert FileChoice(tmp_path, {}).files("optim/clip.py", 3)[1] == "tests/optim/test_d.py"
    for prefix, files in FIRST.items():
        assert (ROOT / prefix).exists() and all((ROOT / file).exists() for file in files.split())


def test_names_around_a_line_are_those_that_a_test_can_use() -> None:
    """A private function stands for its users."""
    text = (ROOT / "tests/mutants/choose.py").read_text()
    line = 1 + text[: text.index('name = f"test_{Path(changed).stem}.py"')].count("\n")
    assert around(text, line) == {"files", "FileChoice"}
    assert around(text, 1) == set()


def test_verdicts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a small checkout; its own files stay as they are."""
    root = tmp_path / "checkout"
    (root / "optim").mkdir(parents=True)
    text = "def least(a, b):\n    return a if a < b else b\n"
    (root / "optim/least.py").write_text(text)
    (root / "test_least.py").write_text(
        "from optim.least import least\n\n\n"
        "def test_one():\n    assert least(1, 2) == 1\n\n\n"
        "def test_two():\n    assert least(2, 1) == 1\n"
    )
    subprocess.run(["git", "init", "-q"], cwd=root, check=True)
    tree = PlantedTree(root, tmp_path / "work")

    def verdict(new: str) -> tuple[str, str]:
        fault = Fault("optim/least.py", "n", text.index("a < b"), "a < b", new)
        found = tree.judge(["test_least.py"], 30, fault)
        return found.outcome, found.by

    assert tree.judge(["test_least.py"], 30).outcome == "survived"
    assert verdict("a > b") == ("killed", "test_least.py::test_one")
    assert verdict("a <= b") == ("survived", "")
    assert verdict("a + b") == ("killed", "test_least.py::test_two"), "as long as the one before"
    assert verdict("a <") == ("killed", "test_least.py")
    leaves = Fault("optim/least.py", "n", 0, "def", "raise SystemExit(2)\ndef")
    assert tree.judge(["test_least.py"], 30, leaves).outcome == "killed"
    with pytest.raises(RuntimeError, match="no test ran"):
        tree.judge(["test_least.py::test_three"], 30)
    monkeypatch.setattr(judge, "STUCK_S", 2)
    late = Fault("optim/least.py", "n", 0, "def", "while True:\n    pass\ndef")
    assert tree.judge(["test_least.py"], 1, late).outcome == "timed out"
    assert (root / "optim/least.py").read_text() == text
    assert (tree.top / "optim/least.py").read_text() == text
