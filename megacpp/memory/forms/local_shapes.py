"""Sizes of one rank's part of a microbatch, which that estimates and traces depend on."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megacpp.config.checks.fp8 import fp8_letters
from megacpp.config.schema import Config
from megacpp.model.pattern import layer_kinds, warms_up
from megacpp.model.stages import StagePart, stage_parts

BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}


@dataclass(frozen=True)
class LocalShapes:
    """Sizes of one rank.

    Attributes:
        config: resolved.
        rows: of the microbatch.
        row: tokens of a whole row.
        here: tokens of a row on this rank of the context axis.
        stage, context, expert: coordinates on the axes pp, cp and ep.
        parallel: FSDP2 shards the model (else one process computes under autocast).
        compute: bytes of an element in matrix products.
        wide: bytes of an element that is never narrower than fp32.
        most: dropless experts get as many rows as they can, instead of an even share.
        fp8: letters of blocks with products in FP8.
    """

    config: Config
    rows: int
    row: int
    here: int
    stage: int
    context: int
    expert: int
    parallel: bool
    compute: int
    wide: int
    most: bool
    fp8: frozenset[str]

    @staticmethod
    def on_rank(config: Config, size: int, rank: int, most: bool = False) -> LocalShapes:
        """Return the sizes of one rank.

        Args:
            config: resolved for `size` ranks.
            size: number of ranks.
            rank: whose sizes are returned.
            most: dropless experts get as many rows as they can, instead of an even share.
        """
        mesh, dtype = config.mesh, config.precision.dtype
        if dtype == "auto":
            dtype = "fp32" if config.train.device == "cpu" else "bf16"
        stage_size = size // mesh.pp
        return LocalShapes(
            config=config,
            rows=config.train.device_batch_size,
            row=config.data.seq_len,
            here=config.data.seq_len // mesh.cp,
            stage=rank // stage_size,
            context=rank // mesh.tp % mesh.cp,
            expert=rank % mesh.ep,
            parallel=size > 1,
            compute=BYTES[dtype],
            wide=max(4, BYTES[dtype]),
            most=most,
            fp8=fp8_letters(config),
        )

    def halo_bytes(self, channels: int, taps: int, apart: int = 1) -> int:
        """Return bytes of all chunks' ends that a convolution gathers, and of their gradients.

        Args:
            channels: of the convolution on this rank.
            taps: of its kernel.
            apart: tokens between two taps.
        """
        past = max(0, taps - 1) * apart
        return 2 * self.cp * self.chunks * self.rows * past * channels * self.compute

    @property
    def uncompressed(self) -> LocalShapes:
        """Return the sizes without random projections, which the last layer leaves alone."""
        if not self.config.recompute.compress:
            return self
        policy = replace(self.config.recompute, compress=0.0)
        return replace(self, config=replace(self.config, recompute=policy))

    @property
    def tp(self) -> int:
        """Degree of the axis tp."""
        return self.config.mesh.tp

    @property
    def cp(self) -> int:
        """Degree of the axis cp."""
        return self.config.mesh.cp

    @property
    def on_gpu(self) -> bool:
        """Whether the run is on a GPU."""
        return self.config.train.device == "cuda"

    @property
    def compiled(self) -> bool:
        """Whether blocks are compiled, as far as they can be."""
        return self.config.train.compile != "off"

    @property
    def warms_up(self) -> bool:
        """Whether indexers alone are trained, and sparse blocks attend to all keys."""
        return warms_up(self.config.model)

    def by(self, operation: str) -> str:
        """Return the backend of an operation; `auto` that hasn't been resolved is torch."""
        named = getattr(self.config.kernels, operation)
        return "torch" if named == "auto" else named

    @property
    def attends_by(self) -> str:
        """Backend of attention."""
        return self.by("attention")

    @property
    def masked(self) -> bool:
        """Whether all A blocks share a mask of every query and key."""
        return self.attends_by == "torch"

    @property
    def tokens(self) -> int:
        """Tokens of a microbatch that a mixer of this rank works on."""
        return self.rows * self.here

    @property
    def stream(self) -> int:
        """Tokens of the residual stream on this rank; sequence parallelism shards them over tp."""
        return self.tokens // self.tp

    @property
    def stream_bytes(self) -> int:
        """Bytes of all residual streams of this rank, between two layers."""
        return self.stream * self.config.model.stream_width * self.compute

    @property
    def layers(self) -> list[int]:
        """Numbers of this rank's layers."""
        if self.config.mesh.pp == 1:
            return list(range(self.config.model.depth))
        return [layer for part in self.stage_parts for layer in part.layers]

    @property
    def stage_parts(self) -> list[StagePart]:
        """Stages of this rank; none without a pipeline."""
        mesh = self.config.mesh
        return stage_parts(self.config.model, mesh, self.stage) if mesh.pp > 1 else []

    @property
    def kinds(self) -> list[str]:
        """Kinds of this rank's layers (`layer_kinds`)."""
        kinds = layer_kinds(self.config.model)
        return [kinds[layer] for layer in self.layers]

    @property
    def chunks(self) -> int:
        """Chunks of a row that a rank of the context axis holds."""
        return 2 if self.cp > 1 and self.config.mesh.cp_order == "head_tail" else 1
