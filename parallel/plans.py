"""The plan: where each dim of each parameter lies, and what moves at the door of each module.

One row per parameter and one per door, in the notation of parallel/notation.py. A parameter that a
row doesn't cut over `tp` is whole on every rank of it, but each rank has only a part of its
gradient (other tokens, or other heads); the accumulation boundary adds these up once per step.
FSDP2 then cuts dim 0 of every local part over the data axes (parallel/fsdp.py), so `fsdp` is not
written here.

Letters: V vocabulary, D model, Q and K query and key/value heads x head dim, W heads x head dim, H
heads, L latent, F hidden, S groups x state, R MIMO rank, N state, P head dim, A angles, E experts,
I hidden of an expert, X heads x dim of an indexer, Z random projection, O one, J taps, Y rows of
n-gram tables, U numbers of one or two D, C channels of all residual streams (or one), M memory, B
rows, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from megacpp.config.schema import ModelConfig
from megacpp.model.hybrid import HybridLM
from parallel.notation import Array, Move


@dataclass(frozen=True)
class Row:
    """Parameters of one kind of block.

    Attributes:
        letters: kinds of block whose mixer has them; empty: outside of all mixers.
        names: patterns of the name below the mixer (outside: of the whole name).
        array: their dims and axes.
        when: the row applies to a model.
    """

    letters: str
    names: tuple[str, ...]
    array: str
    when: Callable[[ModelConfig], bool] = lambda config: True


def own_q(config: ModelConfig) -> bool:
    """M2RNN's query heads are several, so they are cut like the others."""
    return config.m2rnn.num_q_heads > 1


def own_k(config: ModelConfig) -> bool:
    return config.m2rnn.num_k_heads > 1


def shared_q(config: ModelConfig) -> bool:
    """One query head serves all heads, so every rank has it."""
    return not own_q(config)


def shared_k(config: ModelConfig) -> bool:
    return not own_k(config)


PARAMETERS = (
    # embedding, head and the norms of the residual stream
    Row("", ("embed.weight", "head.weight", "top.unembed.weight"), "[V_tp, D]"),
    Row("", ("ngram.tables.weight",), "[Y_tp, U]"),
    Row("", ("ngram.proj.weight",), "[D, U]"),
    Row("", ("norm.weight", "blocks.*.norm.weight"), "[D]"),
    # multi-token prediction: U is a hidden state beside an embedding, 2 D
    Row("", ("mtp.blocks.*norm.weight",), "[D]"),
    Row("", ("mtp.blocks.*.projection.weight",), "[D, U]"),
    # hyper-connections: whole, each rank for its own tokens of the residual streams
    Row("", ("blocks.*.connection.phi",), "[K, C]"),
    Row("", ("blocks.*.connection.scale", "blocks.*.connection.bias"), "[K]"),
    # n-gram memory: tables are cut by row, its convolution by channel; the rest works on own tokens
    Row("", ("blocks.*.engram.tables.weight",), "[V_tp, N]"),
    Row("", ("blocks.*.engram.wk.weight", "blocks.*.engram.wv.weight"), "[C, M]"),
    Row("", ("blocks.*.engram.w[kv].bias", "blocks.*.engram.*_norm.weight"), "[C]"),
    Row("", ("blocks.*.engram.conv.weight",), "[C_tp, O, J]"),
    # A: heads are cut, the latents of MLA are whole
    Row("A", ("wq.weight",), "[Q_tp, D]"),
    Row("A", ("wk.weight", "wv.weight"), "[K_tp, D]"),
    Row("A", ("wo.weight",), "[D, Q_tp]"),
    Row("A", ("q_norm.weight", "k_norm.weight", "kv_norm.weight"), "[N]"),
    Row("A", ("wq_a.weight", "wkv_a.weight"), "[L, D]"),
    Row("A", ("wq_b.weight", "wkv_b.weight"), "[Q_tp, L]"),
    # the indexer of a sparse block is whole: every rank chooses for all tokens
    Row("A", ("indexer.wq_b.weight",), "[X, L]"),
    Row("A", ("indexer.wk.weight", "indexer.weights_proj.weight"), "[X, D]"),
    Row("A", ("indexer.k_norm.weight", "indexer.k_norm.bias"), "[X]"),
    # latents of compressed layers (checkpointing/compress.py) lie as the weights' rows do
    Row("A", ("wq.latent",), "[Q_tp, Z]"),
    Row("A", ("wk.latent", "wv.latent"), "[K_tp, Z]"),
    Row("A", ("wq_a.latent", "wkv_a.latent"), "[L, Z]"),
    Row("F", ("w1.latent", "w3.latent"), "[F_tp, Z]"),
    # F and the shared expert: hidden units are cut
    Row("F", ("w1.weight", "w3.weight"), "[F_tp, D]"),
    Row("F", ("w2.weight",), "[D, F_tp]"),
    Row("E", ("shared.w1.weight", "shared.w3.weight"), "[F_tp, D]"),
    Row("E", ("shared.w2.weight",), "[D, F_tp]"),
    Row("E", ("shared.gate.weight",), "[O, D]"),
    # E: whole experts on the ranks of ep
    Row("E", ("router.weight",), "[E, D]"),
    Row("E", ("experts.w1", "experts.w3"), "[E_ep, I, D]"),
    Row("E", ("experts.w2",), "[E_ep, D, I]"),
    # M: what a head owns is cut by head; B, C and the angles, which heads share, are whole
    Row("M", ("in_z.weight", "in_x.weight"), "[W_tp, D]"),
    Row("M", ("in_dt.weight", "in_A.weight", "in_trap.weight"), "[H_tp, D]"),
    Row("M", ("in_B.weight", "in_C.weight"), "[S, D]"),
    Row("M", ("in_angles.weight",), "[A, D]"),
    Row("M", ("conv_x.weight",), "[W_tp, O, J]"),
    Row("M", ("conv_B.weight", "conv_C.weight"), "[S, O, J]"),
    Row("M", ("dt_bias", "D"), "[H_tp]"),
    Row("M", ("B_bias", "C_bias"), "[H_tp, R, N]"),
    Row("M", ("mimo_x", "mimo_z", "mimo_o"), "[H_tp, R, P]"),
    Row("M", ("B_norm.weight", "C_norm.weight"), "[N]"),
    Row("M", ("norm.weight",), "[W_tp]"),
    Row("M", ("out_proj.weight",), "[D, W_tp]"),
    # R: heads are cut; a query or key head that all heads share is whole
    Row("R", ("in_v.weight", "in_gate.weight"), "[W_tp, D]"),
    Row("R", ("in_forget.weight",), "[H_tp, D]"),
    Row("R", ("in_q.weight",), "[Q_tp, D]", own_q),
    Row("R", ("in_q.weight",), "[Q, D]", shared_q),
    Row("R", ("in_k.weight",), "[K_tp, D]", own_k),
    Row("R", ("in_k.weight",), "[K, D]", shared_k),
    Row("R", ("conv_v.weight",), "[W_tp, O, J]"),
    Row("R", ("conv_q.weight",), "[Q_tp, O, J]", own_q),
    Row("R", ("conv_q.weight",), "[Q, O, J]", shared_q),
    Row("R", ("conv_k.weight",), "[K_tp, O, J]", own_k),
    Row("R", ("conv_k.weight",), "[K, O, J]", shared_k),
    Row("R", ("decay_gate.A_log", "decay_gate.dt_bias"), "[H_tp]"),
    Row("R", ("state_weight",), "[H_tp, P, P]"),
    Row("R", ("D",), "[H_tp, P]"),
    Row("R", ("g_norm.weight",), "[W_tp]"),
    Row("R", ("output_projection.weight",), "[D, W_tp]"),
)


BEHIND = {"attention": "A", "feed_forward": "F"}  # blocks of multi-token prediction, by name


@dataclass(frozen=True)
class Door:
    """What moves where activations enter and leave a module.

    Attributes:
        letters: kinds of block; empty: outside of all blocks.
        module: name below the mixer (outside: in the model, `*` for any layer); empty: the mixer
            itself.
    """

    letters: str
    module: str
    enter: str | None
    leave: str | None


DOORS = (
    # The residual stream is cut by token (sequence parallelism); mixers see all tokens.
    Door("", "embed", None, "x[B, T, D]{tp} -> x[B, T_tp, D]"),
    # what is looked up is narrower than the model, and projected where it arrives
    Door("", "ngram.tables", None, "u[B, T, K, U]{tp} -> u[B, T_tp, K, U]"),
    # A memory is looked up by all ranks, each in its rows; its convolution needs all tokens.
    Door("", "blocks.*.engram.tables", None, "e[B, T, H, N]{tp} -> e[B, T_tp, H, N]"),
    Door(
        "",
        "blocks.*.engram.conv",
        "v[B, T_tp, C] -> v[B, T, C_tp]",
        "v[B, T, C_tp] -> v[B, T_tp, C]",
    ),
    Door("AFMR", "", "x[B, T_tp, D] -> x[B, T, D]", "y[B, T, D]{tp} -> y[B, T_tp, D]"),
    # Router and routed experts work on the rank's own tokens; only the shared expert is cut.
    Door("E", "shared", "x[T_tp, D] -> x[T, D]", "y[T, D]{tp} -> y[T_tp, D]"),
    Door("", "top", "x[B, T_tp, D] -> x[B, T, D]", None),
    Door("", "head", "x[B, T_tp, D] -> x[B, T, D]", None),
)


def row_of(model: HybridLM, name: str, table: tuple[Row, ...] = PARAMETERS) -> Array:
    """Dims and axes of a parameter.

    Raises:
        ValueError: no row or more than one; the parameter is named.
    """
    letter, short = place(name, model.letters)
    found = [
        row
        for row in table
        if (letter in row.letters if letter else not row.letters)
        and any(fnmatchcase(short, pattern) for pattern in row.names)
        and row.when(model.config)
    ]
    if len(found) != 1:
        rows = " and ".join(row.array for row in found) or "none"
        raise ValueError(
            f"{name} must match exactly one row of the plan (matches {rows}). "
            "Fix: add it to a row of parallel/plans.py, or narrow one."
        )
    return Array.parse(found[0].array)


def place(name: str, letters: list[str] | str) -> tuple[str, str]:
    """The letter of the block whose mixer has a parameter (none outside), and its name below."""
    block, inside, short = name.partition(".mixer.")
    if not inside:
        return "", name
    key = block.rpartition(".")[2]
    return BEHIND[key] if key in BEHIND else letters[int(key)], short


def doors_of(model: HybridLM) -> Iterator[tuple[str, nn.Module, Move | None, Move | None]]:
    """Every door of a model: module name, module, and the moves into and out of it."""
    modules = dict(model.named_modules())
    for door in DOORS:
        for prefix in _owners(model, door):
            module = modules.get(prefix)
            if module is not None:
                yield prefix, module, _move(door.enter), _move(door.leave)


def _owners(model: HybridLM, door: Door) -> list[str]:
    if not door.letters:
        layers = model.blocks if "*" in door.module else ("",)
        return [door.module.replace("*", key) for key in layers]
    below = f".{door.module}" if door.module else ""
    mixers = model.mixers().items()
    return [f"{name}{below}" for name, (letter, _) in mixers if letter in door.letters]


def _move(text: str | None) -> Move | None:
    return None if text is None else Move.parse(text)
