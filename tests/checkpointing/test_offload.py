"""Offload: same gradients, fewer bytes, in order, within bounds; on CPU tensors."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from checkpointing.host_memory import CudaCopies, HostMemory, PlainCopies
from checkpointing.offload import MIB, Offloader, offloaded
from checkpointing.tracing.live_bytes import LiveBytes
from megacpp.model.hybrid import HybridLM
from megacpp.model.init import initialise
from tests.checkpointing.offload_cases import (
    HOST,
    LateCopies,
    equal,
    gradients,
    mlp,
    offloader,
    rows,
)
from tests.model.small import small


@pytest.mark.parametrize("copies", [PlainCopies, LateCopies])
@pytest.mark.parametrize("window_bytes", [0, 4096, HOST])
def test_gradients_of_plain_modules(copies: type[PlainCopies], window_bytes: int) -> None:
    model, x = mlp(), rows()
    moved = offloader(window_bytes=window_bytes, copies=copies())

    def loss() -> Tensor:
        with offloaded(moved, model):
            return model(x).square().mean()

    plain = gradients(model, lambda: model(x).square().mean())
    for _ in range(3):
        assert equal(plain, gradients(model, loss))
    assert moved.traffic.out_bytes > 0
    assert (moved.traffic.back_bytes > 0) == (window_bytes < HOST)


@pytest.mark.parametrize("copies", [PlainCopies, LateCopies])
def test_gradients_of_a_hybrid(copies: type[PlainCopies]) -> None:
    model = HybridLM(small())
    initialise(model, model.init_rules(), 0)
    ids_BT = torch.randint(50, (2, 16), generator=torch.Generator().manual_seed(2))
    moved = offloader(64, window_bytes=4096, copies=copies())

    def loss() -> Tensor:
        with offloaded(moved, model):
            return model(ids_BT, ids_BT).loss_sum

    plain = gradients(model, lambda: model(ids_BT, ids_BT).loss_sum)
    for _ in range(2):
        assert equal(plain, gradients(model, loss))
    assert moved.traffic.out_bytes > moved.traffic.back_bytes > 10 * 4096


@pytest.mark.parametrize("window_bytes", [0, 6000])
def test_device_bytes_drop_by_what_was_moved(window_bytes: int) -> None:
    """Alive after the forward: host buffers apart, less by all that left the device."""
    model, x = mlp(), rows()

    with LiveBytes() as live:
        out = model(x).square().mean()
        plain = live.alive()
        del out
        base = live.alive()
        moved = offloader(2000, window_bytes=window_bytes)
        with offloaded(moved, model):
            out = model(x).square().mean()
        device = live.alive() - moved.memory.held_bytes
    in_window = window_bytes // 2048 * 2048
    # Two of 16 x 32 floats a layer; the first input is the caller's, made before the block.
    left = moved.traffic.out_bytes - in_window
    ours = left - 2048
    assert moved.traffic.out_bytes == 9 * 2048 and left > 0
    assert base == 0 and plain - device == ours
    del out
    gc.collect()
    assert moved.memory.held_bytes == 9 * 2048
    moved.memory.release()
    assert moved.memory.held_bytes == 0 and moved.memory.peak_bytes == 9 * 2048


def test_the_backward_never_has_all_of_it_back() -> None:
    model, x = mlp(16), rows(512)
    one = x.nbytes
    with LiveBytes() as plain:
        model(x).square().mean().backward()
    model.zero_grad(set_to_none=True)
    moved = offloader(one, window_bytes=2 * one)
    with LiveBytes() as live:
        with offloaded(moved, model):
            loss = model(x).square().mean()
        loss.backward()
    assert plain.peak > 32 * one and moved.memory.peak_bytes == 33 * one
    # Window out, window back, what is being computed.
    assert live.peak - moved.memory.peak_bytes < 8 * one


def test_host_memory_is_bounded_and_used_again() -> None:
    model, x = mlp(), rows()
    moved = offloader(2000, host_bytes=5 * 2048)

    def loss() -> Tensor:
        with offloaded(moved, model):
            return model(x).square().mean()

    plain = gradients(model, lambda: model(x).square().mean())
    for step in range(1, 5):
        assert equal(plain, gradients(model, loss))
        assert moved.memory.held_bytes == moved.memory.peak_bytes == 5 * 2048
        assert moved.memory.num_made == 5, "made once"
        assert moved.traffic.stayed["no room on the host"] == 4 * step
        assert moved.traffic.out_bytes == moved.traffic.back_bytes == 5 * 2048 * step


def test_buffers_of_another_size_make_room() -> None:
    memory = HostMemory(1000, PlainCopies())
    first = [memory.take(300) for _ in range(3)]
    assert all(first) and memory.take(300) is None
    for buffer in first:
        assert buffer is not None
        memory.give(buffer)
    del first, buffer
    again = memory.take(300)
    assert again is not None and memory.num_made == 3
    large = memory.take(700)
    assert large is not None and memory.held_bytes == memory.peak_bytes == 1000
    assert memory.take(1) is None
    memory.give(large)
    memory.release()
    assert memory.held_bytes == 300, "what is in use stays"


def test_pinned_buffers_count_as_what_they_take() -> None:
    rounded = CudaCopies.rounded
    assert [rounded(None, n) for n in (1, 2, 3, 4096, 4097)] == [1, 2, 4, 4096, 8192]  # type: ignore[arg-type]


def test_fetched_in_reverse_order_ahead_of_being_asked() -> None:
    copies = LateCopies()
    moved = offloader(window_bytes=2 * 400, ahead=2, copies=copies)
    tensors = [torch.full((100,), float(i)) for i in range(6)]
    parked = [moved.put(t) for t in tensors]
    assert copies.log == [("out", i + 1) for i in range(6)]
    assert copies.done == {1, 2, 3, 4}, "the window holds the last two"
    del tensors[:]

    def take(i: int) -> float:
        handle = parked[i]
        assert handle is not None
        parked[i] = None
        return float(handle.get()[7])

    assert take(5) == 5.0 and take(4) == 4.0
    assert len(copies.log) == 8, "none of the window came back; 3 and 2 are on their way"
    assert copies.done == {1, 2, 3, 4, 5, 6}
    assert take(3) == 3.0 and 7 in copies.done and 8 not in copies.done
    assert len(copies.log) == 9, "1 follows, 0 has to wait for room"
    assert [take(i) for i in (2, 1, 0)] == [2.0, 1.0, 0.0]
    assert copies.log[6:] == [("back", 7 + i) for i in range(4)], "each once"


def test_each_forward_has_its_own_order() -> None:
    """Two microbatches in flight, as in a pipeline: the first one's tensors follow each other."""
    copies = LateCopies()
    moved = offloader(window_bytes=400, ahead=1, copies=copies)
    model = nn.Identity()
    moved.follow(model)
    parked: list[list[Any]] = []
    for microbatch in range(2):
        model(torch.zeros(1))
        values = [torch.full((100,), 10.0 * microbatch + i) for i in range(3)]
        parked.append([moved.put(t) for t in values])
    first, second = parked
    assert [handle.get()[0].item() for handle in reversed(second)] == [12.0, 11.0, 10.0]
    assert all(handle._entry.returned is None for handle in first), "another forward's"
    assert first.pop().get()[0] == 2.0
    assert first[-1]._entry.returned is not None, "the one before, of the same forward"
    assert [handle.get()[0].item() for handle in reversed(first)] == [1.0, 0.0]


@pytest.mark.parametrize(("window_bytes", "expected"), [(0, 0), (399, 0), (400, 1), (1199, 2)])
def test_what_is_fetched_ahead_is_bounded(window_bytes: int, expected: int) -> None:
    moved = offloader(window_bytes=0, ahead=5, copies=LateCopies())
    parked = [moved.put(torch.full((100,), float(i))) for i in range(6)]
    moved.window_bytes = window_bytes
    for i in (5, 4):
        handle = parked[i]
        assert handle is not None and handle.get()[0] == float(i)
        on_their_way = [h for h in parked if h is not None and not h._entry.arrived]
        assert len(on_their_way) == expected
        del handle
        parked[i] = None


def test_views_of_a_storage_move_once_and_come_back_as_they_were() -> None:
    moved = offloader()
    whole = torch.randn(6, 8)
    whole[0, 0], whole[1, 1] = float("nan"), -0.0
    views = [whole, whole.t(), whole[1:3, ::2], whole[:, :1].expand(6, 8), whole.view(torch.int32)]
    wanted = [v.clone() for v in views]
    shapes = [(v.shape, v.stride(), v.dtype, v.storage_offset()) for v in views]
    handles = [moved.put(v) for v in views]
    assert moved.traffic.out_bytes == whole.nbytes and moved.memory.num_made == 1
    del whole, views
    got = [handle.get() for handle in handles if handle is not None]
    assert moved.traffic.back_bytes == 6 * 8 * 4, "fetched once for all"
    assert len({t.untyped_storage()._cdata for t in got}) == 1
    for t, want, shape in zip(got, wanted, shapes, strict=True):
        assert (t.shape, t.stride(), t.dtype, t.storage_offset()) == shape
        assert torch.equal(t.contiguous().view(torch.int32), want.contiguous().view(torch.int32))
    once_more = handles[0].get() if handles[0] else None
    assert once_more is not None and once_more.data_ptr() == got[0].data_ptr()
    storage = weakref.ref(got[0].untyped_storage())
    del got, t, once_more
    assert storage() is None, "all handles asked, so nobody keeps it"


def test_what_was_changed_in_place_is_another_tensor() -> None:
    moved = offloader()
    t = torch.zeros(100)
    before = moved.put(t)
    t += 1
    after = moved.put(t)
    assert before is not None and after is not None and moved.traffic.out_bytes == 800
    assert before.get()[0] == 0.0 and after.get()[0] == 1.0


def test_changed_while_it_was_copied_is_refused() -> None:
    moved = offloader(window_bytes=400, copies=LateCopies())
    t = torch.zeros(100)
    parked = moved.put(t)
    t += 1
    assert parked is not None
    with pytest.raises(RuntimeError, match="changed in place"):
        parked.get()
    moved.put(torch.zeros(100))
    with pytest.raises(RuntimeError, match="changed in place"):
        parked.get()


def test_changed_where_it_stayed_is_refused() -> None:
    x = torch.randn(4, requires_grad=True)
    with offloaded(offloader(1000)):
        y = x * 2
        loss = y.square().sum()
    with torch.no_grad():
        y.mul_(3)
    with pytest.raises(RuntimeError, match="changed in place"):
        loss.backward()


def test_what_stays_and_why() -> None:
    moved = offloader(400)
    linear = nn.Linear(100, 100)
    weight = linear.weight
    meta = torch.empty(100, device="meta")
    assert (
        moved.put(torch.zeros(99)) is None and moved.put(torch.zeros(1, 1).expand(50, 50)) is None
    )
    assert moved.put(weight) is None and moved.put(weight.t()) is None
    assert moved.put(meta) is None
    assert moved.put(torch.zeros(100, dtype=torch.complex64).conj()) is None
    stored = moved.store_for(linear)
    detached = weight.detach()
    assert stored(detached) is detached
    assert moved.traffic.stayed == {
        "small": 2,
        "parameter": 3,
        "not on the device": 1,
        "more than strided bytes": 1,
    }
    assert moved.traffic.stayed_bytes["parameter"] == 3 * 40_000
    assert not isinstance(stored(torch.zeros(100)), Tensor)


def test_nothing_is_moved_by_a_recomputation() -> None:
    moved, model, x = offloader(), mlp(), rows()
    found: list[int] = []

    class Again(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, t: Tensor) -> Tensor:
            return t.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
            with torch.enable_grad(), offloaded(moved, model):
                model(x)
            found.append(moved.traffic.out_bytes)
            return grad

    Again.apply(torch.ones(3, requires_grad=True)).sum().backward()  # type: ignore[union-attr]
    assert found == [0] and moved.traffic.stayed["needed at once"] > 0


def test_a_second_backward_fetches_again() -> None:
    model, x = mlp(), rows()
    plain = gradients(model, lambda: model(x).square().mean())
    moved = offloader(window_bytes=4096, copies=LateCopies())
    with offloaded(moved, model):
        loss = model(x).square().mean()
    back = []
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        loss.backward(retain_graph=True)
        assert equal(plain, [p.grad for p in model.parameters() if p.grad is not None])
        back.append(moved.traffic.back_bytes)
    assert back[1] == 2 * back[0] > 0
    del loss
    buffers = moved.memory.num_made
    with offloaded(moved, model):
        model(x)
    assert moved.memory.num_made == buffers, "buffers of a graph that died are used again"


def test_a_graph_that_dies_on_its_way_leaves_nothing() -> None:
    """No backward: copies under way end before their memory goes to others."""
    copies = LateCopies()
    moved = offloader(window_bytes=HOST, copies=copies)
    model, x = mlp(), rows()
    with offloaded(moved, model):
        out = model(x)
    assert not copies.done
    del out
    gc.collect()
    assert len(copies.done) == copies.count > 0
    parked = [moved.put(torch.full((100,), float(i))) for i in range(3)]
    moved.window_bytes = 0
    parked.append(moved.put(torch.zeros(100)))
    moved.window_bytes = HOST
    last = parked[2]
    assert last is not None and last.get()[0] == 2.0
    del parked, last
    gc.collect()
    assert len(copies.done) == copies.count, "fetched ahead, never asked for"


def test_fake_tensors_count_alike() -> None:
    from torch._subclasses import FakeTensorMode

    real = offloader(2000)
    model, x = mlp(), rows()
    with offloaded(real, model):
        kept = model(x)
    fake = offloader(2000)
    with FakeTensorMode(allow_non_fake_inputs=True), offloaded(fake, model):
        also = model(torch.empty(16, 32))
    assert fake.traffic == real.traffic and real.traffic.out_bytes == 8 * 2048
    assert fake.memory.peak_bytes == real.memory.peak_bytes
    del kept, also


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("window_mib", [0, 8, 1024])
def test_on_a_gpu(window_mib: int) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    model = mlp(24, 1024).to(device)
    x = torch.randn(2048, 1024, device=device)
    plain = [g.clone() for g in gradients(model, lambda: model(x).square().mean())]
    moved = Offloader(MIB, 1 << 30, device, window_bytes=window_mib * MIB)
    kept = []
    for offload in (False, True, True):
        model.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        if offload:
            with offloaded(moved, model):
                loss = model(x).square().mean()
        else:
            loss = model(x).square().mean()
        kept.append(torch.cuda.memory_allocated() - before)
        loss.backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        assert equal(plain, grads)
        del loss
    out = moved.traffic.out_bytes // 2
    left = out - min(out, window_mib // 8 * 8 * MIB)
    # The first input is the caller's: it moves, and stays where it is as well.
    assert kept[1] == kept[2] and abs(kept[0] - kept[1] - (left - 8 * MIB if left else 0)) < MIB
    assert moved.memory.num_made == out // (8 * MIB), "pinned once"
    buffer = moved.memory.take(MIB)
    assert buffer is not None and buffer.bytes.is_pinned()


def test_hooks_of_others_compose() -> None:
    """Other hooks inside see the tensors first, as autograd has it: the innermost pair counts."""
    moved, x = offloader(), torch.ones(4, requires_grad=True)
    with offloaded(moved), saved_tensors_hooks(lambda t: t * 1, lambda t: t):
        y = x.exp()
    assert moved.traffic.out_bytes == 0
    y.sum().backward()
    assert x.grad is not None and torch.equal(x.grad, x.detach().exp())
