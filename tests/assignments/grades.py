"""Checks of each assignment: functions of an answer, a module, that fail by AssertionError."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from types import ModuleType

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.assignments.ranks import Link, run

Check = Callable[[ModuleType], None]


def rand(*shape: int, seed: int = 0) -> Tensor:
    """Normal numbers in fp64."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# 1: collectives


def gathers(answer: ModuleType) -> None:
    """`gather` returns the whole tensor on every rank."""
    for n in range(1, 6):
        full = rand(n * 3, 2)
        found, _ = run(n, lambda link, f=full: answer.gather(link, f.chunk(link.world)[link.rank]))
        assert all(torch.equal(each, full) for each in found), f"{n} ranks"


def reduces(answer: ModuleType) -> None:
    """`reduce_scatter` returns the sum of each rank's part."""
    for n in range(1, 6):
        full = [rand(n * 2, 3, seed=r) for r in range(n)]
        found, _ = run(n, lambda link, f=full: answer.reduce_scatter(link, f[link.rank]))
        want = torch.stack(full).sum(0).chunk(n)
        for each, part in zip(found, want, strict=True):
            torch.testing.assert_close(each, part, rtol=0, atol=1e-12)


def sends_one_part_a_hop(answer: ModuleType) -> None:
    """A rank sends `world - 1` messages of one part each, to the next rank."""
    n = 4
    for fn, shape in ((answer.gather, (3, 2)), (answer.reduce_scatter, (12, 2))):
        _, links = run(n, lambda link, fn=fn, shape=shape: fn(link, rand(*shape)))
        for link in links:
            assert link.sent == [((link.rank + 1) % n, 6)] * (n - 1), (link.rank, link.sent)


def transposes(answer: ModuleType) -> None:
    """`<gather(x), y> = <x, reduce_scatter(y)>`, summed over ranks."""
    n = 3

    def both(link: Link) -> tuple[Tensor, Tensor]:
        x, y = rand(2, seed=link.rank), rand(6, seed=10 + link.rank)
        return answer.gather(link, x) @ y, x @ answer.reduce_scatter(link, y)

    one, other = (sum(each) for each in zip(*run(n, both)[0], strict=True))
    torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


# 2: a context split


def holds_a_head_and_its_tail(answer: ModuleType) -> None:
    """Every position has one rank; rank r has chunks r and 2 world - 1 - r."""
    for n in range(1, 9):
        held = [answer.positions(r, n, 6 * n) for r in range(n)]
        assert sorted(p for each in held for p in each) == list(range(6 * n)), f"{n} ranks"
        assert all(a < b for each in held for a, b in pairwise(each)), "ascending"
        chunks = [{p // 3 for p in each} for each in held]
        assert chunks == [{r, 2 * n - 1 - r} for r in range(n)], chunks


def shares_pairs_equally(answer: ModuleType) -> None:
    """All ranks have the same number of causal pairs."""
    for n in range(1, 9):
        pairs = {sum(p + 1 for p in answer.positions(r, n, 16 * n)) for r in range(n)}
        assert len(pairs) == 1, f"{n} ranks have {pairs} pairs"


def joins(answer: ModuleType) -> None:
    """`join` of all parts is the row."""
    for n, row in ((1, rand(4)), (3, rand(12, 2)), (4, rand(16, 2, 3))):
        parts = [answer.split(row, r, n) for r in range(n)]
        held = [answer.positions(r, n, len(row)) for r in range(n)]
        assert all(torch.equal(p, row[h]) for p, h in zip(parts, held, strict=True)), "split"
        assert torch.equal(answer.join(parts), row), f"{n} ranks"


def refuses_ragged(answer: ModuleType) -> None:
    """A length that doesn't divide is a ValueError."""
    for n, length in ((4, 20), (4, 17), (3, 13), (2, 6), (4, 21)):
        try:
            answer.positions(0, n, length)
        except ValueError:
            continue
        raise AssertionError(f"{length} tokens on {n} ranks were accepted")


# 3: a timetable

SIZES = [(stages, n) for stages in range(1, 6) for n in range(1, 10)]


def runs_all_once(answer: ModuleType) -> None:
    """Each stage runs F and B of each microbatch once, F before B."""
    for stages, n in SIZES:
        for s in range(stages):
            got = answer.timetable(s, stages, n)
            want = {(way, i) for way in "FB" for i in range(n)}
            assert len(got) == 2 * n and set(got) == want, (stages, n, s)
            assert all(got.index(("F", i)) < got.index(("B", i)) for i in range(n)), (stages, n, s)


def length(answer: ModuleType, stages: int, n: int) -> int:
    """Time of a step: a forward is 1, a backward 2, each as early as it can be."""
    left = [list(answer.timetable(s, stages, n)) for s in range(stages)]
    free, ends, moved = [0] * stages, {}, True
    while any(left):
        assert moved, f"stages {stages}, microbatches {n}: all wait for each other: {left}"
        moved = False
        for s in range(stages):
            while left[s]:
                way, i = left[s][0]
                if way == "F":
                    before = (way, i, s - 1) if s else None
                else:
                    before = (way, i, s + 1) if s + 1 < stages else ("F", i, s)
                if before is not None and before not in ends:
                    break
                start = max(free[s], ends[before] if before else 0)
                free[s] = ends[way, i, s] = start + (1 if way == "F" else 2)
                left[s].pop(0)
                moved = True
    return max(free)


def finishes(answer: ModuleType) -> None:
    """The stages never wait for each other for ever."""
    for stages, n in SIZES:
        length(answer, stages, n)


def keeps_few_alive(answer: ModuleType) -> None:
    """Stage s has at most min(stages - s, microbatches) microbatches under way."""
    for stages, n in SIZES:
        for s in range(stages):
            alive = most = 0
            for way, _ in answer.timetable(s, stages, n):
                alive += 1 if way == "F" else -1
                most = max(most, alive)
            assert most <= min(stages - s, n), f"stage {s} of {stages}, {n}: {most} under way"


def wastes_no_time(answer: ModuleType) -> None:
    """The step takes 3 (microbatches + stages - 1)."""
    for stages, n in SIZES:
        found = length(answer, stages, n)
        assert found == 3 * (n + stages - 1), f"{stages} stages, {n} microbatches: {found}"


# 4: owners


def deals(answer: ModuleType) -> None:
    """The costliest matrix goes to the least loaded rank."""
    assert list(answer.owners([1, 5, 3, 3], 2)) == [0, 0, 1, 1]
    for world in (1, 3, 4):
        costs = [int(c) for c in (rand(20, seed=world).abs() * 100 + 1)]
        load = [0] * world
        for cost, rank in zip(costs, answer.owners(costs, world), strict=True):
            load[rank] += cost
        assert max(load) <= sum(costs) / world + max(costs), load
        order = sorted(range(20), key=lambda i: -costs[i])
        want, seen = dict[int, int](), [0] * world
        for i in order:
            want[i] = seen.index(min(seen))
            seen[want[i]] += costs[i]
        assert list(answer.owners(costs, world)) == [want[i] for i in range(20)], world


def whole(x: Tensor) -> Tensor:
    """Orthogonal factor of a whole matrix: no rank can have it of its rows alone."""
    u, _, v = torch.linalg.svd(x, full_matrices=False)
    return u @ v


ROWS = {1: (5,), 2: (2, 4), 3: (3, 1, 2), 4: (1, 2, 2, 1)}


def updated(
    answer: ModuleType, world: int
) -> tuple[list[list[Tensor]], list[Tensor], list[Link], list[tuple[int, int]]]:
    """Rows on each rank, whole matrices, links, and (rank, matrix) of what was orthogonalised."""
    owner = [(3 * i + 1) % world for i in range(5)]
    matrices = [rand(sum(ROWS[world]), 3 + i, seed=i) for i in range(5)]
    solved: list[tuple[int, int]] = []

    def step(link: Link) -> list[Tensor]:
        def solve(x: Tensor) -> Tensor:
            solved.append((link.rank, x.shape[1] - 3))
            return whole(x)

        own = [m.split(ROWS[world])[link.rank] for m in matrices]
        return answer.update(link, own, owner, solve)

    results, links = run(world, step)
    return results, matrices, links, solved


def sees_whole_matrices(answer: ModuleType) -> None:
    """The result is the rows of the orthogonalised whole matrix, bit for bit."""
    for world in ROWS:
        results, matrices, _, _ = updated(answer, world)
        for i, matrix in enumerate(matrices):
            found = torch.cat([each[i] for each in results])
            assert torch.equal(found, whole(matrix)), f"{world} ranks, matrix {i}"


def solves_once(answer: ModuleType) -> None:
    """Each matrix is orthogonalised once, by its owner."""
    for world in ROWS:
        *_, solved = updated(answer, world)
        assert sorted(solved) == sorted(((3 * i + 1) % world, i) for i in range(5)), solved


def sends_there_and_back(answer: ModuleType) -> None:
    """Each matrix travels once to its owner and once back, without the owner's rows."""
    for world, rows in ROWS.items():
        _, matrices, links, _ = updated(answer, world)
        want = sum(
            2 * m.shape[1] * (len(m) - rows[(3 * i + 1) % world]) for i, m in enumerate(matrices)
        )
        found = sum(elements for link in links for _, elements in link.sent)
        assert found == want, f"{world} ranks send {found} elements instead of {want}"


# 5: ring attention


class Largest(TorchDispatchMode):
    """Most elements that a result of an operator had."""

    def __init__(self) -> None:
        """Begin with none."""
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Run the operator and look at what it returns."""
        out = func(*args, **(kwargs or {}))
        for each in out if isinstance(out, tuple | list) else (out,):
            if isinstance(each, Tensor):
                self.elements = max(self.elements, each.numel())
        return out


def parts_of(length: int, world: int, head_tail: bool) -> list[list[int]]:
    """Positions on each rank."""
    if not head_tail:
        return [list(range(r * length // world, (r + 1) * length // world)) for r in range(world)]
    n = length // (2 * world)
    return [[c * n + i for c in (r, 2 * world - 1 - r) for i in range(n)] for r in range(world)]


def attended(
    answer: ModuleType, world: int, head_tail: bool = False, scale: float = 1.0
) -> tuple[list[Link], list[int]]:
    """Compare with attention over the whole row; return links and the largest tensors."""
    q, k, v = (rand(2, 24, 3, seed=s) * scale for s in range(3))
    where = parts_of(24, world, head_tail)
    score = (q @ k.mT / math.sqrt(3)).masked_fill(torch.ones(24, 24).triu(1).bool(), -torch.inf)
    want = score.softmax(-1) @ v

    def one(link: Link) -> tuple[Tensor, int]:
        own = [x[:, where[link.rank]] for x in (q, k, v)]
        with Largest() as largest:
            return answer.ring_attention(link, *own, where), largest.elements

    results, links = run(world, one)
    for (found, _), held in zip(results, where, strict=True):
        torch.testing.assert_close(found, want[:, held], rtol=1e-12, atol=1e-12 * scale)
    return links, [elements for _, elements in results]


def attends_contiguous(answer: ModuleType) -> None:
    """Equal to whole attention, contiguous parts."""
    for world in (1, 2, 3, 4):
        attended(answer, world)


def attends_head_tail(answer: ModuleType) -> None:
    """Equal to whole attention, head-tail parts."""
    for world in (1, 2, 3, 4):
        attended(answer, world, head_tail=True)


def survives_large_scores(answer: ModuleType) -> None:
    """Scores of 1,000 and more overflow nothing."""
    attended(answer, 3, head_tail=True, scale=50.0)


def sends_blocks_around(answer: ModuleType) -> None:
    """Each rank sends the next one `world - 1` blocks of keys and values."""
    for world in (2, 3, 4):
        for link in attended(answer, world)[0]:
            assert {to for to, _ in link.sent} == {(link.rank + 1) % world}, link.sent
            total = sum(elements for _, elements in link.sent)
            assert total == (world - 1) * 2 * (2 * 24 // world * 3), total


def holds_one_block(answer: ModuleType) -> None:
    """No tensor is larger than the scores of one block."""
    most = max(attended(answer, 2)[1])
    assert most <= 2 * 12 * 12, f"a tensor of {most} elements, scores of one block are 288"


ASSIGNMENTS: dict[int, tuple[str, tuple[Check, ...]]] = {
    1: ("collectives", (gathers, reduces, sends_one_part_a_hop, transposes)),
    2: ("context_split", (holds_a_head_and_its_tail, shares_pairs_equally, joins, refuses_ragged)),
    3: ("timetable", (runs_all_once, finishes, keeps_few_alive, wastes_no_time)),
    4: ("owners", (deals, sees_whole_matrices, solves_once, sends_there_and_back)),
    5: (
        "ring_attention",
        (
            attends_contiguous,
            attends_head_tail,
            survives_large_scores,
            sends_blocks_around,
            holds_one_block,
        ),
    ),
}
