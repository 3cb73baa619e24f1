"""Chunks, pools and segments of a GPU's caching allocator, modelled without a GPU.

    allocator = CachingAllocator()
    chunk = allocator.allocate(5 * MIB)
    allocator.reserved        # 20 MiB: a segment of the large pool
    allocator.free(chunk)

The model follows PyTorch's native CUDA allocator with its default settings, or with expandable
segments. Memory comes from the device in segments and goes back only when the device has none left.
A request takes the smallest free chunk of its pool that fits, and the rest is split off; free
neighbours are merged. A pool belongs to a stream of the device: memory freed on one stream isn't
reused by another. Source: c10/cuda/CUDACachingAllocator.cpp and
https://pytorch.org/docs/stable/notes/cuda.html.

Not modelled: events of other streams (a block that another stream still uses can be taken at once),
`max_split_size_mb`, `roundup_power2_divisions`, garbage collection, graphs' private pools.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

MIB = 2**20
ROUND = 512  # every size is a multiple, and so is the least that is split off a small block
SMALL = MIB  # requests up to it come from the small pool
SMALL_SEGMENT = 2 * MIB
LARGE_SEGMENT = 20 * MIB
OWN_SEGMENT = 10 * MIB  # requests from it on get a segment of their size ...
OWN_ROUND = 2 * MIB  # ... rounded up to this
FIRST_ADDRESS = 2**40
GAP = 2 * MIB  # between segments: no two are neighbours
ADDRESSES = 2**44  # of an expandable segment; only what is mapped is memory

Action = Literal[
    "alloc", "free", "segment_alloc", "segment_free", "segment_map", "segment_unmap", "oom"
]
Listener = Callable[[Action, int, int, int], None]  # action, address, bytes, stream


def rounded(size: int) -> int:
    """Return the bytes of the block that a request gets."""
    return max(ROUND, -(-size // ROUND) * ROUND)


def segment_bytes(size: int) -> int:
    """Return bytes asked of the device for a rounded request that no free block fits."""
    if size <= SMALL:
        return SMALL_SEGMENT
    if size < OWN_SEGMENT:
        return LARGE_SEGMENT
    return -(-size // OWN_ROUND) * OWN_ROUND


@dataclass(eq=False, slots=True)
class Chunk:
    """Contiguous part of a segment: in use, free, or (in an expandable segment) not mapped."""

    address: int
    bytes: int
    pool: Pool
    segment: int  # address
    free: bool = True
    mapped: bool = True
    before: Chunk | None = None
    after: Chunk | None = None

    @property
    def key(self) -> tuple[int, int]:
        """Sort key in a pool: bytes, then address."""
        return self.bytes, self.address

    @property
    def room(self) -> int:
        """Bytes that the chunk can grow to, if the chunk after it isn't mapped."""
        after = self.after
        return self.bytes + (after.bytes if after is not None and not after.mapped else 0)


@dataclass(eq=False, slots=True)
class Pool:
    """Free chunks of one stream, small or large, by size, then address."""

    stream: int
    small: bool
    free: list[tuple[int, int]] = field(default_factory=list)
    chunks: dict[int, Chunk] = field(default_factory=dict)  # free ones, by address
    tails: list[Chunk] = field(default_factory=list)  # what isn't mapped

    def put(self, chunk: Chunk) -> None:
        """Add a free chunk."""
        insort(self.free, chunk.key)
        self.chunks[chunk.address] = chunk

    def take(self, chunk: Chunk) -> None:
        """Remove a chunk that is about to be used."""
        del self.free[bisect_left(self.free, chunk.key)]
        del self.chunks[chunk.address]

    def fitting(self, size: int, expandable: bool) -> Chunk | None:
        """Return the best free chunk for `size` bytes; None: none fits.

        Expandable chunks are compared by the bytes that they can grow to.
        """
        place = bisect_left(self.free, (size, 0))
        if place == len(self.free):
            return None
        chunk = self.chunks[self.free[place][1]]
        while expandable and (place := place + 1) < len(self.free):
            other = self.chunks[self.free[place][1]]
            if other.room >= chunk.room:
                break
            chunk = other
        return chunk


class CachingAllocator:
    """Reserved memory of a device, and the chunks that it is divided into.

    Args:
        expandable: one growing segment for each pool (`expandable_segments:True`).
        limit: bytes that may be reserved; None: any.
        listener: is called at every change.

    Attributes:
        reserved, allocated: bytes now; `allocated` in whole blocks.
        segments: bytes by address of each segment (mapped bytes, of expandable segments).
        retries: times that cached memory had to be given back to the device first.
    """

    def __init__(
        self,
        expandable: bool = False,
        limit: int | None = None,
        listener: Listener | None = None,
    ) -> None:
        self.expandable, self.limit, self._tell = expandable, limit, listener
        self.reserved = self.allocated = self.retries = 0
        self.segments: dict[int, int] = {}
        self._heads: dict[int, Chunk] = {}  # the first chunk of each segment
        self._pools: dict[tuple[int, bool], Pool] = {}
        self._next = FIRST_ADDRESS

    def allocate(self, size: int, stream: int = 0) -> Chunk | None:
        """Return a chunk for a request of `size` bytes; None: out of memory.

        A request of 0 bytes gets an empty chunk.
        """
        small = size <= SMALL
        pool = self._pools.get((stream, small))
        if pool is None:
            pool = self._pools[stream, small] = Pool(stream, small)
        if not size:
            return Chunk(0, 0, pool, 0, free=False)
        size = rounded(size)
        chunk = pool.fitting(size, self.expandable)
        if chunk is not None:
            pool.take(chunk)
        else:
            chunk = self._more(pool, segment_bytes(size))
            if chunk is None:
                self.release()
                self.retries += 1
                chunk = self._more(pool, segment_bytes(size))
            if chunk is None:
                self._note("oom", 0, size, stream)
                return None
        self._split(chunk, size)
        chunk.free = False
        self.allocated += chunk.bytes
        self._note("alloc", chunk.address, chunk.bytes, stream)
        return chunk

    def free(self, chunk: Chunk) -> None:
        """Return a chunk to its pool, merged with its free neighbours."""
        assert not chunk.free, "freed twice"
        self.allocated -= chunk.bytes
        chunk.free = True
        if chunk.bytes:
            self._note("free", chunk.address, chunk.bytes, chunk.pool.stream)
            chunk.pool.put(self._joined(chunk))

    def release(self) -> None:
        """Give cached memory back to the device: whole segments, or pages of expandable ones."""
        for pool in self._pools.values():
            for chunk in list(pool.chunks.values()):
                if self.expandable:
                    self._unmap(chunk)
                elif chunk.before is None and chunk.after is None:
                    pool.take(chunk)
                    self._reserve("segment_free", chunk.address, -chunk.bytes, pool.stream)
                    del self.segments[chunk.address], self._heads[chunk.address]

    def chunks(self) -> Iterator[Chunk]:
        """Yield all mapped chunks, segment by segment, by address."""
        for head in self._heads.values():
            chunk: Chunk | None = head
            while chunk is not None:
                if chunk.mapped:
                    yield chunk
                chunk = chunk.after

    # ---- segments -----------------------------------------------------------------------------

    def _more(self, pool: Pool, size: int) -> Chunk | None:
        """Return a new chunk of at least `size` bytes, in no list; None: over the limit."""
        if self.expandable:
            return self._grown(pool, size)
        if not self._fits(size):
            return None
        chunk = Chunk(self._next, size, pool, self._next)
        self._next += size + GAP
        self.segments[chunk.address], self._heads[chunk.address] = size, chunk
        self._reserve("segment_alloc", chunk.address, size, pool.stream)
        return chunk

    def _grown(self, pool: Pool, size: int) -> Chunk | None:
        """Return a chunk of `size` mapped bytes, in no list; None: over the limit.

        The chunk starts at the lowest address with enough adjacent free and unmapped memory.
        """
        place = next((c for c in map(_start, pool.tails) if _has_room(c, size)), None)
        if place is None:
            place = Chunk(self._next, ADDRESSES, pool, self._next, mapped=False)
            self._next += ADDRESSES
            pool.tails.append(place)
            self.segments[place.address], self._heads[place.address] = 0, place
        if not place.mapped:
            mapped = self._map(place, size)
            if mapped is None:
                return None
            place = mapped
        while place.bytes < size:
            assert place.after is not None
            mapped = self._map(place.after, size - place.bytes)
            if mapped is None:
                return None
            place = mapped
        pool.take(place)
        return place

    def _map(self, tail: Chunk, size: int) -> Chunk | None:
        """Map the pages of a tail's first `size` bytes; return the free chunk that holds them."""
        page = SMALL_SEGMENT if tail.pool.small else LARGE_SEGMENT
        pages = min(tail.bytes, -(-size // page) * page)
        if not self._fits(pages):
            return None
        tail.pool.tails.remove(tail)
        if tail.bytes > pages:
            rest = _behind(tail, pages)
            rest.mapped = False
            insort(tail.pool.tails, rest, key=_address)
        tail.mapped = True
        self.segments[tail.segment] += pages
        self._reserve("segment_map", tail.address, pages, tail.pool.stream)
        tail.pool.put(joined := self._joined(tail))
        return joined

    def _unmap(self, chunk: Chunk) -> None:
        """Give back the whole pages inside a free chunk."""
        pool = chunk.pool
        page = SMALL_SEGMENT if pool.small else LARGE_SEGMENT
        offset = chunk.address - chunk.segment
        ahead = -offset % page
        inside = (offset + chunk.bytes) // page * page - (offset + ahead)
        if inside <= 0:
            return
        pool.take(chunk)
        if ahead:
            pages = _behind(chunk, ahead)
            pool.put(chunk)
            chunk = pages
        if chunk.bytes > inside:
            pool.put(_behind(chunk, inside))
        self.segments[chunk.segment] -= chunk.bytes
        self._reserve("segment_unmap", chunk.address, -chunk.bytes, pool.stream)
        chunk.mapped = False
        insort(pool.tails, self._joined(chunk), key=_address)

    # ---- chunks -------------------------------------------------------------------------------

    def _split(self, chunk: Chunk, size: int) -> None:
        """Cut a chunk to `size` bytes and put the rest into its pool, if it is large enough."""
        rest = chunk.bytes - size
        if rest >= ROUND if chunk.pool.small or self.expandable else rest > SMALL:
            chunk.pool.put(_behind(chunk, size))

    def _joined(self, chunk: Chunk) -> Chunk:
        """Merge a chunk with neighbours that are free (or unmapped) like it; it is in no list."""
        for other in (chunk.before, chunk.after):
            if other is None or not other.free or other.mapped != chunk.mapped:
                continue
            if other.mapped:
                other.pool.take(other)
            else:
                other.pool.tails.remove(other)
            first, second = (other, chunk) if other is chunk.before else (chunk, other)
            first.bytes += second.bytes
            first.after = second.after
            if second.after is not None:
                second.after.before = first
            chunk = first
        return chunk

    # ---- accounts -----------------------------------------------------------------------------

    def _fits(self, size: int) -> bool:
        return self.limit is None or self.reserved + size <= self.limit

    def _reserve(self, action: Action, address: int, size: int, stream: int) -> None:
        self.reserved += size
        self._note(action, address, abs(size), stream)

    def _note(self, action: Action, address: int, size: int, stream: int) -> None:
        if self._tell is not None:
            self._tell(action, address, size, stream)


def _behind(chunk: Chunk, size: int) -> Chunk:
    """Cut a chunk to `size` bytes and return the rest as a new chunk, in no list."""
    new = Chunk(chunk.address + size, chunk.bytes - size, chunk.pool, chunk.segment)
    chunk.bytes = size
    new.before, new.after = chunk, chunk.after
    if chunk.after is not None:
        chunk.after.before = new
    chunk.after = new
    return new


def _address(chunk: Chunk) -> int:
    return chunk.address


def _start(tail: Chunk) -> Chunk:
    """Return the chunk where growth into a tail begins: a free one before it, else the tail."""
    return tail.before if tail.before is not None and tail.before.free else tail


def _has_room(chunk: Chunk | None, size: int) -> bool:
    found = 0
    while found < size and chunk is not None and chunk.free:
        found += chunk.bytes
        chunk = chunk.after
    return found >= size
