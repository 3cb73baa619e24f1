"""Tensor and sequence parallelism alone and on top of FSDP2 and HSDP: the same run; the plan.

Forked gloo ranks and tests/parallel/parity.py.
"""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import replace
from itertools import groupby

import pytest
import torch

from megacpp.config.schema import KEEP, MeshConfig
from megacpp.model.hybrid import HybridLM
from parallel.boundary import AccumulationBoundary
from parallel.build import build_model
from parallel.notation import Array, Redistribute
from parallel.plans import ACTIVATIONS, PARAMETERS, Row, activation_layouts, row_of
from tests.model.small import variants
from tests.parallel.parity import (
    Run,
    Trace,
    batches_of,
    check,
    config_of,
    models,
    traces_of,
    world_of,
)
from tests.ranks import run_ranks
from tests.together import Together

TP2, TP4 = MeshConfig(dp_shard=1, tp=2), MeshConfig(dp_shard=1, tp=4)
FSDP_TP = MeshConfig(dp_shard=2, tp=2)
REPLICAS_TP = MeshConfig(dp_replicate=2, dp_shard=1, tp=2)
NORMS = replace(KEEP, norms=True)
INPUTS = replace(KEEP, regather="on", mtp=False)
RUNS = [
    *(Run(letter, TP2) for letter in "AMERF"),
    *(Run(name, TP2) for name in ("plain", "tied", "mla", "options")),
    Run("plain", TP2, dtype="fp32"),
    Run("plain", TP2, accum=4),
    Run("options", TP4),
    *(Run(name, FSDP_TP) for name in ("plain", "tied", "options")),
    Run("plain", FSDP_TP, accum=2, evaluate=True),
    Run("mla", REPLICAS_TP),
    Run("bias", FSDP_TP),
    Run("norm_over_heads", FSDP_TP),
    *(Run(name, FSDP_TP, recompute=NORMS) for name in ("plain", "mla", "options")),
    *(Run(letter, TP4, recompute=INPUTS) for letter in "AMERF"),
]


@functools.cache
def results() -> Together[Run, list[Trace]]:
    make = functools.partial(traces_of, collectives=True)
    return Together(__name__, RUNS, make, lambda run: [run.reference])


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_the_same_run(run: Run) -> None:
    check(results()[run], results()[run.reference][0], run.dtype)


@pytest.mark.parametrize("run", [run for run in RUNS if run.accum > 1], ids=str)
def test_gradients_of_whole_parameters_are_added_once_a_step(run: Run) -> None:
    """However many layers and microbatches: one all-reduce over tp, next to the two sums of the
    ranks that have tokens of their own."""
    norms = models()[run.model].depth + 1
    for trace in results()[run]:
        numels = [c.numel for c in trace.collectives if c.kind == "all_reduce"]
        # The R norm over all heads sums one number a token, forward and backward.
        heads = [n for n in numels if n == run.device_batch * 16]
        rest = [n for n in numels if n not in heads]
        sums = 2 if run.mesh.dp_shard > 1 else 0
        assert len(heads) == 2 * run.accum and len(rest) == 1 + sums, numels
        assert max(rest) >= norms * 16 // run.mesh.dp_shard


def test_inputs_of_mixers_are_gathered_again_once_a_layer() -> None:
    """But for the last layer, which keeps its own; the sums over `tp` stay as many."""

    def count(run: Run) -> Counter[str]:
        return Counter(c.kind for c in results()[run][0].collectives if not c.in_place)

    plain = Run("plain", FSDP_TP)
    again, kept = count(replace(plain, recompute=NORMS)), count(plain)
    assert again - kept == {"all_gather": models()["plain"].depth - 1} and not kept - again


def test_evaluation_agrees() -> None:
    run = next(run for run in RUNS if run.evaluate)
    expected = results()[run.reference][0].evaluations
    for trace in results()[run]:
        assert trace.sharded and trace.evaluations == pytest.approx(expected, rel=1e-12)


# ---- the plan -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", variants())
def test_every_parameter_matches_one_row(name: str) -> None:
    with torch.device("meta"):
        model = HybridLM(variants()[name])
    for parameter, p in model.named_parameters():
        assert len(row_of(model, parameter).dims) == p.dim(), parameter


def test_no_row_and_two_rows_are_errors() -> None:
    with torch.device("meta"):
        model = HybridLM(variants()["plain"])
    with pytest.raises(ValueError, match=r"embed.weight must .* \(matches none\)"):
        row_of(model, "embed.weight", PARAMETERS[1:])
    twice = (*PARAMETERS, Row("", ("embed.*",), "[V, D]"))
    with pytest.raises(ValueError, match=r"\(matches \[V_tp, D\] and \[V, D\]\)"):
        row_of(model, "embed.weight", twice)


@pytest.mark.parametrize("text", ["[N_tp, D_tp]", "x[B, T_tp, D]{tp}"])
def test_an_axis_is_used_once(text: str) -> None:
    with pytest.raises(ValueError, match="mesh axis 'tp' is used twice"):
        Array.parse(text)


def test_moves_read_as_they_are_written() -> None:
    gathered = Redistribute.parse("x[B, T_tp, D] -> x[B, T, D]")
    summed = Redistribute.parse("y[B, T, D]{tp} -> y[B, T_tp, D]")
    assert (gathered.kind, gathered.axis, gathered.dim) == ("gather", "tp", 1)
    assert (summed.kind, summed.axis, summed.dim) == ("scatter_sum", "tp", 1)
    turned = Redistribute.parse("v[B, T_tp, C] -> v[B, T, C_tp]")
    assert (turned.kind, turned.axis, turned.dim) == ("exchange", "tp", 1)
    back = Redistribute.parse("v[B_cp, T, C_tp] -> v[B_cp, T_tp, C]")
    assert (back.kind, back.axis, back.dim) == ("exchange", "tp", 2)
    assert str(gathered) == "x[B, T_tp, D] -> x[B, T, D]"
    assert str(summed) == "y[B, T, D]{tp} -> y[B, T_tp, D]"
    assert str(back) == "v[B_cp, T, C_tp] -> v[B_cp, T_tp, C]"
    for wrong in (
        "x[B] -> x[B]",
        "x[B_tp, T] -> x[B_tp, T]",
        "x[B, T] -> x[T, B]",
        "x[B_tp] -> x[B_cp]",
        "x(B)",
    ):
        with pytest.raises(ValueError, match=r"neither|does not move|not written"):
            Redistribute.parse(wrong)


def test_each_module_is_laid_out_once() -> None:
    """A row for every layer names the modules of all layers; any other row names one."""
    with torch.device("meta"):
        model = HybridLM(models()["engram"])
    names = [name for name, *_ in activation_layouts(model)]
    assert len(names) == len(set(names)) and {"embed", "head"} <= {*names}
    tables = {n for n, _ in model.named_modules() if n.endswith("engram.tables")}
    assert tables and tables <= {*names}


def test_rows_of_one_kind_stand_together() -> None:
    """A reader finds a letter's parameters in one place."""
    order = [letters for letters, _ in groupby(row.letters for row in PARAMETERS)]
    assert [letters for letters in order if letters not in ("F", "E")].count("A") == 1
    assert order.count("M") == order.count("R") == 1


def test_what_leaves_a_module_as_a_part_was_summed_over_a_cut_dim() -> None:
    """A partial sum needs a matrix whose last dim, over which it sums, is cut; and only one."""
    for layout in ACTIVATIONS:
        if layout.leave is None or Redistribute.parse(layout.leave).before.partial is None:
            continue
        for letter in layout.letters or [""]:
            names = [
                (name, Array.parse(row.array))
                for row in PARAMETERS
                if (letter in row.letters if letter else not row.letters)
                for name in row.names
                if name.startswith(layout.module)
            ]
            summed = [
                name for name, array in names if array.axes[-1] == "tp" and len(array.dims) == 2
            ]
            tables = ("embed.weight", "tables.weight")
            looked_up = [name for name, array in names if name.endswith(tables) and array.axes[0]]
            assert len({*summed, *looked_up}) == 1, (layout, letter, summed)


# ---- what sequence parallelism saves ------------------------------------------------------------


def bytes_of_the_residual_stream(rank: int, world: int, run: Run) -> tuple[int, int]:
    """Bytes that the blocks' norms keep for their backward, and of what a block hands on."""
    config, here = config_of(run), world_of(rank, run)
    model = build_model(config, here)
    kept, handed = [], []

    def pack(t: torch.Tensor) -> torch.Tensor:
        kept.append(t.nbytes if t.dim() == 3 else 0)  # not the weight
        return t

    for block in model.blocks.values():
        hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t)
        block.norm.register_forward_pre_hook(lambda _, args, hooks=hooks: hooks.__enter__())
        block.norm.register_forward_hook(lambda _, args, out, hooks=hooks: hooks.__exit__())
        block.register_forward_hook(lambda _, args, out: handed.append(out.nbytes))
    AccumulationBoundary(model, here, config).accumulate(batches_of(0, here, run))
    return sum(kept), sum(handed)


def test_sequence_parallelism_divides_the_residual_stream() -> None:
    """Exactly by tp: each rank normalises and adds its own tokens only."""
    one = bytes_of_the_residual_stream(0, 1, Run("plain"))
    assert min(one) > 0
    for degree, config in ((2, TP2), (4, TP4)):
        run = Run("plain", config)
        for found in run_ranks(bytes_of_the_residual_stream, degree, run):
            assert tuple(n * degree for n in found) == one
