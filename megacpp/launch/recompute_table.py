"""Recompute table: the parts of each layer that backward recomputes, for header and launch.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import groupby
from typing import Any

from megacpp.config.checks.fp8 import fp8_blocks
from megacpp.config.schema import Config
from megacpp.memory.budget import words
from megacpp.memory.forms.activations import activation_bytes
from megacpp.memory.replayed import replayed_flops_per_token
from megacpp.model.flops import train_flops_per_token
from megacpp.model.pattern import block_letters
from megacpp.model.regions import Region, layer_regions

WORDS: dict[Region, str] = {
    "block": "all of the block",
    "norm": "norms",
    "gather": "inputs gathered over tp",
    "core_attn": "core attention",
    "mla_q_upproj": "queries from their latent",
    "mla_kv": "keys and values from their latent",
    "mlp": "hidden units of dense feed-forwards",
    "expert_gemm": "rows and hidden units of experts",
    "conv_bc": "convolution to scan inputs",
}


def layer_rows(config: Config, compiled: Mapping[int, str]) -> list[dict[str, Any]]:
    """Return one row per layer, in order; with FP8 also whether the layer computes in FP8.

    Args:
        config: configuration of the run.
        compiled: layers in which the compiler decides about all or a part, with a description.
    """
    letters = block_letters(config.model.pattern, config.model.depth)
    regions = layer_regions(config.recompute, config.model)
    rows, in_fp8 = [], fp8_blocks(config)
    for layer, (letter, chosen) in enumerate(zip(letters, regions, strict=True)):
        if config.mesh.tp == 1:
            chosen = chosen - {"gather"}
        if layer in compiled:  # what the compiler decides about
            chosen = chosen - ({"mlp", "expert_gemm"} if "experts" in compiled[layer] else {"mlp"})
        names = [word for region, word in WORDS.items() if region in chosen]
        if letter == "R" and config.recompute.rblock != "none":
            names.append("recurrence from its chunks' first states")
        if layer in compiled:  # an E block isn't compiled whole
            names = [*(names if letter == "E" else []), compiled[layer]]
        row = {"layer": layer, "kind": letter, "runs_again": names}
        rows.append(row if config.precision.fp8 == "off" else row | {"fp8": layer in in_fp8})
    return rows


def table_lines(config: Config, compiled: Mapping[int, str]) -> list[str]:
    """Return a line for all layers of a kind with the same parts; the last layer apart."""
    *rows, last = layer_rows(config, compiled)
    key = lambda row: (row["kind"], row["runs_again"], row.get("fp8", False))  # noqa: E731
    found = []
    for (kind, names, fp8), same in groupby(sorted(rows, key=key), key):
        words = ", ".join(names) or "keeps all"
        found.append(f"{kind} x {len(list(same)):<3} {words}{' (FP8)' * fp8}")
    names = ", ".join(last["runs_again"])
    found.append(f"last {last['kind']} {names or 'keeps all, its backward comes at once'}")
    policy = config.recompute
    if policy.offload != "none":
        what = {"block_inputs": "arguments of regions", "saved_tensors": "all that is kept"}
        found.append(
            f"{what[policy.offload]} from {policy.offload_min_mib:g} MiB waits on the host, "
            f"up to {policy.offload_host_gib:g} GiB"
        )
    if policy.compress:
        found.append(f"inputs of linear layers kept as projections to {policy.compress:g} of them")
    return found


def selective_offer(config: Config, ranks: int) -> list[str]:
    """Return a line on what `recompute.ablock=selective` would free, and its FLOPs; else nothing.

    Args:
        config: as it runs, with `auto` resolved for the device.
        ranks: number of ranks.
    """
    policy, model = config.recompute, config.model
    if policy.ablock != "none" or policy.core_attn or config.train.compile != "off":
        return []
    other = replace(config, recompute=replace(policy, ablock="selective"))
    freed = activation_bytes(config, ranks).bytes - activation_bytes(other, ranks).bytes
    if freed <= 0:
        return []
    more = replayed_flops_per_token(other) - replayed_flops_per_token(config)
    share = more / train_flops_per_token(model, config.data.seq_len)
    return [
        f"recompute.ablock=selective would free {words(freed)} of a microbatch on the first rank "
        f"for {share:.1%} more FLOPs"
    ]
