"""Application of the recompute policy to the blocks of a model.

    ac = ActivationCheckpointing(config, device)
    model = build_model(config, world, ac)

The builder calls it after heads, experts and rows are sharded by tensor, expert and context
parallelism, and before FSDP2 shards the rest. (Activation memory, not saved training state.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from checkpointing.recompute import BlockRecompute, Replays, Store, StreamHandoff, stay
from megacpp.blocks.hyper_connections.groups import InGroup, places_in_groups
from megacpp.blocks.kinds import KINDS
from megacpp.blocks.m2rnn.module import M2RNNScan
from megacpp.config.checks.fp8 import fp8_blocks
from megacpp.config.schema import CheckpointingPolicy, Config
from megacpp.model.hybrid import HybridLM
from megacpp.model.recompute import Recompute
from megacpp.model.regions import BLOCK, NOTHING, Region, compiled_budget, layer_regions
from megacpp.model.stages import SPLIT_BACKWARD, stage_parts

if TYPE_CHECKING:
    from checkpointing.compile import Graphs

CPU = torch.device("cpu")
READS: frozenset[Region] = frozenset({"read_streams"})
MIXES: frozenset[Region] = frozenset({"read_streams", "mix_streams"})


class ActivationCheckpointing:
    """Application of `config.recompute` to the blocks of a model.

    The order matters: latents and FP8 replace layers, recompute regions and the compiler apply to
    the result, and a compiled block has no recompute regions.

    Args:
        config: configuration of the run.
        device: device on which the model will run.
        regions: recomputed regions of each layer of the whole model, instead of the policy's; for
            comparisons.
        say: prints what is compiled, in the first step.

    Attributes:
        regions: recomputed regions of each layer of the whole model.
        groups: position of each layer among those whose streams are recomputed together.
        replays: number of recomputations.
        compiled: layers in which the compiler decides about all or a part, with a description.
        offloader: moves tensors to the host (None: offload is off).
        fp8: layers that compute in FP8 (None: FP8 is off).
        graphs: makes the graphs of compiled blocks (None: torch.compile).
    """

    def __init__(
        self,
        config: Config,
        device: torch.device = CPU,
        regions: Sequence[frozenset[Region]] | None = None,
        say: Callable[[str], object] | None = None,
    ) -> None:
        self.config, self.device, self.say = config, device, say
        self.graphs: type[Graphs] | None = None
        self.regions = regions or layer_regions(config.recompute, config.model)
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
        """Apply the policy to `model` in place."""
        config, policy = self.config, self.config.recompute
        if policy.compress:
            from checkpointing.compress import compress_linears

            compress_linears(model, policy.compress, config.run.seed)
        if config.precision.fp8 != "off":
            from checkpointing.fp8 import to_fp8

            self.fp8 = to_fp8(model, config, self.device)
        stores = self._stores(model)
        set_recompute(model, self.regions, policy, self.replays, stores, self.groups)
        if config.precision.fp8 == "te":
            _recompute_by_transformer_engine(model, config)
        if config.train.compile != "off":
            from checkpointing.compile import compile_blocks

            budget, mesh = compiled_budget(policy, config.model), config.mesh
            halves = mesh.pp > 1 and mesh.pp_schedule in SPLIT_BACKWARD
            found = compile_blocks(
                model, config.train.compile, budget, halves, self.say, self.graphs
            )
            self.compiled = {layer: found.words(layer) for layer in sorted(found.graphs)}

    def words(self) -> list[str]:
        """Return lines about layers in FP8, for the header of a run."""
        return [] if self.fp8 is None else self.fp8.words(self.config.precision)

    def _stores(self, model: HybridLM) -> Callable[[nn.Module], Store]:
        """Return the store of each block: where its saved tensors are kept."""
        offloader = self.offloader
        if offloader is None:
            return lambda block: stay
        for layer in first_layers(self.config):
            if str(layer) in model.blocks:
                offloader.follow(model.blocks[str(layer)])
        return offloader.store_for


def first_layers(config: Config) -> list[int]:
    """Return the layers that begin a forward: the first of the model, or of each pipeline stage."""
    if config.mesh.pp == 1:
        return [0]
    ranks = range(config.mesh.pp)
    parts = [part for rank in ranks for part in stage_parts(config.model, config.mesh, rank)]
    return [part.layers[0] for part in parts if part.layers]


def set_recompute(
    model: HybridLM,
    regions: Sequence[frozenset[Region]],
    policy: CheckpointingPolicy,
    replays: Replays,
    stores: Callable[[nn.Module], Store] = lambda block: stay,
    groups: Sequence[InGroup | None] = (),
) -> None:
    """Let the blocks of `model` recompute their regions.

    Args:
        model: this rank's part of the model.
        regions: recomputed regions of each layer of the whole model.
        policy: further settings.
        replays: counts recomputations.
        stores: where a block's saved tensors are kept.
        groups: layers whose streams are recomputed together.
    """
    everything, handoff = policy.offload == "saved_tensors", None
    for key, block in model.blocks.items():
        layer = int(key)
        chosen, last = regions[layer], layer == len(regions) - 1
        before = after = None
        if groups and (place := groups[layer]) is not None:
            before = handoff if place.place else None
            handoff = after = None if place.closes else StreamHandoff()
            chosen = chosen | (READS if place.closes else MIXES)
        if chosen or (everything and not last):
            check = KINDS[model.letters[layer]].compared
            store = stores(block)
            recompute = BlockRecompute(chosen, replays, store, everything, check, before, after)
            give(block, recompute)
        for module in block.modules():
            if isinstance(module, M2RNNScan):
                module.keep_states = policy.rblock == "none"
    if policy.mtp and hasattr(model, "mtp"):
        model.mtp.recompute = recompute_of_depths(policy, replays)


def _recompute_by_transformer_engine(model: HybridLM, config: Config) -> None:
    """Let Transformer Engine recompute whole FP8 blocks: it knows their scales."""
    from checkpointing.fp8 import TransformerEngineRecompute

    layers = fp8_blocks(config)
    for key, block in model.blocks.items():
        if int(key) in layers and "block" in getattr(block.recompute, "regions", ()):
            give(block, TransformerEngineRecompute())


def give(block: nn.Module, recompute: Recompute) -> None:
    """Assign `recompute` to a block and all modules in it that have recompute regions."""
    for module in block.modules():
        if hasattr(module, "recompute"):
            module.recompute = recompute  # type: ignore[assignment]


def recompute_of_depths(policy: CheckpointingPolicy, replays: Replays) -> Recompute:
    """Return `recompute` of the depths of multi-token prediction; each depth is a region."""
    return BlockRecompute(BLOCK if policy.mtp else NOTHING, replays)
