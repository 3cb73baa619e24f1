"""Other people's models as blocks of operators: GPT, Llama, MPT, MoE, MLA and Mamba-2 layers.

    step_of(row, family_named(...), gpu("H100"))      # row: a line of a file of published runs

Each layer is a list of regions; a region has operators and collectives of its forward and of its
backward, and recomputation repeats the forward of some. Sizes are those of one rank.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from bench.dispatch import sent_once
from bench.families import Family
from bench.issued import issued, router_operators
from megacpp.speed.collectives import AxisSpread, spread
from megacpp.speed.hardware import GpuSpec
from megacpp.speed.operators import Attend, Operator, Passes, Product, SerialWork
from megacpp.speed.step import BlockWork, Transfer

# Of an element with an expert's bias: it is made as bias times probability and added, in fp32, then
# experts are joined, and cast; backward, both factors have a gradient.
BIAS_BYTES = (4 + (2 + 4 + 4) + 8 + 6, 6 + 6 + 2 * (8 + 4))


class UnknownRowError(ValueError):
    """Reason why a row can't be predicted."""


class Region(NamedTuple):
    """Operators of a part of a layer.

    Attributes:
        name: by which recomputation chooses it.
        sent_forward, sent_backward: collectives.
        weights: parameters of the rank, as the data axes share them.
        experts: parameters of the rank's experts.
    """

    name: str
    forward: tuple[Operator, ...] = ()
    backward: tuple[Operator, ...] = ()
    sent_forward: tuple[Transfer, ...] = ()
    sent_backward: tuple[Transfer, ...] = ()
    weights: float = 0.0
    experts: float = 0.0


@dataclass(frozen=True)
class RowSizes:
    """Sizes of one rank's microbatch, from a row.

    Attributes:
        model: the row's own words about the model.
        family: habits of the software.
        rows: of a microbatch.
        seq: tokens of a row.
        tp: ranks that share matrices.
        cp: ranks that share rows.
        ep: ranks that share experts.
        sp: the residual stream is shared by `tp` too.
        dtype: of products of linear layers.
        hides: collectives of `tp` run beside products.
        expert_hides: those of `ep` do.
        kernel: of attention.
        captured: letters of LAUNCHES that a CUDA graph replays, so the host never limits.
        flexible: tokens are sent to experts by `sent_once`.
        per_node: GPUs of a node.
        scaled: FP8 finds the largest number of each operand before it rounds it.
    """

    model: dict[str, Any]
    family: Family
    rows: int
    seq: int
    tp: int
    cp: int
    ep: int
    sp: bool
    dtype: str
    hides: bool
    expert_hides: bool
    kernel: str
    captured: str = ""
    flexible: bool = False
    per_node: int = 8
    scaled: bool = False

    @property
    def tokens(self) -> int:
        """Tokens of a microbatch on this rank, before `tp` shares them."""
        return self.rows * self.seq // self.cp

    @property
    def dim(self) -> int:
        """Width of the residual stream."""
        return self.model["hidden"]

    @property
    def shared(self) -> float:
        """Elements of the residual stream that this rank works on between matrices."""
        return self.tokens * self.dim / (self.tp if self.sp else 1)

    def linear(self, name: str, k: int, n: int, normed: bool = False) -> Region:
        """Return a linear layer: its product, and those of both gradients.

        Args:
            name: of the region.
            k: width of the input.
            n: width of the output.
            normed: a norm made the input, whose kernel finds its largest number, too.
        """
        made = self.products(name, self.tokens, n, k, 1, self.dtype)
        return made._replace(forward=made.forward[-1:]) if normed else made

    def products(self, name: str, m: int, n: int, k: int, count: int, dtype: str) -> Region:
        """Return the products of `count` linear layers `k` to `n` of `m` tokens each.

        Args:
            name: of the region.
            m: tokens.
            n: width of the output.
            k: width of the input.
            count: layers in one kernel.
            dtype: of the operands.
        """
        added, scaled = self.family.added, self.scaled and dtype == "fp8"
        one = Product(m, n, k, count, "TN", dtype, apart=count > 1)
        across = one._replace(n=k, k=n, layout="NN")
        down = one._replace(m=n, n=k, k=m, layout="NT", added=added)
        return Region(
            name,
            (*largest(m * k, count * scaled), one),
            (*largest(m * n, count * scaled), across, down),
            weights=n * k * count,
        )

    def passes(self, name: str, each: tuple[float, float], elements: float) -> Region:
        """Return element-wise work of `each` bytes per element, forward and backward."""
        forward, backward = (Passes(b * elements) for b in each)
        return Region(name, (forward,) if each[0] else (), (backward,) if each[1] else ())

    @property
    def beside(self) -> str:
        """Work that collectives of `tp` run beside; empty: none."""
        return "products" if self.hides else ""

    def around(self) -> tuple[Region, Region]:
        """Return the collectives of `tp` in front of and behind a block's matrices."""
        size = 2.0 * self.tokens * self.dim
        if self.tp == 1:
            return Region("boundary"), Region("boundary")
        if not self.sp:
            both = (Transfer("tp", "all_reduce", size, self.beside),)
            return Region("boundary", sent_backward=both), Region("boundary", sent_forward=both)
        gather = Transfer("tp", "all_gather", size, self.beside)
        scatter = Transfer("tp", "reduce_scatter", size, self.beside)
        before = Region("boundary", sent_forward=(gather,), sent_backward=(scatter, gather))
        return before, Region("boundary", sent_forward=(scatter,), sent_backward=(gather,))


def largest(numbers: int, count: int) -> tuple[Passes, ...]:
    """Return the kernels that find FP8's scales of `count` operands: one reads, two are tiny.

    Transformer Engine rounds together what many experts get by delayed scaling alone
    (multi_tensor_quantize_impl of its cast.cpp); by current scaling each has kernels of its own.

    Args:
        numbers: of each operand, in bf16.
        count: operands; 0: none is scaled so.
    """
    return (Passes(2.0 * numbers * count, 3 * count),) if count else ()


def attention_layer(s: RowSizes, window: int = 0) -> Iterator[Region]:
    """Yield the regions of an attention block.

    Args:
        s: sizes of the rank.
        window: keys that a query attends to at most; 0: all before it.
    """
    m, f, d = s.model, s.family.fusion, s.dim
    heads, kv = m["heads"] // s.tp, max(1, m["kv_heads"] // s.tp)
    before, behind = s.around()
    yield s.passes("norm", f.norm, s.shared)
    yield before
    if m.get("q_lora") or m.get("kv_lora"):
        wide, value = m["qk_nope"] + m["qk_rope"], m["v_head"]
        rank, kv_rank = m.get("q_lora") or 0, m["kv_lora"]
        if rank:
            yield s.linear("mla_down", d, rank, True)
        yield s.linear("mla_down", d, kv_rank + m["qk_rope"], True)
        yield s.passes("mla_up_proj", f.norm, float(s.tokens) * (rank + kv_rank))
        yield s.linear("mla_up_proj", rank or d, heads * wide)
        yield s.linear("mla_up_proj", kv_rank, heads * (m["qk_nope"] + value))
        yield s.passes("rope", (12, 16), s.tokens * heads * wide)
        kv = heads
    else:
        wide = value = m["head_dim"]
        yield s.linear("qkv", d, (heads + 2 * kv) * wide, True)
        if m.get("qk_norm"):
            yield s.passes("qk_norm", f.norm, float(s.tokens) * (heads + kv) * wide)
        if m.get("pos") is None or "rope" in str(m.get("pos")):
            yield s.passes("rope", f.rope, s.tokens * (heads + kv) * wide)
    yield s.passes("copies", f.copies, s.tokens * (heads + 2 * kv) * wide)
    keys = s.seq / 2
    if window and window < s.seq:
        keys = window - window * window / (2 * s.seq)
    yield _core(s, heads, kv, wide, value, keys)
    yield s.linear("out", heads * value, d)
    yield behind
    yield s.passes("residual", f.residual, s.shared)


def _core(s: RowSizes, heads: int, kv: int, wide: int, value: int, keys: float) -> Region:
    """Return attention itself."""
    own, n = s.seq // s.cp, s.rows * heads
    sent = ()
    if s.cp > 1:
        # torchtitan repeats keys for all query heads before it gathers them; the first part of
        # attention runs meanwhile. Megatron's ring hands them on beside each part.
        ring = not s.family.name.startswith("torchtitan")
        size = 2.0 * s.rows * s.seq * (kv if ring else heads) * (wide + value)
        how = ("products" if ring else "attend") if s.family.overlapped else ""
        sent = (Transfer("cp", "all_gather", size, how),)
    if s.kernel == "unfused":
        area = float(n) * own * s.seq
        square = Product(own, s.seq, wide, n, "TN", what="attention")
        over = Product(own, value, s.seq, n, "NN", what="attention")
        # The masked softmax, and dropout with a mask of one byte an element.
        forward = (square, Passes(9 * area, 2, "attention"), over)
        backward = (
            *(square, over, over._replace(layout="TN"), square._replace(layout="NN")),
            Passes(13 * area, 2, "attention"),
        )
        return Region("core_attn", forward, backward)
    attend = Attend(n, own, keys, wide + value, s.kernel)
    back = (attend._replace(backward=True),)
    return Region("core_attn", (attend,), back, sent, (*sent, *sent))


def mlp_layer(s: RowSizes, width: int, name: str = "mlp") -> Iterator[Region]:
    """Yield the regions of a dense MLP block.

    Args:
        s: sizes of the rank.
        width: hidden width of the whole layer.
        name: of its products, for recomputation.
    """
    f, own = s.family.fusion, width // s.tp
    gated = bool(s.model.get("gated_mlp"))
    before, behind = s.around()
    yield s.passes("norm", f.norm, s.shared)
    yield before
    yield s.linear(name, s.dim, own * (2 if gated else 1), True)
    yield s.passes("activation", f.gated if gated else f.plain, float(s.tokens) * own)
    yield s.linear(name, own, s.dim)
    yield behind
    yield s.passes("residual", f.residual, s.shared)


def moe_layer(s: RowSizes) -> Iterator[Region]:
    """Yield the regions of a mixture of experts, every expert with as many tokens."""
    m, f, d = s.model, s.family.fusion, s.dim
    experts, top, width = m["experts"], m["topk"], m["moe_ffn"]
    gated = bool(m.get("gated_mlp"))
    tokens = s.tokens / s.tp  # experts aren't cut by tp, the tokens are
    rows = max(1, round(tokens * top * s.ep / experts))
    here = max(1, experts // s.ep)
    yield s.passes("norm", f.norm, s.shared)
    scores = Passes(tokens * experts * 24.0, router_operators(m))
    yield Region(
        "router",
        (Product(int(tokens), experts, d), scores),
        (Product(int(tokens), d, experts, layout="NN"), scores),
        weights=experts * d,
    )
    moved = 2.0 * tokens * top * d
    # Rows are copied in the order of experts and back, at about half the speed of plain passes.
    order = Region("permute", (Passes(4 * moved, 4),), (Passes(5 * moved, 4),))
    yield order
    groups = m.get("expert_groups", 1), m.get("kept_groups", 1)
    copies = sent_once(top, s.ep, s.per_node, groups) if s.flexible else top
    hidden = "all" if s.expert_hides else ""  # behind another microbatch's pass
    trip = (Transfer("ep", "all_to_all", moved * copies / top, hidden),)
    yield Region("moe", sent_forward=trip, sent_backward=trip)
    wide = width * (2 if gated else 1)
    for n, k in ((wide, d), (d, width)):
        made = s.products("moe", rows, n, k, here, s.dtype)
        yield made._replace(weights=0.0, experts=made.weights)
        if n == wide:
            yield s.passes("moe_act", f.gated if gated else f.plain, float(rows) * here * width)
    if m.get("expert_bias"):
        yield s.passes("moe", BIAS_BYTES, float(rows) * here * d)
    yield Region("moe", sent_forward=trip, sent_backward=trip)
    yield order
    if m.get("shared_ffn"):
        yield from mlp_layer(s, m["shared_ffn"], "shared")
    else:
        yield s.passes("residual", f.residual, s.shared)


def mamba2_layer(s: RowSizes) -> Iterator[Region]:
    """Yield the regions of a Mamba-2 block: its scan in chunks of 256 tokens."""
    m, f = s.model, s.family.fusion
    heads = max(1, m["mamba_heads"] // s.tp)
    inner, state = heads * m["mamba_head_dim"], m["mamba_state"]
    groups = max(1, m["mamba_groups"] // s.tp)
    before, behind = s.around()
    yield s.passes("norm", f.norm, s.shared)
    yield before
    yield s.linear("mamba", s.dim, 2 * inner + 2 * groups * state + heads, True)
    T, mixed = float(s.tokens), inner + 2 * groups * state
    flops = 2.0 * T * (256 * (groups * state + inner) + 4 * inner * state)
    states = 4.0 * T / 256 * inner * state
    scan = SerialWork(0.0, 0.0, 2.0 * T * mixed * 12 + 4 * states, 3 * flops)
    back = scan._replace(bytes=2.5 * scan.bytes, flops=2.5 * scan.flops)
    yield Region("mamba_scan", (scan,), (back,))
    yield s.linear("mamba", inner, s.dim)
    yield behind
    yield s.passes("residual", f.residual, s.shared)


def block(s: RowSizes, kind: str, regions: list[Region], again: set[str], part: float) -> BlockWork:
    """Return a layer whose backward repeats the forward of some regions.

    Args:
        s: sizes of the rank.
        kind: name in the budget.
        regions: of the layer.
        again: names of regions that run again; `all`: every one.
        part: of their products that runs again.
    """
    forward = tuple(op for r in regions for op in r.forward)
    backward = [op for r in regions for op in r.backward]
    sent = [t for r in regions for t in r.sent_backward]
    operators = 0  # that run again
    for r in regions:
        if "all" in again or r.name in again:
            repeated = [op for op in r.forward if not isinstance(op, Product | Attend)]
            if part == 1.0 or isinstance(r.forward[:1], Attend):
                repeated = list(r.forward)
            elif r.name != "core_attn":
                repeated += [op._replace(n=max(1, round(op.n * part)))
                             for op in r.forward if isinstance(op, Product)]  # fmt: skip
            backward += repeated
            sent += r.sent_forward
            operators += len(repeated)
    launches = issued(s, kind, regions, again, operators)
    dense = sum(r.weights for r in regions)
    if s.family.copied and dense:
        backward.append(Passes(s.family.copied * dense))
    return BlockWork(
        kind,
        forward,
        tuple(backward),
        tuple(t for r in regions for t in r.sent_forward),
        tuple(sent),
        dense,
        sum(r.experts for r in regions),
        launches,
    )


def ends(s: RowSizes, vocab: int) -> tuple[BlockWork, BlockWork]:
    """Return the embedding, and the last norm with the head and its loss."""
    f, own = s.family.fusion, math.ceil(vocab / s.tp)
    size = 2.0 * s.tokens * s.dim
    joined = (Transfer("tp", "reduce_scatter" if s.sp else "all_reduce", size),)
    spread_ = (Transfer("tp", "all_gather" if s.sp else "all_reduce", size),)
    look = Passes(4.0 * s.shared)
    first = BlockWork("embed", (look,), (look,), joined, spread_ if s.sp else (), own * s.dim)
    head = s.products("head", s.tokens, own, s.dim, 1, "bf16")
    loss = f.logits * s.tokens * own / 2
    last = BlockWork(
        "head",
        (*head.forward, Passes(loss + f.norm[0] * s.shared, 8)),
        (*head.backward, Passes(loss + f.norm[1] * s.shared, 8)),
        spread_ if s.sp else (),
        joined,
        0.0 if s.model.get("tied") else own * s.dim,
    )
    return first, last


def network_gbs(text: str, gpu: GpuSpec) -> float:
    """Return GB/s each way and GPU of a fabric that a row describes; the GPU's own if it can't."""
    each = re.search(r"(\d+)x HDR|= ?(\d+) Gb/s|(\d+) ?Gb/s per node", text)
    if each:
        node = int(each[1]) * 200 if each[1] else int(each[2] or each[3])
        return node / 8 / gpu.per_node
    one = re.search(r"(\d+) ?Gb/s", text)
    return float(one[1]) / 8 if one else gpu.network_gbs


def axes_of(parallel: dict[str, Any], gpus: int, per_node: int) -> dict[str, AxisSpread]:
    """Return the spread of each axis: tp innermost, then cp, data, pp.

    Args:
        parallel: degrees of a row.
        gpus: of the run.
        per_node: of a machine.
    """
    tp, cp, pp, ep = (parallel.get(axis) or 1 for axis in ("tp", "cp", "pp", "ep"))
    data = max(1, gpus // (tp * cp * pp))
    return {
        "tp": spread(tp, 1, per_node),
        "cp": spread(cp, tp, per_node),
        "data": spread(data * cp, tp, per_node),
        "ep": spread(ep, 1, per_node),
        "expert_data": spread(max(1, data * cp * tp // ep), ep, per_node),
        "pp": spread(pp, tp * cp * data, per_node),
    }
