"""Read a published run as a step of the time model: its blocks, axes, microbatches and policies.

step, notes = step_of(row)          # notes: what had to be assumed
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

from bench.families import Family, family_named
from bench.others import (
    Region,
    RowSizes,
    UnknownRowError,
    attention_layer,
    axes_of,
    block,
    ends,
    mamba2_layer,
    mlp_layer,
    moe_layer,
    network_gbs,
)
from bench.recipes import completed
from megacpp.errors import ConfigError
from megacpp.speed.hardware import GpuSpec, gpu
from megacpp.speed.operators import Operator, Passes, Product
from megacpp.speed.step import BlockWork, StepWork

NEEDED = ("layers", "hidden", "heads", "vocab", "seq")
LETTERS = {"*": "A", "M": "M", "E": "E", "-": "F", "A": "A", "F": "F"}


def machine_of(row: dict[str, Any]) -> GpuSpec:
    """Return the GPU of a row, in nodes of its fabric.

    Raises:
        UnknownRowError: no such GPU is known.
    """
    try:
        found = gpu(str(row["gpu"]))
    except ConfigError:
        raise UnknownRowError(f"GPU {row['gpu']} isn't in hardware.json") from None
    per_node = int(row.get("gpus_per_node") or 8)
    return _node(found, per_node, network_gbs(str(row.get("interconnect") or ""), found))


@cache
def _node(found: GpuSpec, per_node: int, gbs: float) -> GpuSpec:
    return replace(found, per_node=per_node, network_gbs=gbs)


def family_of(row: dict[str, Any]) -> Family:
    """Return the software family of a row."""
    kernel = str(row.get("attention_kernel") or "")
    return family_named(str(row.get("source") or ""), bool(row.get("compile")), kernel)


def step_of(row: dict[str, Any]) -> tuple[StepWork, GpuSpec, list[str]]:
    """Return the step of a row, its machine, and what had to be assumed.

    Raises:
        UnknownRowError: with the reason why it can't be predicted.
    """
    notes: list[str] = []
    row = completed(row)
    sizes, machine = sizes_of(row, notes), machine_of(row)
    family, p, world = sizes.family, row["parallel"], int(row["gpus"])
    batch, pp = int(row["global_batch"]), int(p.get("pp") or 1)
    axes = axes_of(p, world, machine.per_node)
    micro = max(1, round(batch / (sizes.rows * _data(row))))
    blocks = _blocks(row, sizes, notes)
    vpp = _virtual(p, pp, notes)
    stages = _stages(len(blocks), pp * vpp, bool(p.get("filled_stages"))) if pp > 1 else ()
    policy = "fsdp" if _is_fsdp(p) else family.data
    if policy != "fsdp" and family.data == "ddp" and p.get("distributed_optimizer"):
        policy = "zero1"
    pure = p.get("fsdp_mixed_precision") == "PURE"
    shared = axes["data"].size if policy in ("fsdp", "zero1") else 1
    held = sum(b.dense for b in blocks) / shared
    held += sum(b.experts for b in blocks) / (axes["expert_data"].size if shared > 1 else 1)
    optimizer: tuple[Operator, ...] = (Passes(family.adam_bytes * held / pp, 20),)
    if "Muon" in str(sizes.model.get("optimizer")):
        optimizer += tuple(_muon(sizes.model, _data(row)))
    step = StepWork(
        blocks,
        axes,
        micro,
        "none" if world == 1 else policy,  # type: ignore[arg-type]
        reduce_bytes=2.0 if pure else 4.0 if _is_fsdp(p) else family.reduce_bytes,
        copied=family.fsdp2,
        overlapped=family.overlapped,
        reshard=p.get("sharding") != "SHARD_GRAD_OP",
        reduce_each=family.name == "llm-foundry",
        stages=stages,
        schedule="interleaved" if vpp > 1 else "1f1b",
        stage_bytes=2.0 * sizes.tokens * sizes.dim / sizes.tp,
        optimizer=optimizer,
        tokens=batch * sizes.seq / world,
    )
    return step, machine, notes


def sizes_of(row: dict[str, Any], notes: list[str]) -> RowSizes:
    """Return the sizes of one rank's microbatch; what is assumed is added to `notes`.

    Raises:
        UnknownRowError: the row lacks a size.
    """
    m, family, machine = _filled(row), family_of(row), machine_of(row)
    if not row.get("global_batch"):
        raise UnknownRowError("no global batch")
    kernel = family.attention[machine.generation]
    text = str(row.get("attention_kernel") or "").lower()
    if "unfused" in text:
        kernel = "unfused"
    elif "flashattention-3" in text or "fa3" in text:
        kernel = "flash3"
    p = row["parallel"]
    tp, cp, ep, pp = (int(p.get(axis) or 1) for axis in ("tp", "cp", "ep", "pp"))
    eight = "fp8" in str(row.get("precision")) or "float8" in str(row.get("precision"))
    said = p.get("ep_overlap") or '"ep_overlap": true' in str(row.get("notes"))
    ep_hides = bool(said) and "overlap off" not in str(row.get("notes"))
    return RowSizes(
        m, family, _micro_batch(row, pp, notes), m["seq"], tp, cp, ep,
        bool(p.get("sp")) or family.name.startswith("torchtitan"),
        "fp8" if eight else "bf16", bool(p.get("async_tp")), ep_hides, kernel,
        _captured(str(row.get("notes"))),
        _flexible(row), machine.per_node, _scaled(row),
    )  # fmt: skip


def again_of(row: dict[str, Any]) -> set[str]:
    """Return the names of the regions that run again; `ops`: every second product of a layer."""
    again, part, _ = _recompute(row, [])
    return again if part == 1.0 else {"ops"}


def _filled(row: dict[str, Any]) -> dict[str, Any]:
    """Return the model's words with sizes that follow from others.

    Raises:
        UnknownRowError: a size lacks.
    """
    m = dict(row.get("model") or {})
    lacking = [name for name in NEEDED if not m.get(name)]
    if lacking:
        raise UnknownRowError(f"model without {', '.join(lacking)}")
    for name in NEEDED:
        m[name] = int(m[name])
    m["kv_heads"] = int(m.get("kv_heads") or m["heads"])
    m["head_dim"] = int(m.get("head_dim") or m["hidden"] // m["heads"])
    if not m.get("ffn") and not m.get("experts"):
        m["ffn"] = 4 * m["hidden"]
    if m.get("experts") and not (m.get("topk") and m.get("moe_ffn")):
        raise UnknownRowError("experts without topk or moe_ffn")
    if not isinstance(row.get("parallel"), dict) or not row.get("gpus"):
        raise UnknownRowError("no degrees of parallelism")
    return m


def _is_fsdp(p: dict[str, Any]) -> bool:
    return isinstance(p.get("fsdp"), int) and p["fsdp"] > 1


def _data(row: dict[str, Any]) -> int:
    """Return the degree of data parallelism."""
    tp, cp, pp = (int(row["parallel"].get(axis) or 1) for axis in ("tp", "cp", "pp"))
    return max(1, int(row["gpus"]) // (tp * cp * pp))


def _micro_batch(row: dict[str, Any], pp: int, notes: list[str]) -> int:
    """Return rows of a microbatch; assumed where the row doesn't say."""
    if row.get("micro_batch"):
        return int(row["micro_batch"])
    local = max(1, int(row["global_batch"]) // _data(row))
    if "torchtitan" in str(row.get("source")):
        notes.append("as many microbatches as stages, torchtitan's default")
        return max(1, local // pp)
    notes.append("rows of a microbatch: the most of 1, 2, 4 that leave 4 microbatches a stage")
    return max([n for n in (1, 2, 4) if local % n == 0 and local // n >= 4 * pp], default=1)


def _virtual(p: dict[str, Any], pp: int, notes: list[str]) -> int:
    """Return stages of a rank."""
    vpp = p.get("vpp") or 1
    if isinstance(vpp, str):
        vpp = 4
        notes.append("interleaved stages of a rank: 4")
    return int(vpp) if pp > 1 else 1


def _captured(notes: str) -> str:
    """Return letters of `LAUNCHES` that CUDA graphs replay, from a row's notes."""
    scope = re.search(r"cuda_graph_(?:scope|modules)[^\[]*\[([^\]]*)\]", notes)
    found = re.search(r"TE graphs ([\w+]+)", notes)
    text = scope[1] if scope else found[1] if found else ""
    if "full_iteration" in text:
        return "AFEMR"
    names = {"attn": "A", "mamba": "M", "moe_router": "R", "mlp": "F"}
    return "".join(letter for name, letter in names.items() if name in text)


def _flexible(row: dict[str, Any]) -> bool:
    """Return whether tokens go to experts by DeepEP or HybridEP."""
    text = f"{row['parallel'].get('dispatcher')} {row.get('notes')}"
    return bool(re.search(r"HybridEP|DeepEP|flex_dispatcher_backend\W+(?!None)\w", text))


def _scaled(row: dict[str, Any]) -> bool:
    """Return whether FP8 is by current scaling: the recipe `fp8_cs` of Megatron-Bridge."""
    return "Megatron-Bridge" in str(row.get("source")) and row.get("precision") == "fp8"


def _blocks(row: dict[str, Any], s: RowSizes, notes: list[str]) -> list[BlockWork]:
    """Return embedding, layers and head."""
    again, part, layers_again = _recompute(row, notes)
    vocab = s.model["vocab"]
    if s.family.name.startswith("megatron"):
        vocab = -(-vocab // (128 * s.tp)) * 128 * s.tp
    first, last = ends(s, vocab)
    kinds = _kinds(s.model)
    found: list[BlockWork] = []
    made: dict[tuple[str, int, bool], BlockWork] = {}
    for number, kind in enumerate(kinds):
        here = number < layers_again if layers_again >= 0 else number % 2 == 0
        window = _window(s.model, number, len(kinds))
        key = kind, window, here
        if key not in made:
            regions = [r for letter in kind for r in _regions(s, letter, window)]
            made[key] = block(s, kind, regions, again if here else set(), part)
        found.append(made[key])
    if s.model.get("mtp"):
        more = found[-1]
        found += [more._replace(kind="mtp")] * int(s.model["mtp"])
        last = last._replace(
            forward=last.forward * (1 + int(s.model["mtp"])),
            backward=last.backward * (1 + int(s.model["mtp"])),
        )
    return [first, *found, last]


def _regions(s: RowSizes, letter: str, window: int) -> list[Region]:
    if letter == "A":
        return list(attention_layer(s, window))
    if letter == "M":
        return list(mamba2_layer(s))
    if letter == "E":
        return list(moe_layer(s))
    return list(mlp_layer(s, int(s.model.get("ffn") or s.model["moe_ffn"])))


def _kinds(m: dict[str, Any]) -> list[str]:
    """Return the blocks of each layer, as letters: A attention, F MLP, E experts, M Mamba-2.

    Raises:
        UnknownRowError: Mamba layers without their sizes or places.
    """
    counts, pattern = m.get("pattern_counts"), m.get("pattern")
    if counts or pattern or m.get("mamba"):
        if not all(m.get(f"mamba_{name}") for name in ("heads", "head_dim", "state", "groups")):
            raise UnknownRowError("Mamba layers without their sizes")
        if counts:
            letters = {"mamba": "M", "attention": "A", "mlp": "F", "moe": "E"}
            named = {str(k).lower(): int(n) for k, n in dict(counts).items()}
            kinds = [
                letter for word, letter in letters.items()
                for k, n in named.items() if k.startswith(word) or LETTERS.get(k.upper()) == letter
                for _ in range(n)
            ]  # fmt: skip
            if kinds:
                return kinds
        if not pattern or set(pattern) - set(LETTERS):
            raise UnknownRowError("Mamba layers without a pattern")
        return [LETTERS[c] for c in pattern]
    dense = int(m.get("dense_layers") or 0) if m.get("experts") else m["layers"]
    return ["AF"] * dense + ["AE"] * (m["layers"] - dense)


def _window(m: dict[str, Any], number: int, layers: int) -> int:
    """Return keys that a layer's queries attend to; 0: all."""
    text = str(m.get("window_pattern") or "")
    match = re.match(r"([SL]+).*?S ?= ?(\d+)", text)
    if match:
        long = match[1][number % len(match[1])] == "L" or number == layers - 1
        return 0 if long else int(match[2])
    wide = m.get("sliding_window")
    return int(wide) if wide and number % 2 == 0 else 0


def _recompute(row: dict[str, Any], notes: list[str]) -> tuple[set[str], float, int]:
    """Return regions that run again, the part of their products, and the number of such layers.

    -1 layers: every second one.
    """
    text = str(row.get("recompute") or "").lower()
    every = 1 << 30
    if "full" in text and "selective" not in text:
        number = re.search(r"recompute_num_layers\W*(\d+)", str(row.get("notes")))
        return {"all"}, 1.0, int(number[1]) if number and '"' in text else every
    if "selective" in text and "none" not in text:
        if "layer" in text and "layernorm" not in text:
            return {"all"}, 1.0, -1
        if "op" in text:
            return {"all"}, 0.5, every
        return {"core_attn"}, 1.0, every
    names = {
        "layernorm": {"norm"}, "moe_act": {"moe_act"}, "mla_up_proj": {"mla_up_proj"},
        "mlp": {"mlp", "activation"}, "core_attn": {"core_attn"},
        "moe": {"moe", "moe_act", "permute", "router"},
    }  # fmt: skip
    found: set[str] = set()
    for name in re.findall(r"[a-z_]+", text):
        found |= names.get(name, set())
    if "not stated" in text or "none stated" in text or not text:
        notes.append("no recompute")
    return found, 1.0, every


def _stages(blocks: int, stages: int, filled: bool = False) -> list[list[int]]:
    """Return the blocks of each stage; the ends count as layers where that divides evenly.

    Args:
        blocks: with both ends.
        stages: of all ranks.
        filled: each has as many layers as another, but the last, which has what is left.

    Raises:
        UnknownRowError: fewer layers than stages.
    """
    if blocks - 2 < stages:
        raise UnknownRowError(f"{blocks - 2} layers in {stages} stages")
    each = math.ceil(blocks / stages)
    if filled and 1 + each * (stages - 1) < blocks - 1:
        edges = [0, *(1 + each * s for s in range(1, stages)), blocks]
        return [list(range(a, b)) for a, b in pairwise(edges)]
    if blocks % stages == 0:
        return [
            list(range(s * blocks // stages, (s + 1) * blocks // stages)) for s in range(stages)
        ]
    layers = blocks - 2
    edges = [1 + round(s * layers / stages) for s in range(stages + 1)]
    found = [list(range(a, b)) for a, b in pairwise(edges)]
    return [[0, *found[0]], *found[1:-1], [*found[-1], blocks - 1]]


def _muon(m: dict[str, Any], data: int) -> list[Product]:
    """Return the products of Newton-Schulz iterations on this rank's share of the matrices."""
    d, f = m["hidden"], int(m.get("ffn") or 4 * m["hidden"])
    shapes = [(d, d)] * 4 + [(d, f)] * 2
    found: list[Product] = []
    share = math.ceil(m["layers"] / data)
    for a, b in shapes:
        found += [Product(a, a, b, 5 * share), Product(a, a, a, 5 * share),
                  Product(a, b, a, 5 * share)]  # fmt: skip
    return found
