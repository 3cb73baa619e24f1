"""Assignments: every check passes on the reference and fails on the stub; wrong answers fail."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.assignments import __main__ as command
from tests.assignments import grades
from tests.assignments.grades import ASSIGNMENTS

SOLUTIONS = Path(__file__).parent / "solutions"
CHECKS = [(n, check) for n, (_, checks) in ASSIGNMENTS.items() for check in checks]
IDS = [f"{n}-{check.__name__}" for n, check in CHECKS]


@pytest.mark.parametrize(("number", "check"), CHECKS, ids=IDS)
def test_a_reference_passes_and_a_stub_fails(number: int, check: Any) -> None:
    name = f"{ASSIGNMENTS[number][0]}.py"
    check(command.load(SOLUTIONS / name))
    with pytest.raises(NotImplementedError):
        check(command.load(command.STUBS / name))


def reference(number: int) -> Any:
    return command.load(SOLUTIONS / f"{ASSIGNMENTS[number][0]}.py")


def all_gather_by_all(link: Any, shard: Any) -> Any:
    """Sends to everybody: right, and as many bytes, but no ring."""
    import torch

    for to in range(link.world):
        if to != link.rank:
            link.send(to, shard)
    return torch.cat([shard if r == link.rank else link.receive(r) for r in range(link.world)])


def gpipe(stage: int, stages: int, microbatches: int) -> list[tuple[str, int]]:
    return [(way, i) for way in "FB" for i in range(microbatches)]


def one_at_a_time(stage: int, stages: int, microbatches: int) -> list[tuple[str, int]]:
    return [(way, i) for i in range(microbatches) for way in "FB"]


def contiguous(rank: int, world: int, length: int) -> list[int]:
    return list(range(rank * length // world, (rank + 1) * length // world))


def odd_chunks(rank: int, world: int, length: int) -> list[int]:
    """Refuses an odd number of tokens a rank, and loses what is left over."""
    if (length // world) % 2:
        raise ValueError(length)
    n = length // (2 * world)
    return [c * n + i for c in (rank, 2 * world - 1 - rank) for i in range(n)]


def by_everybody(link: Any, shards: Any, owner: Any, orthogonalise: Any) -> Any:
    """Each rank orthogonalises all matrices."""
    import torch

    found = []
    for shard in shards:
        for to in range(link.world):
            if to != link.rank:
                link.send(to, shard)
        parts = [shard if r == link.rank else link.receive(r) for r in range(link.world)]
        sizes = [len(p) for p in parts]
        found.append(orthogonalise(torch.cat(parts)).split(sizes)[link.rank])
    return found


def whole_keys(link: Any, q: Any, k: Any, v: Any, positions: Any) -> Any:
    """Passes blocks around, and attends to all of them at once."""
    import torch

    n, r, blocks = link.world, link.rank, {link.rank: (k, v)}
    for hop in range(1, n):
        for each in blocks[(r - hop + 1) % n]:
            link.send((r + 1) % n, each)
        blocks[(r - hop) % n] = (link.receive((r - 1) % n), link.receive((r - 1) % n))
    k, v = (torch.cat([blocks[i][j] for i in range(n)], 1) for j in (0, 1))
    there = torch.tensor([p for each in positions for p in each])
    hidden = there[None] > torch.tensor(positions[r])[:, None]
    score = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(hidden, -torch.inf)
    return score.softmax(-1) @ v


WRONG = [
    (1, {"gather": all_gather_by_all}, {"sends_one_part_a_hop"}),
    (1, {"reduce_scatter": lambda link, x: x.chunk(link.world)[link.rank]},
     {"reduces", "sends_one_part_a_hop", "transposes"}),
    (2, {"positions": contiguous},
     {"holds_a_head_and_its_tail", "shares_pairs_equally", "joins", "refuses_ragged"}),
    (2, {"positions": odd_chunks}, {"refuses_ragged"}),
    (3, {"timetable": gpipe}, {"keeps_few_alive"}),
    (3, {"timetable": one_at_a_time}, {"wastes_no_time"}),
    (4, {"owners": lambda costs, world: [i % world for i in range(len(costs))]}, {"deals"}),
    (4, {"update": by_everybody}, {"solves_once", "sends_there_and_back"}),
    (5, {"ring_attention": whole_keys}, {"holds_one_block"}),
]  # fmt: skip


@pytest.mark.parametrize(("number", "changed", "caught"), WRONG)
def test_a_wrong_answer_fails_the_checks_of_its_fault(
    number: int, changed: Any, caught: Any
) -> None:
    answer: Any = SimpleNamespace(**(vars(reference(number)) | changed))
    failed = set()
    for check in ASSIGNMENTS[number][1]:
        try:
            check(answer)
        except AssertionError:
            failed.add(check.__name__)
    assert failed == caught


def test_the_command_copies_a_stub_then_grades(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "ANSWERS", tmp_path / "answers")
    assert command.main(["3"]) == 1
    assert capsys.readouterr().out.count("\ntodo ") == 4
    solution = (SOLUTIONS / "timetable.py").read_text()
    (tmp_path / "answers/timetable.py").write_text(solution)
    assert command.main(["3"]) == 0
    assert capsys.readouterr().out.count("\nok ") == 4
    broken = solution.replace("stages - stage - 1", "stages - stage")
    assert broken != solution
    (tmp_path / "answers/timetable.py").write_text(broken)
    assert command.main(["3"]) == 1
    assert "FAILED Stage s has at most" in capsys.readouterr().out
    (tmp_path / "answers/timetable.py").write_text("def timetable(:")
    assert command.main(["3"]) == 1
    assert "FAILED your answer can be imported: SyntaxError:" in capsys.readouterr().out
    assert command.main(["9"]) == 2
    assert capsys.readouterr().out.startswith("error: N=9: must be one of 1, 2, 3, 4, 5. Fix: ")


def test_statements_list_a_check_each() -> None:
    import re

    for number, (name, checks) in ASSIGNMENTS.items():
        text = next(command.STUBS.glob(f"{number}-*.md")).read_text()
        graded = text.split("## What is graded")[1]
        assert len(re.findall(r"^\d\. ", graded, re.M)) == len(checks), name
        assert f"({name}.py)" in text
        page = (command.STUBS / "README.md").read_text()
        assert f"({next(command.STUBS.glob(f'{number}-*.md')).name})" in page
    assert grades.ASSIGNMENTS.keys() == {1, 2, 3, 4, 5}
