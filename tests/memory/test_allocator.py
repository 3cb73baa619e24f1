"""The caching allocator's model, rule by rule by hand, and what must hold of any stream."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from megacpp.memory.allocator import allocator_overhead, beside_bytes, drive, replay
from megacpp.memory.caching import MIB, CachingAllocator, Chunk
from megacpp.memory.stream import Stream, StreamBlock
from tests.memory.random_streams import by_chance

SEEDS = range(12)


def stream(*steps: int | str, on: dict[str, int] | None = None) -> Stream:
    """`"a", 5` allocates a of 5 bytes, `"-a"` frees it, `"|x"` marks; `on`: streams of blocks."""
    found, numbers = Stream(), dict[str, int]()
    rest = iter(steps)
    for word in rest:
        assert isinstance(word, str)
        if word.startswith("|"):
            found.mark(word[1:])
        elif word.startswith("-"):
            found.free(numbers.pop(word[1:]))
        else:
            size = next(rest)
            assert isinstance(size, int)
            block = StreamBlock(size, "workspace", "blocks.0", word, (on or {}).get(word, 0))
            numbers[word] = found.allocate(block)
    return found


def reserved(*steps: int | str, expandable: bool = False, on: dict[str, int] | None = None) -> int:
    return replay(stream(*steps, on=on), expandable).reserved_bytes


# ---- segments -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "block", "segment", "pages"),
    [
        (1, 512, 2 * MIB, 2 * MIB),
        (512, 512, 2 * MIB, 2 * MIB),
        (513, 1024, 2 * MIB, 2 * MIB),
        (MIB, MIB, 2 * MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB, 20 * MIB),
        # From 10 MiB on a segment of its own, of whole 2 MiB; a rest of 1 MiB isn't split off.
        (10 * MIB, 10 * MIB, 10 * MIB, 20 * MIB),
        (11 * MIB, 12 * MIB, 12 * MIB, 20 * MIB),
        (11 * MIB - 512, 11 * MIB - 512, 12 * MIB, 20 * MIB),
        (19 * MIB + 512, 20 * MIB, 20 * MIB, 20 * MIB),
        (30 * MIB, 30 * MIB, 30 * MIB, 40 * MIB),
    ],
)
def test_one_block(size: int, block: int, segment: int, pages: int) -> None:
    one = stream("a", size)
    found = replay(one)
    assert (found.requested_bytes, found.allocated_bytes) == (size, block)
    assert (found.reserved_bytes, found.fragmentation_bytes) == (segment, segment - block)
    assert found.segments == 1
    # An expandable segment grows by pages of 2 or 20 MiB and splits every rest off.
    expandable = replay(one, expandable=True)
    assert expandable.allocated_bytes == -(-size // 512) * 512
    assert expandable.reserved_bytes == pages


def test_nothing_takes_nothing() -> None:
    found = replay(stream("a", 0, "-a"))
    assert (found.allocated_bytes, found.reserved_bytes, found.segments) == (0, 0, 0)
    assert replay(Stream()).reserved_bytes == 0


def test_small_blocks_share_segments() -> None:
    assert reserved("a", MIB, "b", MIB) == 2 * MIB
    assert reserved("a", MIB, "b", MIB, "c", 1) == 4 * MIB
    # Whatever is left of a small segment is split off, down to 512 bytes.
    assert reserved("a", MIB, "b", MIB - 512, "c", 512) == 2 * MIB
    assert reserved("a", MIB, "b", MIB - 512, "c", 513) == 4 * MIB


def test_small_and_large_dont_share() -> None:
    assert reserved("a", 2 * MIB, "b", MIB) == 22 * MIB
    assert reserved("a", 2 * MIB, "-a", "b", MIB) == 22 * MIB
    assert reserved("a", MIB, "-a", "b", MIB + 512) == 22 * MIB


def test_large_blocks_share_what_is_split_off() -> None:
    assert reserved("a", 9 * MIB, "b", 9 * MIB, "c", 2 * MIB) == 20 * MIB
    assert reserved("a", 9 * MIB, "b", 9 * MIB, "c", 2 * MIB + 1) == 40 * MIB
    # 12 MiB cached: a rest of 1.5 MiB can be used, one of 1 MiB is part of the block.
    cached = ("a", 12 * MIB, "-a")
    assert reserved(*cached, "b", 10 * MIB + MIB // 2, "c", 3 * MIB // 2) == 12 * MIB
    whole = replay(stream(*cached, "b", 11 * MIB, "c", MIB + 512))
    assert (whole.reserved_bytes, whole.allocated_bytes) == (32 * MIB, 13 * MIB + 512)


# ---- free blocks --------------------------------------------------------------------------------

HOLES = ("a", 40 * MIB, "b", 30 * MIB, "c", 60 * MIB, "-a", "-b", "-c")


def test_the_best_fit_is_taken() -> None:
    # 30 is free as it is: taking it leaves 40 whole for the next.
    assert reserved(*HOLES, "d", 28 * MIB, "e", 40 * MIB, "f", 60 * MIB) == 130 * MIB
    # 41 only fits in 60, of which 19 are left: 60 doesn't fit any more.
    assert reserved(*HOLES, "d", 41 * MIB, "e", 19 * MIB, "f", 60 * MIB) == 190 * MIB


def test_equal_fits_are_taken_from_below() -> None:
    allocator = CachingAllocator()
    chunks = [_got(allocator, 20 * MIB) for _ in range(3)]
    for chunk in reversed(chunks):
        allocator.free(chunk)
    again = [_got(allocator, 20 * MIB).address for _ in range(3)]
    assert again == [chunk.address for chunk in chunks]


def test_neighbours_become_one() -> None:
    cut = ("s", 36 * MIB, "-s", "a", 12 * MIB, "b", 12 * MIB, "c", 12 * MIB)
    assert reserved(*cut, "-a", "-b", "d", 24 * MIB) == 36 * MIB
    assert reserved(*cut, "-b", "-a", "d", 24 * MIB) == 36 * MIB
    assert reserved(*cut, "-a", "-c", "-b", "d", 36 * MIB) == 36 * MIB
    # As much is free, but not side by side.
    apart = replay(stream(*cut, "-a", "-c", "d", 24 * MIB))
    assert (apart.reserved_bytes, apart.fragmentation_bytes) == (60 * MIB, 24 * MIB)


def test_segments_dont_become_one() -> None:
    assert reserved("a", 12 * MIB, "b", 12 * MIB, "-a", "-b", "c", 24 * MIB) == 48 * MIB


def test_streams_dont_share() -> None:
    steps = "a", 20 * MIB, "-a", "b", 20 * MIB
    assert reserved(*steps) == 20 * MIB
    assert reserved(*steps, on={"b": 1}) == 40 * MIB
    assert reserved(*steps, on={"b": 1}, expandable=True) == 40 * MIB
    assert replay(stream(*steps, on={"b": 1}), pools=lambda block: 0).reserved_bytes == 20 * MIB


# ---- expandable segments ------------------------------------------------------------------------


def test_expandable_segments_cure_what_grows() -> None:
    """Rows of growing length: each needs a new segment, or the same one a little longer."""
    steps = "a", 100 * MIB, "-a", "b", 120 * MIB, "-b", "c", 140 * MIB, "-c"
    assert reserved(*steps) == 360 * MIB
    assert reserved(*steps, expandable=True) == 140 * MIB


def test_expandable_segments_cure_holes_at_the_end_only() -> None:
    steps = "a", 40 * MIB, "b", 40 * MIB
    assert reserved(*steps, "-b", "c", 60 * MIB, expandable=True) == 100 * MIB
    assert reserved(*steps, "-a", "c", 60 * MIB, expandable=True) == 140 * MIB
    # Not always less: 12 MiB are a segment of 12, or a page of 20.
    assert reserved("a", 12 * MIB, expandable=True) > reserved("a", 12 * MIB)


def test_what_can_grow_is_left_for_last() -> None:
    """Two free chunks fit: the smaller one at the end counts with all that it could grow to."""
    allocator = CachingAllocator(expandable=True)
    first, kept, last = (_got(allocator, size * MIB) for size in (36, 20, 24))
    allocator.free(first)
    allocator.free(last)
    assert allocator.reserved == 80 * MIB and not kept.free
    assert _got(allocator, 24 * MIB).address == first.address
    assert _got(allocator, 40 * MIB).address == last.address
    assert allocator.reserved == 100 * MIB  # 56 + 40, in whole pages


# ---- limits -------------------------------------------------------------------------------------


def test_cached_memory_goes_back_before_it_is_too_late() -> None:
    steps = "a", 100 * MIB, "-a", "b", 120 * MIB, "-b", "c", 150 * MIB
    found = replay(stream(*steps), limit=300 * MIB)
    assert found.retries == 1 and found.out_of_memory is None
    assert found.reserved_bytes == 220 * MIB
    assert replay(stream(*steps, "|end", "-c"), limit=300 * MIB).marks == [("end", 150 * MIB)]
    assert replay(stream(*steps)).retries == 0


def test_a_segment_in_use_stays() -> None:
    steps = "a", 100 * MIB, "-a", "b", 30 * MIB, "c", 50 * MIB
    found = replay(stream(*steps, "|late", "d", 100 * MIB, "-d"), limit=190 * MIB)
    assert found.out_of_memory is not None and found.retries == 1
    failure = found.out_of_memory
    assert (failure.event, failure.block.name, failure.where) == (4, "d", "late")
    assert (failure.block.component, failure.block.bytes) == ("workspace", 100 * MIB)
    assert (failure.reserved_bytes, failure.allocated_bytes) == (100 * MIB, 80 * MIB)
    assert found.marks == []  # ended before anything of it was done
    # A growing segment uses the 20 MiB behind, and needs 80 more.
    assert replay(stream(*steps, "d", 100 * MIB), True, limit=190 * MIB).out_of_memory is None


def test_whole_pages_of_an_expandable_segment_go_back() -> None:
    """10 to 70 MiB are free: pages 20 to 60 go back, and 10 MiB stay on each side."""
    allocator = CachingAllocator(expandable=True)
    chunks = [_got(allocator, size * MIB) for size in (10, 60, 10)]
    allocator.free(chunks[1])
    allocator.release()
    assert allocator.reserved == 40 * MIB
    assert [c.bytes // MIB for c in allocator.chunks()] == [10, 10, 10, 10]
    assert _got(allocator, 40 * MIB).address == chunks[0].address + 10 * MIB  # 10 and two pages
    assert allocator.reserved == 80 * MIB
    assert _got(allocator, 20 * MIB).address == chunks[1].address + 40 * MIB
    assert allocator.reserved == 80 * MIB


# ---- any stream ---------------------------------------------------------------------------------


@pytest.mark.parametrize("expandable", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_chunks_tile_what_is_reserved(seed: int, expandable: bool) -> None:
    """After every tenth event: no overlap, no gap, free neighbours are one, and sums agree."""
    some = by_chance(seed)
    line = some.timeline()
    allocator = CachingAllocator(expandable, limit=600 * MIB)
    for event, _, chunk in drive(some, allocator):
        if chunk is None:
            break
        assert line[event] <= allocator.allocated <= allocator.reserved <= 600 * MIB
        if event % 10:
            continue
        chunks = list(allocator.chunks())
        assert sum(c.bytes for c in chunks) == allocator.reserved
        assert sum(allocator.segments.values()) == allocator.reserved
        assert sum(c.bytes for c in chunks if not c.free) == allocator.allocated
        for one, other in pairwise(chunks):
            if one.segment == other.segment:
                apart = other.address - (one.address + one.bytes)
                assert apart == 0 if one.after is other else apart > 0
                assert not (one.free and other.free and one.after is other)


@pytest.mark.parametrize("expandable", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_replay_is_consistent(seed: int, expandable: bool) -> None:
    some = by_chance(seed)
    found = replay(some, expandable)
    assert found == replay(some, expandable)
    assert found.requested_bytes == some.peak()[1]
    assert found.requested_bytes <= found.allocated_bytes <= found.reserved_bytes
    assert 0 <= found.fragmentation_bytes < found.reserved_bytes
    assert sum(found.by_component.values()) <= found.reserved_bytes - found.fragmentation_bytes
    assert [name for name, _ in found.marks] == [name for _, name in some.marks]
    assert [size for _, size in found.marks] == sorted(size for _, size in found.marks)
    assert found.marks[-1][1] == found.reserved_bytes
    # What was enough is enough; a page less than what was asked for at once is not.
    assert replay(some, expandable, limit=found.reserved_bytes) == found
    assert replay(some, expandable, limit=found.requested_bytes - 20 * MIB).out_of_memory


def test_a_second_step_reserves_nothing() -> None:
    """The same allocations again find what the first ones left."""
    steps = "a", 9 * MIB, "b", 300, "c", 70 * MIB, "-b", "d", 5 * MIB, "-a", "-c", "-d"
    again = [w + "2" if isinstance(w, str) else w for w in steps]
    assert reserved(*steps, *again) == reserved(*steps)


def test_what_is_beside_are_peaks_that_dont_coincide() -> None:
    """8 at once; but the second stream's pool keeps the 5 that it had before."""
    steps = "a", 2, "b", 5, "-b", "c", 6
    assert beside_bytes(stream(*steps)) == 0
    assert beside_bytes(stream(*steps, on={"b": 1})) == 8 + 5 - 8
    assert beside_bytes(stream(*steps, "d", 4, on={"b": 1, "d": 1})) == 8 + 5 - 12
    assert beside_bytes(Stream()) == 0


@pytest.mark.parametrize("expandable", [False, True])
def test_overhead_is_what_is_beside_and_a_share_of_all(expandable: bool) -> None:
    expected, most = allocator_overhead(1000 * MIB, expandable, 0)
    # 9 and 12 % of 1,000 MiB, and 192 MiB; expandable 5 and 10 %, and 64 MiB.
    assert [expected // MIB, most // MIB] == ([50, 164] if expandable else [90, 312])
    more = allocator_overhead(900 * MIB, expandable, 100 * MIB)
    assert more == (expected + 100 * MIB, most + 100 * MIB)
    # A layer's temporaries, or half of them, are the size of holes.
    holes = allocator_overhead(1000 * MIB, expandable, 0, one_layer=100 * MIB)
    assert holes == (expected, most + (50 if expandable else 100) * MIB)
    unknown = allocator_overhead(1000 * MIB, expandable)
    assert unknown[0] > expected and unknown[1] > most


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("seed", SEEDS)
def test_a_gpu_reserves_the_same(seed: int) -> None:
    """PyTorch's allocator on a stream that nothing has run on; sizes that don't repeat."""
    some = by_chance(seed, 200, streams=1, least=MIB + 1)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    held: dict[int, torch.Tensor] = {}
    line = []
    with torch.cuda.stream(torch.cuda.Stream()):
        for number, sign in some.changes():
            if sign > 0:
                size = some.blocks[number].bytes
                held[number] = torch.empty(size, dtype=torch.uint8, device="cuda")
            else:
                del held[number]
            line.append(torch.cuda.memory_reserved() - before)
    allocator = CachingAllocator()
    assert line == [allocator.reserved for _ in drive(some, allocator)]


def _got(allocator: CachingAllocator, size: int) -> Chunk:
    chunk = allocator.allocate(size)
    assert chunk is not None
    return chunk
