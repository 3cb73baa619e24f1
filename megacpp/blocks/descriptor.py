"""Descriptors of block kinds and features: what other packages read of them; no torch import here.

A kind is one folder below megacpp/blocks: its settings, its module, and a `BlockKind`. A feature
(n-grams, hyper-connections, further tokens) stands beside the mixers and has a `ModelFeature`.
parallel/, optim/, checkpointing/ and megacpp/memory read descriptors and keep no list of their own;
megacpp/blocks/kinds.py and megacpp/blocks/features.py are the only ones. A field without a default
must be given, so a descriptor that misses one is an error that names it; tests/model/test_kinds.py
holds dims, names and layout against the modules.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import Tensor, nn

    from megacpp.config.checks.broken import Broken
    from megacpp.config.schema import CheckpointingPolicy, Config, MeshConfig, ModelConfig
    from megacpp.errors import ConfigError
    from megacpp.memory.forms.local_shapes import LocalShapes
    from megacpp.model.compiled import GraphPart
    from megacpp.model.documents import Documents
    from megacpp.model.regions import Region

Group = Literal["muon", "adamw", "vector"]
Rate = Literal["lr", "embed_lr", "head_lr", "vector_lr"]

# (sizes of a rank, its parts, each with whether it is recomputed whole) -> mesh axis, name and
# bytes of what travels in one microbatch.
Sends = Callable[["LocalShapes", Sequence[tuple[str, bool]]], Iterator[tuple[str, str, int]]]
# (configuration, its mesh, letters of the model's mixers) -> rules that the mesh breaks.
MeshRules = Callable[["Config", "MeshConfig", "set[str]"], Iterator["Broken"]]
LOSS_BUFFERS = 7  # of losses: a scale, and a sum for each term (megacpp/model/auxiliary.py)


def always(model: ModelConfig) -> bool:
    """Return True: the parameter exists in every model."""
    return True


@dataclass(frozen=True)
class Parameter:
    """Parameters with the same dims and layout, moved alike by the optimizer.

    Attributes:
        names: full names below the mixer, or below the feature (`ModelFeature.below`).
        dims: a letter for each dim, in brackets; `_axis` behind it shards that dim: "[Q_tp, D]".
        group: `muon`: matrices between hidden states; `adamw`: projections to few numbers,
            filters; `vector`: norms, biases, numbers per head (AdamW at `optim.vector_lr`).
        decay: weight decay applies; never to the group `vector`.
        fp32: stored and gathered in at least fp32 (the fp32 contract).
        rows: heights of the matrices that are stacked along dim 0, each orthogonalised on its own.
        fp8: the linear layer may multiply in FP8.
        compress: `recompute.compress` keeps a projection of the layer's input.
        within: text that a layer's kind contains if it has them (".index"); empty: every layer.
        when: a model has them.
        rate: field of `OptimConfig` that is their learning rate under AdamW.
        factor: of that rate.
    """

    names: tuple[str, ...]
    dims: str
    group: Group
    decay: bool = True
    fp32: bool = False
    rows: Callable[[ModelConfig], tuple[int, ...]] | None = None
    fp8: bool = False
    compress: bool = False
    within: str = ""
    when: Callable[[ModelConfig], bool] = always
    rate: Rate = "lr"
    factor: Callable[[ModelConfig], float] = lambda model: 1.0

    @property
    def letters(self) -> tuple[tuple[str, str], ...]:
        """Letter and mesh axis (empty: none) of each dim."""
        parts = (part.strip().partition("_") for part in self.dims.strip("[]").split(","))
        return tuple((letter, axis) for letter, _, axis in parts)

    def dim_on(self, axis: str) -> int | None:
        """Dim that `axis` shards; None: whole on each rank of it."""
        return next((i for i, (_, on) in enumerate(self.letters) if on == axis), None)


@dataclass(frozen=True)
class ActivationLayout:
    """Redistribution of activations where they enter and leave a module.

    Attributes:
        module: name below the mixer or the feature; empty: the mixer, or the feature's own module.
        enter, leave: layouts before and after, in the notation of parallel/notation.py; None: the
            activation stays as it is.
    """

    module: str
    enter: str | None
    leave: str | None

    @property
    def ways(self) -> tuple[str | None, str | None]:
        """Both redistributions: into the module, and out of it."""
        return self.enter, self.leave


# A mixer of heads sees all tokens; its output is a partial sum over `tp` (sequence parallelism).
ALL_TOKENS = ActivationLayout("", "x[B, T_tp, D] -> x[B, T, D]", "y[B, T, D]{tp} -> y[B, T_tp, D]")


@dataclass(frozen=True)
class ForeignTensor:
    """Tensor of others' checkpoints that has the rows of some of ours.

    Attributes:
        name: there, below a layer or a mixer; `{e}` in it: one tensor for each expert.
        ours: names below the mixer, their rows stacked from top to bottom.
        order: order of these rows there (megacpp/interop/orders.py); empty: as stacked.
        groups: of the rows there, each with a part of every one of ours (1: as `order` says).
        when: a model has it.
    """

    name: str
    ours: tuple[str, ...]
    order: str = ""
    groups: Callable[[ModelConfig], int] = lambda model: 1
    when: Callable[[ModelConfig], bool] = always


@dataclass(frozen=True)
class ContextExchange:
    """Exchange of a sequence mixer under context parallelism.

    Attributes:
        setting: field of `MeshConfig` that selects the exchange.
        heads: name and number of the heads that `heads` exchanges for tokens.
        otherwise: value of the setting that works for any number of heads.
        traffic: exchanges of one layer in a forward and a backward, with their bytes.
        gathers: (model, kind of layer, whether heads are exchanged) -> name and letter of what all
            ranks have then, as pictures show it.
        taps: taps of its short convolution, which looks `taps - 1` tokens back (0: none).
        once: whether a backward that walks the graph twice would make the exchange twice, so that
            a stage of a pipeline with such a layer makes both gradients in one walk.
    """

    setting: str
    heads: Callable[[ModelConfig], tuple[str, int]]
    otherwise: str
    traffic: Callable[[LocalShapes], Iterator[tuple[str, int]]]
    gathers: Callable[[ModelConfig, str, bool], tuple[str, str]] = lambda m, kind, h: ("q, k", "K")
    taps: Callable[[ModelConfig], int] = lambda model: 0
    once: Callable[[ModelConfig, MeshConfig], bool] = lambda model, mesh: False


def copies_weights(own: LocalShapes, layers: int, outputs: int) -> int:
    """Return 1 if a backward copies weights of one input that lie apart, to multiply once.

    See megacpp/kernels/joint_gradients.py: with fewer tokens than that it adds products.

    Args:
        own: shapes of a rank.
        layers: number of them.
        outputs: of all of them together, before `tp` cuts them.
    """
    return int((layers - 1) * own.tokens > outputs // own.tp)


@dataclass(frozen=True)
class AllocationSettings:
    """Settings that the allocations of a block depend on, by section of the configuration.

    The rest is left at its default where a block is traced (megacpp/memory/block_trace.py), so that
    presets and meshes share traces. Model width, `tp`, `cp`, the dtype, the regions that are
    recomputed and the setting of the context exchange always count.

    Attributes:
        model: section of `ModelConfig`.
        kernel: field of `KernelsConfig`; empty: torch alone.
        mesh, policy: fields of `MeshConfig` and `CheckpointingPolicy`.
        counts: numbers that values of the batch decide, by name: bytes are affine in them and in
            the rows of a microbatch, as long as the layer runs the same operators (`same`).
        same: what decides about operators beside settings.
        document: tokens of the shortest document that weighs; 0: their number doesn't weigh.
        uneven: one rank may get more rows than others.
    """

    model: str
    kernel: str = ""
    mesh: tuple[str, ...] = ()
    policy: tuple[str, ...] = ()
    counts: Callable[[LocalShapes], Mapping[str, int]] = lambda own: {}
    same: Callable[[LocalShapes], tuple[int, ...]] = lambda own: ()
    document: Callable[[Config], int] = lambda config: 0
    uneven: Callable[[ModelConfig], bool] = lambda model: False


@dataclass(frozen=True)
class BlockKind:
    """Kind of block, as data.

    Attributes:
        letter: in pattern strings.
        name: in tables and messages.
        build: (kind of layer, model, layer index) -> the mixer.
        parameters: every parameter of the mixer, in the order of the module.
        dims: sizes of the letters in `parameters`, before anything is sharded.
        checks: broken rules between its settings.
        tensor_dims: sizes that `tp` must divide, by the setting that makes them.
        layouts: activations that are redistributed over `tp`.
        multiply_adds: (model, row length) -> multiply-adds a token in the forward's products.
        allocations: settings that the bytes of its forward and backward depend on.
        policy_checks: broken rules of `recompute`, whether or not the pattern has the kind.
        mesh_rules: broken rules of the mesh, whether or not the model has the kind.
        regions: (policy, model) -> recompute regions that the policy selects, `norm` apart.
        compared: how strictly a recomputed region is compared with its first run.
        whole: field of `CheckpointingPolicy` that recomputes the whole block if it is `full`;
            empty: no field does.
        last_product: multiply-adds a token of the output projection that a recomputed block skips.
        context: exchange over `cp`; None: tokens don't meet.
        shared_bytes: (sizes of a rank, kinds of its parts, whether a backward must read them) ->
            bytes of tensors that its layers share in one microbatch, as masks.
        sends: what a rank sends of its layers beside the layouts and the exchange over `cp`.
        replayed: (configuration, kind of layer, its recomputed regions) -> multiply-adds a token
            that its backward repeats beside those of the regions.
        region_multiply_adds: (region, model, row length) -> those of a recomputed region.
        recurrent: a state runs along the row, in a scan that is no module.
        groups: groups of heads that `tp` must divide or be a multiple of, by setting.
        buffer_numbers: (model, kind of layer) -> numbers and 64-bit integers that its buffers hold.
        why_eager: (mixer) -> the reason why a block can't be one compiled graph; None: it can.
        graph_inputs: (mixer, documents, input of the block) -> the documents with the cached values
            that such a graph reads; None: it reads none.
        graph_part: (mixer) -> the part of it that can be a graph where the block can't; None: none.
        upstream: fused tensors of the authors' checkpoints.
        before: kind of layer -> the layers that one needs in front of it.
        lines: what the header of a run says of its options.
        hf: tensors of Hugging Face's folders; a class may have others (megacpp/interop/classes.py).
    """

    letter: str
    name: str
    build: Callable[[str, ModelConfig, int], nn.Module]
    parameters: tuple[Parameter, ...]
    dims: Callable[[ModelConfig], Mapping[str, int]]
    checks: Callable[[Config], Iterator[ConfigError]]
    tensor_dims: Callable[[ModelConfig], Mapping[str, int]]
    layouts: tuple[ActivationLayout, ...]
    multiply_adds: Callable[[ModelConfig, int], float]
    allocations: AllocationSettings
    regions: Callable[[CheckpointingPolicy, ModelConfig], set[Region]]
    compared: Literal["default", "none"] = "default"
    whole: str = ""
    policy_checks: Callable[[Config], Iterator[ConfigError]] = lambda config: iter(())
    mesh_rules: MeshRules = lambda config, mesh, letters: iter(())
    last_product: Callable[[ModelConfig], float] = lambda model: 0.0
    shared_bytes: Callable[[LocalShapes, Collection[str], bool], int] = lambda own, kinds, s: 0
    sends: Sends = lambda own, parts: iter(())
    replayed: Callable[[Config, str, frozenset[Region]], float] = lambda config, kind, regions: 0.0
    region_multiply_adds: Callable[[Region, ModelConfig, int], float] = lambda region, m, t: 0.0
    recurrent: bool = False
    context: ContextExchange | None = None
    groups: Callable[[ModelConfig], Mapping[str, int]] = lambda model: {}
    buffer_numbers: Callable[[ModelConfig, str], tuple[int, int]] = lambda model, kind: (0, 0)
    why_eager: Callable[[Any], str | None] = lambda mixer: "no compiler sees into it"
    graph_inputs: Callable[[Any, Documents, Tensor], Documents | None] = lambda m, docs, x: None
    graph_part: Callable[[Any], GraphPart | None] = lambda mixer: None
    upstream: tuple[ForeignTensor, ...] = ()
    before: Callable[[str], tuple[str, ...]] = lambda kind: ()
    lines: Callable[[Config], Iterator[str]] = lambda config: iter(())
    hf: tuple[ForeignTensor, ...] = ()

    def shapes(
        self, model: ModelConfig, kind: str = ""
    ) -> Iterator[tuple[str, tuple[int, ...], Parameter]]:
        """Name, whole shape and row of every parameter that a layer has.

        Args:
            kind: of the layer (`layer_kinds`); empty: a plain layer.

        Raises:
            ValueError: `dims` lacks a letter of a row.
        """
        return shapes_of(self.parameters, self.dims, model, kind)

    def rows(self, model: ModelConfig) -> dict[str, int]:
        """Size of dim 0 of every parameter of a plain layer, by name."""
        return {name: shape[0] for name, shape, _ in self.shapes(model)}

    def numel(self, model: ModelConfig, kind: str = "") -> int:
        """Parameters of a layer's mixer, counted."""
        return sum(math.prod(shape) for _, shape, _ in self.shapes(model, kind))


@dataclass(frozen=True)
class AheadBlocks:
    """Blocks of a feature behind the last layer, for tokens further ahead; in training alone.

    They look tokens up in the embedding once more, and the head follows each pass.

    Attributes:
        name, model: feature, and settings that they are built with.
        letters: mixers of one, in order.
        alike: those of the letters with the settings of the model's layers.
        number: of blocks with weights of their own.
        passes: of a token through one of them: tokens further ahead.
        multiply_adds: a token in the forward of a pass, beside the mixers and the head.
        trains_embedding: their gradient goes on into the embedding.
    """

    name: str
    model: ModelConfig
    letters: str
    alike: str
    number: int
    passes: int
    multiply_adds: float
    trains_embedding: bool


@dataclass(frozen=True)
class ModelFeature:
    """Part of a model beside the mixers of its blocks, as data.

    Attributes:
        name: section of `ModelConfig` with its settings.
        title: in messages.
        present: a model has it.
        below: beginning of its parameters' names in a model; `*` stands for any layer.
        parameters: every parameter, in the order of the module.
        around: names of its modules around the layers (megacpp/model/pattern.py).
        dims: sizes of the letters in `parameters`, before anything is sharded.
        layouts: activations that are redistributed over `tp`.
        checks: broken rules of its settings.
        tensor_dims: sizes that `tp` must divide, by the setting that makes them.
        multiply_adds: (model, kind of layer; empty: beside the layers) -> multiply-adds a token in
            the forward, where neither hyper-connections nor depths count them.
        taps: tokens that its convolution sees, the own one with them (0: it has none).
        buffer_numbers: (model, name of its part) -> numbers and 64-bit integers that buffers hold.
        shared_bytes: (sizes of a rank, kinds of its parts) -> bytes of tensors that its layers
            share in one microbatch.
        sends: what a rank sends of it.
        lines: what the header of a run says of it.
        ahead: its blocks behind the last layer, of a model that has it; None: it has none.
        hashes: rows of its tables depend on the number of ids.
        exported: setting, reason and fix, where no class of Hugging Face has it; empty: it trains
            only, and an exported folder leaves it out.
    """

    name: str
    title: str
    present: Callable[[ModelConfig], bool]
    below: str
    parameters: tuple[Parameter, ...]
    dims: Callable[[ModelConfig], Mapping[str, int]]
    lines: Callable[[Config], Iterator[str]]
    exported: tuple[str, str, str] | tuple[()]
    around: tuple[str, ...] = ()
    layouts: tuple[ActivationLayout, ...] = ()
    checks: Callable[[Config], Iterator[ConfigError]] = lambda config: iter(())
    tensor_dims: Callable[[ModelConfig], Mapping[str, int]] = lambda model: {}
    multiply_adds: Callable[[ModelConfig, str], float] = lambda model, kind: 0.0
    taps: Callable[[ModelConfig], int] = lambda model: 0
    buffer_numbers: Callable[[ModelConfig, str], tuple[int, int]] = lambda model, part: (0, 0)
    shared_bytes: Callable[[LocalShapes, Collection[str]], int] = lambda own, kinds: 0
    sends: Sends = lambda own, parts: iter(())
    ahead: Callable[[ModelConfig], AheadBlocks | None] = lambda model: None
    hashes: bool = False

    def shapes(
        self, model: ModelConfig, kind: str = ""
    ) -> Iterator[tuple[str, tuple[int, ...], Parameter]]:
        """Name below the feature, whole shape and row of each parameter; nothing if it is absent.

        Args:
            model: settings.
            kind: of the layer (`layer_kinds`); empty: the feature stands outside of layers.

        Raises:
            ValueError: `dims` lacks a letter of a row.
        """
        if self.present(model):
            yield from shapes_of(self.parameters, self.dims, model, kind)

    @property
    def package(self) -> str:
        """Package of the feature: that of its descriptor."""
        return self.lines.__module__.rpartition(".")[0]

    def numel(self, model: ModelConfig, kind: str = "") -> int:
        """Parameters of the feature, of one layer where it stands in layers."""
        return sum(math.prod(shape) for _, shape, _ in self.shapes(model, kind))


def shapes_of(
    parameters: tuple[Parameter, ...],
    dims: Callable[[ModelConfig], Mapping[str, int]],
    model: ModelConfig,
    kind: str,
) -> Iterator[tuple[str, tuple[int, ...], Parameter]]:
    """Name, whole shape and row of every parameter that a layer has.

    Args:
        parameters: rows.
        dims: sizes of their letters, beside the model's `D` and the one of `O`.
        model: settings.
        kind: of the layer.

    Raises:
        ValueError: `dims` lacks a letter of a row.
    """
    rows = [row for row in parameters if row.within in kind and row.when(model)]
    sizes = {"D": model.dim, "O": 1, **(dims(model) if rows else {})}
    for row in rows:
        missing = [letter for letter, _ in row.letters if letter not in sizes]
        if missing:
            raise ValueError(f"{', '.join(row.names)}: dims lack {missing[0]} of {row.dims}")
        shape = tuple(sizes[letter] for letter, _ in row.letters)
        for name in row.names:
            yield name, shape, row
