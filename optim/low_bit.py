"""AdamW moments in 8 or 4 bits an entry, by torchao's state tensors (the `lowp` extra).

Blocks of a local shard share an fp32 scale: 256 entries in 8 bits (Dettmers et al., 2110.02861),
128 entries in 4 bits (Li et al., 2309.01507). An update unpacks one parameter's moments, runs the
fp32 kernel and packs them again; torch.compile isn't needed.

Checkpoints hold plain tensors of the parameter's shape: `plain` unpacks, `write` packs. A saved
block is reproduced bit for bit, so saving a state that was just loaded gives the same file. On
another mesh blocks may start elsewhere; those are rounded once more.
"""

from __future__ import annotations

from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from megacpp.errors import config_error
from megacpp.quiet import quiet_import
from megacpp.torch_extras import is_dtensor, local_part
from optim.adamw import adamw_kernel

Bits = Literal["8bit", "4bit"]
BLOCKS: dict[Bits, int] = {"8bit": 256, "4bit": 128}
# Least entries of a local shard. Smaller shards, such as norms and biases, keep wide moments, as do
# shards that are no whole number of blocks.
MIN_ENTRIES = 4096
PIECE = 1 << 22  # entries unpacked at a time; packing takes about 50 bytes each
FLOOR = 1e-12  # torchao's smallest scale


def new_low_bit_state(parameter: Tensor, bits: Bits) -> dict[str, Tensor]:
    """Return zero moments `exp_avg` and `exp_avg_sq`, packed if the local shard is large enough.

    Args:
        parameter: any shape.
        bits: `8bit` or `4bit`.

    Raises:
        ConfigError: torchao can't be imported.
    """
    packed = _packed_class(bits)
    local = local_part(parameter)
    if local.numel() < MIN_ENTRIES or local.numel() % BLOCKS[bits]:
        return {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
    return {
        name: like(
            parameter,
            packed.zeros(local.shape, signed, BLOCKS[bits], local.device, dtype=parameter.dtype),
        )
        for name, signed in (("exp_avg", True), ("exp_avg_sq", False))
    }


def is_packed(entry: Tensor) -> bool:
    """Return whether an entry of state is stored in blocks.

    Args:
        entry: any shape.
    """
    local = local_part(entry)
    return type(local) is not Tensor and hasattr(local, "codes")


@torch.no_grad()
def low_bit_update(
    group: dict[str, Any], params: list[Tensor], states: list[dict[str, Tensor]]
) -> None:
    """Run `adamw_update` with packed moments, in pieces that bound the unpacked memory."""
    for p, state in zip(params, states, strict=True):
        assert p.grad is not None
        weights = local_part(p).view(-1).split(PIECE)
        grads = local_part(p.grad).reshape(-1).split(PIECE)
        firsts, seconds = (_pieces(local_part(state[n])) for n in ("exp_avg", "exp_avg_sq"))
        for weight, grad, first, second in zip(weights, grads, firsts, seconds, strict=True):
            wide = [_values(packed).to(weight.dtype) for packed in (first, second)]
            assert weight.shape == grad.shape == wide[0].shape == wide[1].shape
            adamw_kernel(group, [weight], [grad], [wide[0]], [wide[1]], [state["step"]])
            first.copy_(wide[0].float())
            second.copy_(wide[1].float())
            _lift_zeros(second, wide[1])


@torch.no_grad()
def plain(entry: Tensor) -> Tensor:
    """Return an entry of state for a checkpoint: unpacked on the host if it is packed.

    It has the dtype of wide moments, which a shard of another size may have. All entries of a model
    are unpacked before the first is saved; the device may lack the memory.

    Args:
        entry: any shape.
    """
    if not is_packed(entry):
        return entry
    local = local_part(entry)
    return like(entry, _values(local).cpu().to(local.dtype))


@torch.no_grad()
def write(entry: Tensor, value: Tensor) -> None:
    """Copy a plain tensor of the same shape and sharding into an entry of state.

    torchao's scale of a block is its largest magnitude, which packing may already have rounded: the
    table's ends are 1 and, for example, -0.9930. Therefore the few scales that the block can have
    come from are tried, and one that reproduces the whole block is used (no thread known).

    Args:
        entry: any shape; written in place.
        value: any shape; that of `entry`, sharded like it.
    """
    own, new = local_part(entry), local_part(value)
    if not is_packed(entry):
        own.copy_(new)
        return
    for piece, values in zip(_pieces(own), new.reshape(-1).split(PIECE), strict=True):
        _pack(piece, values.to(own.device, torch.float32))


def like(whole: Tensor, local: Tensor) -> Tensor:
    """Wrap `local` as the shard of a tensor of `whole`'s shape and sharding, on its own device.

    Args:
        whole: any shape, plain or a DTensor.
        local: local shard, any shape.
    """
    if not is_dtensor(whole):
        return local
    return type(whole)(local, whole._spec, requires_grad=False)


def _packed_class(bits: Bits) -> Any:
    try:
        with quiet_import():
            from torchao.optim import subclass_4bit, subclass_8bit
    except ImportError as error:
        raise config_error(
            "optim.adamw_state",
            bits,
            f"torchao can't be imported ({error})",
            "pip install torchao (the lowp extra), or use optim.adamw_state=fp32",
        ) from error
    module = {"8bit": subclass_8bit, "4bit": subclass_4bit}[bits]
    with _disable_current_modes():  # cached by torchao: it must not cache fake tensors
        for table in (module.get_qmap_signed, module.get_qmap_unsigned):
            table()
    return {"8bit": subclass_8bit.OptimState8bit, "4bit": subclass_4bit.OptimState4bit}[bits]


def _pack(own: Tensor, new: Tensor) -> None:
    """Run `write` on a flat packed tensor and fp32 values on its device."""
    own.copy_(new)
    state = cast(Any, own)
    if not state.signed:
        _lift_zeros(own, new)
    num_blocks = len(state.scale)
    value_Nb = new.reshape(num_blocks, -1)  # N blocks of b entries
    codes_Nb = state.codes.view(num_blocks, -1)  # two per byte in 4 bits
    middles = (state.qmap[1:] + state.qmap[:-1]) / 2
    for scale_N in _possible_scales(value_Nb, float(state.qmap[0]), state.signed):
        tried_Nb = torch.bucketize(value_Nb / scale_N.clamp(min=1e-38)[:, None], middles)
        exact_N = (state.qmap[tried_Nb] * scale_N[:, None] == value_Nb).all(dim=1)
        if codes_Nb.shape != tried_Nb.shape:
            tried_Nb = (tried_Nb[:, ::2] << 4) | tried_Nb[:, 1::2]
        codes_Nb[exact_N] = tried_Nb[exact_N].to(torch.uint8)
        state.scale[exact_N] = scale_N[exact_N]


def _pieces(packed: Tensor) -> list[Tensor]:
    """Split a packed tensor into flat parts that share its memory."""
    state = cast(Any, packed)
    num_blocks = max(1, PIECE // state.block_size)
    scales = state.scale.split(num_blocks)
    num_codes = state.codes.numel() // len(state.scale) * num_blocks
    codes = state.codes.view(-1).split(num_codes)
    make, entries = type(state), [len(scale) * state.block_size for scale in scales]
    shapes = [()] * len(codes) if codes[0].numel() == entries[0] else [((n,),) for n in entries]
    return [
        make(code, scale, state.qmap, state.signed, *shape, dtype=state.dtype)
        for code, scale, shape in zip(codes, scales, shapes, strict=True)
    ]


def _values(local: Tensor) -> Tensor:
    """Unpack into a new fp32 tensor; adding zero turns -0 of an empty block into 0."""
    return cast(Any, local).dequantize().add_(0.0)


def _lift_zeros(packed: Tensor, second_moment: Tensor) -> None:
    """Raise packed zeros of a positive second moment, so that the next update isn't divided by eps.

    The 4-bit table has no zero for that reason; in 8 bits the smallest positive entry is used.
    """
    state = cast(Any, packed)
    if state.codes.shape == second_moment.shape:
        state.codes.masked_fill_((state.codes == 0) & (second_moment > 0), 1)


def _possible_scales(value_Nb: Tensor, lowest: float, signed: bool) -> list[Tensor]:
    """Return the scales that blocks of unpacked values can have had, `[N]` each."""
    largest_N = value_Nb.abs().amax(dim=1)
    candidates = [torch.zeros_like(largest_N), largest_N]
    if signed:  # the largest magnitude may be the table's lowest value times the scale
        guess_N = largest_N / -lowest
        candidates.append(guess_N)
        for direction in (float("inf"), -float("inf")):
            towards = torch.full_like(guess_N, direction)
            near_N = torch.nextafter(guess_N, towards)
            candidates += [near_N, torch.nextafter(near_N, towards)]
    return [*candidates, torch.full_like(largest_N, FLOOR)]
