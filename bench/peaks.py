"""Peak memory of other people's runs by hand: state, kept activations, the head's logits.

    python -m bench.peaks [--rows FILE] [--json]

A row of bench/published.jsonl that gives its peak is compared with closed forms of what its
software keeps (`kept_bytes`), from its code and documents. Nothing is fitted. The memory of our own
runs is measured by traces instead (megacpp/memory/); these forms say how far counting alone leads.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import parser_of
from bench.others import RowSizes, UnknownRowError
from bench.published import ROWS, read, source_of
from bench.rows import again_of, sizes_of, step_of
from megacpp.errors import ConfigError
from megacpp.speed.step import BlockWork, StepWork

GIB = 2**30
# Bytes of a logit at the peak of the loss. Megatron's fused cross entropy: bf16 logits, their fp32
# copy whose place the exponentials take, and the bf16 gradient. torch's: the bf16 logits, their
# fp32 copy, its log-softmax and the gradient of both. Compiled, as torchtitan does since 2025, the
# bf16 logits and their gradient alone.
LOGIT_BYTES = {"megatron": 8.0, "torchtitan": 14.0}
COMPILED_LOSS = 4.0
# Bytes of a parameter of Megatron that each rank holds, and that data ranks share: bf16 parameters,
# fp32 gradients; an fp32 copy and two fp32 moments. Moonlight's recipe of Megatron-Bridge
# (recipes/moonlight/h100/moonlight_16b.py) has bf16 gradients and moments.
STATE_BYTES = {"": (6.0, 12.0), "moonlight-16b-a3b": (4.0, 8.0)}


def peak_bytes(row: dict[str, Any]) -> float:
    """Return the bytes that tensors of the fullest rank hold, workspace left out.

    Raises:
        UnknownRowError: a layer or a software family that no form is known for.
    """
    step, _, _ = step_of(row)
    s, again = sizes_of(row, []), again_of(row)
    family = s.family.name.split("-")[0]
    if family not in LOGIT_BYTES:
        raise UnknownRowError(f"no form for {s.family.name}")
    stages = [list(stage) for stage in step.stages] or [list(range(len(step.blocks)))]
    ranks = step.axes["pp"].size if step.stages else 1
    newer = family == "torchtitan" and bool(row.get("compile")) and str(row.get("date")) >= "2025"
    logit = COMPILED_LOSS if newer else LOGIT_BYTES[family]
    return max(_of_rank(rank, ranks, stages, step, s, again, logit) for rank in range(ranks))


def _of_rank(
    rank: int,
    ranks: int,
    stages: list[list[int]],
    step: StepWork,
    s: RowSizes,
    again: set[str],
    logit: float,
) -> float:
    mine = [step.blocks[n] for stage in stages[rank::ranks] for n in stage]
    held = sum(state_bytes(s, b, step, ranks) for b in mine)
    layers = [kept_bytes(s, b.kind, again) for b in mine]
    virtual = len(stages) // ranks
    flying = min(ranks - rank, step.microbatches)
    if virtual > 1:  # chunks of Megatron's interleaved warm-up, and the one that runs
        chunks = min(
            2 * (ranks - rank - 1) + (virtual - 1) * ranks + 1, step.microbatches * virtual
        )
        flying = chunks / virtual
    held += flying * sum(layers)
    if again & {"all", "ops"}:  # the layer whose backward runs is there whole
        held += max(kept_bytes(s, b.kind, set()) for b in mine) + _gathered(s)
    if rank == ranks - 1:
        held += logit * s.tokens * s.model["vocab"] / s.tp
    return held


def state_bytes(s: RowSizes, block: BlockWork, step: StepWork, ranks: int) -> float:
    """Return bytes of a block's parameters, gradients and optimizer state on one rank.

    Megatron: see `STATE_BYTES`. FSDP2: parameters, gradients and both moments in fp32, shared; with
    a pipeline the bf16 parameters and the fp32 gradients of a stage stay gathered, otherwise those
    of two units. Of an embedding that `tp` shares this gradient has all rows: DTensor's backward
    makes them, and FSDP2 keeps the sum over microbatches as it comes.

    Args:
        s: sizes of the rank.
        block: with its parameters on one rank.
        step: with the axes.
        ranks: of the pipeline.
    """
    found = 0.0
    for count, axis in ((block.dense, "data"), (block.experts, "expert_data")):
        shared = step.axes[axis].size if axis in step.axes else 1
        if s.family.name.startswith("megatron"):
            each, among = STATE_BYTES.get(str(s.model.get("name")), STATE_BYTES[""])
            found += count * (each + among / shared)
        else:
            found += count * 16 / shared
            found += count * (6 if ranks > 1 else 6 * 2 / len(step.blocks)) if shared > 1 else 0
            if ranks > 1 and block.kind == "embed":
                found += count * 4 * (s.tp - 1)
    return found


def kept_bytes(s: RowSizes, kind: str, again: set[str]) -> float:
    """Return bytes that a layer keeps of a microbatch for its backward, on one rank.

    Args:
        s: sizes of the rank.
        kind: letters of its blocks; embedding and head keep the input of a product.
        again: names of regions that run again; `all`: only the layer's input is kept.

    Raises:
        UnknownRowError: a block that no form is known for.
    """
    if kind in ("embed", "head") or "all" in again:
        return 2.0 * s.shared
    if "ops" in again:
        return 2.0 * s.shared + _every_second(s)
    found = 0.0
    for letter in kind if kind != "mtp" else "AE":
        found += 2.0 * s.shared  # what the norm reads
        if "norm" not in again:
            found += 2.0 * s.shared + _gathered(s)  # what it returns
        found += {"A": _attention, "F": _mlp, "E": _experts, "M": _mamba2}[letter](s, again)
    return found


def _gathered(s: RowSizes) -> float:
    """Return bytes of a gathered residual stream that aren't in its shards.

    A product of torch's `ColwiseParallel` keeps its gathered input, and its gradient is whole, too.
    Megatron gathers the input again for the backward.
    """
    torch_gathers = s.family.name.startswith("torchtitan") and s.tp > 1
    return 2.0 * (s.tokens * s.dim - s.shared) if torch_gathers else 0.0


def _every_second(s: RowSizes) -> float:
    """Return bytes of torchtitan's selection by operator: every second product's, and attention's.

    The products of a layer are those of queries, keys, values, output, gate, up and down: the
    first, third, fifth and seventh results are kept.
    """
    m = s.model
    queries, values = m["heads"] * m["head_dim"], m["kv_heads"] * m["head_dim"]
    products = queries + values + m["ffn"]
    return s.tokens / s.tp * (2.0 * (products + queries) + 4 * m["heads"]) + 2.0 * s.shared


def _attention(s: RowSizes, again: set[str]) -> float:
    """Return bytes of queries, keys, values, what attention returns, and its sums."""
    m, heads = s.model, s.model["heads"] / s.tp
    if m.get("kv_lora"):
        wide, value = m["qk_nope"] + m["qk_rope"], m["v_head"]
        down = 2.0 * s.shared / s.dim * 2 * ((m.get("q_lora") or 0) + m["kv_lora"]) * s.tp
        up = 0 if "mla_up_proj" in again else 2.0 * s.tokens * heads * (2 * wide + value)
        return down + up + s.tokens * heads * (2 * value + 4)
    wide, kv = m["head_dim"], max(1.0, m["kv_heads"] / s.tp)
    return s.tokens * (2.0 * (2 * heads + 2 * kv) * wide + 4 * heads)


def _mlp(s: RowSizes, again: set[str], width: float = 0, name: str = "mlp") -> float:
    """Return bytes of what the activation reads and returns."""
    own = (width or s.model.get("ffn") or s.model["moe_ffn"]) / s.tp
    if name in again:
        return 0.0
    return 2.0 * s.tokens * own * (3 if s.model.get("gated_mlp") else 2)


def _experts(s: RowSizes, again: set[str]) -> float:
    """Return bytes of the rows of experts: their inputs, what the activation reads and returns."""
    m = s.model
    rows = s.tokens / s.tp * m["topk"]
    if "moe" in again:
        found = 0.0
    else:
        wide = (2 if m.get("gated_mlp") else 1) + (0 if "moe_act" in again else 1)
        found = 2.0 * rows * (s.dim + wide * m["moe_ffn"])
    if m.get("shared_ffn") and "moe" not in again:
        found += _mlp(s, again, m["shared_ffn"], "shared")
    return found


def _mamba2(s: RowSizes, again: set[str]) -> float:
    """Return bytes that mamba-ssm's fused scan keeps: its input, its output, the gated norm's."""
    m = s.model
    inner = m["mamba_heads"] * m["mamba_head_dim"] / s.tp
    wide = 2 * inner + (2 * m["mamba_groups"] * m["mamba_state"] + m["mamba_heads"]) / s.tp
    return 2.0 * s.tokens * (wide + 2 * inner)


def compared(rows: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return rows with a published peak beside the counted one, and those left out with reasons."""
    found, out = [], []
    for row in rows:
        if not row.get("peak_memory_gib"):
            continue
        one = {"id": row.get("id"), "source": source_of(row), "published": row["peak_memory_gib"]}
        try:
            counted = peak_bytes(row) / GIB
            found.append(one | {"counted": counted, "ratio": counted / row["peak_memory_gib"]})
        except UnknownRowError as error:
            out.append(one | {"reason": str(error)})
    return found, out


def lines(found: Sequence[dict[str, Any]], out: Sequence[dict[str, Any]]) -> list[str]:
    """Return the comparison as text."""
    groups: dict[str, list[float]] = defaultdict(list)
    for one in found:
        groups[one["source"]].append(one["ratio"] - 1)
    text = [f"{'source':22}{'rows':>5}{'median':>8}{'lowest':>8}{'highest':>8}"]
    for name, off in groups.items():
        middle = statistics.median(map(abs, off))
        text.append(f"{name:22}{len(off):5}{middle:8.1%}{min(off):+8.1%}{max(off):+8.1%}")
    text += ["", f"left out: {len(out)}", *(f"  {one['id']}: {one['reason']}" for one in out)]
    return text


def main(words: Sequence[str] | None = None) -> int:
    """Compare counted peaks with published ones."""
    parser = parser_of(__doc__)
    parser.add_argument("--rows", type=Path, default=ROWS, help="file of rows to compare")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(words)
    try:
        found, out = compared(read(args.rows))
    except ConfigError as error:
        print(f"error: {error}. Fix: write --rows FILE", file=sys.stderr)
        return 2
    shown = json.dumps({"rows": found, "left_out": out}, indent=1)
    print(shown if args.json else "\n".join(lines(found, out)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
