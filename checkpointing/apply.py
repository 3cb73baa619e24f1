"""The policy on a model: what each of its blocks keeps, and how.

    keeper = ActivationCheckpointing(config, device)
    model = build_model(config, world, keeper)

The builder calls it when heads, experts and rows are cut and before FSDP2 shards what is left.
(Activation memory, not saved training state.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from checkpointing.rebuild import BlockSeam, Check, Handover, Replays, Store, stay
from megacpp.blocks.hyper_connections.groups import InGroup, places_in_groups
from megacpp.blocks.m2rnn.module import M2RNN
from megacpp.config.checks.fp8 import fp8_blocks
from megacpp.config.schema import CheckpointingPolicy, Config
from megacpp.model.hybrid import HybridLM
from megacpp.model.pieces import BLOCK, NOTHING, Piece, layer_pieces
from megacpp.model.seam import Seam
from megacpp.model.stages import SPLIT_BACKWARD, stage_parts

CPU = torch.device("cpu")
READS: frozenset[Piece] = frozenset({"read_streams"})
MIXES: frozenset[Piece] = frozenset({"read_streams", "mix_streams"})


class ActivationCheckpointing:
    """Gives the blocks of a model what `config.recompute` says.

    The order matters: latents and FP8 change layers, seams and the compiler take them as they then
    are, and inside a compiled block there is no seam.

    Args:
        device: where the model will run.
        pieces: of each layer of the whole model, instead of what the policy says; for comparisons.
        say: prints what is compiled, when the first step comes to it.

    Attributes:
        pieces: what each layer of the whole model runs again.
        groups: of each layer, where it is among those whose streams run again together.
        replays: counts of what ran again.
        compiled: layers where the compiler decides, of all or of a part, and in which words.
        offloader: what moves tensors to the host (None: nothing does).
        fp8: which layers compute in FP8 (None: none).
    """

    def __init__(
        self,
        config: Config,
        device: torch.device = CPU,
        pieces: Sequence[frozenset[Piece]] | None = None,
        say: Callable[[str], object] | None = None,
    ) -> None:
        self.config, self.device, self.say = config, device, say
        self.pieces = pieces or layer_pieces(config.recompute, config.model)
        self.groups = places_in_groups(config)
        self.replays = Replays()
        self.compiled: dict[int, str] = {}
        self.fp8 = None
        self.offloader = None
        if config.recompute.offload != "none":
            from checkpointing.offload import Offloader

            policy = config.recompute
            min_bytes, most = int(policy.offload_min_mib * 2**20), policy.offload_host_gib * 2**30
            self.offloader = Offloader(min_bytes, int(most), device)

    def __call__(self, model: HybridLM) -> None:
        config, policy = self.config, self.config.recompute
        if policy.compress:
            from checkpointing.compress import compress_linears

            compress_linears(model, policy.compress, config.run.seed)
        if config.precision.fp8 != "off":
            from checkpointing.fp8 import to_fp8

            self.fp8 = to_fp8(model, config, self.device)
        stores = self._stores(model)
        set_seams(model, self.pieces, policy, self.replays, stores, self.groups)
        if config.precision.fp8 == "te":
            _seams_of_transformer_engine(model, config)
        if config.train.compile != "off":
            from checkpointing.compile import compile_blocks

            budget, mesh = policy.activation_memory_budget, config.mesh
            halves = mesh.pp > 1 and mesh.pp_schedule in SPLIT_BACKWARD
            found = compile_blocks(model, config.train.compile, budget, halves, self.say)
            self.compiled = {layer: found.words(layer) for layer in sorted(found.graphs)}

    def words(self) -> list[str]:
        """What a run prints of layers in FP8."""
        return [] if self.fp8 is None else self.fp8.words(self.config.precision)

    def _stores(self, model: HybridLM) -> Callable[[nn.Module], Store]:
        """Where what a block keeps waits."""
        offloader = self.offloader
        if offloader is None:
            return lambda block: stay
        for layer in first_layers(self.config):
            if str(layer) in model.blocks:
                offloader.follow(model.blocks[str(layer)])
        return offloader.store_for


def first_layers(config: Config) -> list[int]:
    """Layers that begin a forward: the first of the model, or of each pipeline stage."""
    if config.mesh.pp == 1:
        return [0]
    ranks = range(config.mesh.pp)
    parts = [part for rank in ranks for part in stage_parts(config.model, config.mesh, rank)]
    return [part.layers[0] for part in parts if part.layers]


def set_seams(
    model: HybridLM,
    pieces: Sequence[frozenset[Piece]],
    policy: CheckpointingPolicy,
    replays: Replays,
    stores: Callable[[nn.Module], Store] = lambda block: stay,
    groups: Sequence[InGroup | None] = (),
) -> None:
    """Gives every block that `model` holds its seam.

    Args:
        pieces: what runs again of each layer of the whole model.
        policy: the rest of the policy.
        replays: where it is counted.
        stores: where what a block keeps waits.
        groups: of layers whose streams run again together.
    """
    everything, handover = policy.offload == "saved_tensors", None
    for key, block in model.blocks.items():
        layer = int(key)
        chosen, last = pieces[layer], layer == len(pieces) - 1
        before = after = None
        if groups and (place := groups[layer]) is not None:
            before = handover if place.place else None
            handover = after = None if place.closes else Handover()
            chosen = chosen | (READS if place.closes else MIXES)
        if chosen or (everything and not last):
            check = check_of(model.letters[layer])
            store = stores(block)
            seam = BlockSeam(chosen, replays, store, everything, check, before, after)
            give(block, seam)
        for module in block.modules():
            if isinstance(module, M2RNN):
                module.keep_states = policy.rblock == "none"
    if policy.mtp and hasattr(model, "mtp"):
        model.mtp.seam = depth_seam(policy, replays)


def _seams_of_transformer_engine(model: HybridLM, config: Config) -> None:
    """Blocks that run again as a whole do so by the library that knows their scales."""
    from checkpointing.fp8 import TransformerEngineSeam

    layers = fp8_blocks(config)
    for key, block in model.blocks.items():
        if int(key) in layers and "block" in getattr(block.seam, "pieces", ()):
            give(block, TransformerEngineSeam())


def check_of(letter: str) -> Check:
    """How strictly a piece that runs again is compared with its first run.

    The rows of experts are added up in another order by some libraries, which may change what
    comes after; their blocks alone go without.
    """
    return "none" if letter == "E" else "default"


def give(block: nn.Module, seam: Seam) -> None:
    """Makes `seam` that of a block and of all its modules."""
    for module in block.modules():
        if hasattr(module, "seam"):
            module.seam = seam  # type: ignore[assignment]


def depth_seam(policy: CheckpointingPolicy, replays: Replays) -> Seam:
    """For each depth of multi-token prediction: `seam("block", step, ...)` runs it again."""
    return BlockSeam(BLOCK if policy.mtp else NOTHING, replays)
