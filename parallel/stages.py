"""Part of a model that one pipeline stage runs, as a module of its own.

A rank keeps the blocks of its stages in its HybridLM, under the names that they have in the whole
model, so that initialising, optimising and saving know nothing of stages. A Stage refers to the
same submodules in the order in which it runs them; FSDP2 shards a Stage, not the HybridLM.

Legend: B rows, t tokens of this rank, D model.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from megacpp.blocks.engram.module import look_ahead
from megacpp.blocks.features import ahead_blocks
from megacpp.config.schema import ModelConfig
from megacpp.data.batches import Batch
from megacpp.model.documents import Documents
from megacpp.model.hybrid import HybridLM, begin, collapsed, finish
from megacpp.model.pattern import ENTRANCE, EXIT
from megacpp.model.stages import StagePart
from parallel.handoff import ChoiceHandoff
from parallel.step_sums import microbatch_sums


class Stage(nn.Module):
    """Modules of one stage: `embed` if it is first, `blocks`, `norm` and `head` if it is last.

    A last stage that predicts further tokens has `embed` too, to look up those before them. On a
    rank that has the first and the last stage there is one `embed`: it belongs to the first, whose
    FSDP2 root gathers it, and the last one borrows it (`lender`).

    Attributes:
        part: which layers it has, and whether it is the first or the last stage.
        remembers: layers of the model have an n-gram memory.
        coming: this rank's tokens of the microbatches to come, in the order of the schedule: every
            schedule of torch brings those of one stage forward in the order of the batch.
        given: documents of the microbatches of this step.
        hands_on: shape and dtype of the hidden states for the next stage, once they are known.
        choices: packs and unpacks a choice of keys from or for another stage.
        taken, handed: choices of microbatches that wait for their forward, or to be sent.
        lender: the first stage, of whose weights a last stage on its rank uses some.
        sums: of a last stage, `microbatch_sums` of each forward; the caller clears it.
    """

    def __init__(self, model: HybridLM, part: StagePart) -> None:
        super().__init__()
        self.part, self.remembers = part, bool(model.config.engram.layers)
        modules = dict(model.named_children())
        tied = ("head",) if model.config.tie_embeddings else ()
        borrowed = ("embed", *tied) if model.begins and not part.first else ()
        for name in (*ENTRANCE, *EXIT):
            looked_up = name == "embed" and part.last and "mtp" in modules
            if name in modules and (part.first if name in ENTRANCE else part.last) | looked_up:
                if name in borrowed:
                    vars(self)[name] = modules[name]  # not a submodule: a unit has one root
                else:
                    self.add_module(name, modules[name])
        self.blocks = nn.ModuleDict({str(i): model.blocks[str(i)] for i in part.layers})
        self.coming: deque[Batch] = deque()
        self.given: list[weakref.ref[Documents]] = []
        self.hands_on: tuple[torch.Size, torch.dtype] | None = None
        self.choices: ChoiceHandoff | None = None
        self.lender: Stage | None = None
        self.taken: deque[Tensor] = deque()
        self.handed: deque[Tensor] = deque()
        self.sums: list[Tensor] = []

    def expect(self, batches: Sequence[Batch]) -> None:
        """Queue microbatches, of which `forward` takes one after another."""
        self.taken.clear()
        self.handed.clear()
        # With documents of its own: their memos are freed with the stage's own graph, or, where tp
        # makes parts of rows that point back at them, by `forget`.
        self.coming = deque(
            replace(batch, docs=batch.docs.to(batch.ids_BT.device)) for batch in batches
        )
        self.given = [weakref.ref(batch.docs) for batch in self.coming]

    def forget(self) -> None:
        """Drop the memos of all microbatches; call it once none of them goes on."""
        for docs in filter(None, (given() for given in self.given)):
            docs.forget()

    def forward(self, x: Tensor) -> Tensor:
        """Return the next microbatch's hidden states `[B, t, D]`, or its loss sum if last.

        Args:
            x: ids `[B, t]` (first stage) or the hidden states of the stage before.
        """
        batch = self.coming.popleft()
        docs = batch.docs
        if self.remembers:
            look_ahead(self.blocks.values(), docs)
        choice = self._take(docs)
        if self.part.first:
            x = begin(self, x, docs)
        for block in self.blocks.values():
            x = block(x, docs)
        if not self.part.last:
            assert self.hands_on in (None, (x.shape, x.dtype)), (self.hands_on, x.shape, x.dtype)
            self._hand(choice, docs)
            return x
        x = collapsed(self, x)  # nothing else holds the streams, which are freed
        out = finish(self, x, batch.labels_BT, docs)
        self.sums.append(microbatch_sums(out, batch))
        if self.lender is not None and out.loss_sum.requires_grad:
            out.loss_sum.register_hook(self._end_with_lender)
        return out.loss_sum

    def arriving(self, buffer: Callable[[], Tensor]) -> list[Tensor]:
        """Return memory for tensors that come beside the next microbatch's hidden states."""
        if self.part.takes is None:
            return []
        self.taken.append(buffer())
        return [self.taken[-1]]

    def leaving(self) -> list[Tensor]:
        """Return tensors for the next stage beside the hidden states of the oldest microbatch."""
        return [] if self.part.hands is None else [self.handed.popleft()]

    def _end_with_lender(self, _: Tensor) -> None:
        """Have the lender's FSDP2 units add up their gradients at the end of this backward, too.

        Each root does so behind its own backwards only; until then gradients would pile up in the
        narrow dtype of the computation.
        """
        if isinstance(self.lender, FSDPModule):
            self.lender._get_fsdp_state()._register_root_post_backward_final_callback()

    def _take(self, docs: Documents) -> Tensor | None:
        """Unpack the choice that came with a microbatch into `docs`; return it if it goes on."""
        if self.part.takes is None:
            return None
        choice = self.taken.popleft()
        if self.part.reads:
            assert self.choices is not None
            self.choices.unpack(choice, docs, self.part.takes)
        return choice if self.part.hands == self.part.takes else None

    def _hand(self, passed_on: Tensor | None, docs: Documents) -> None:
        """Queue the choice for the next stage: as it came, or that of a layer of this stage."""
        if self.part.hands is None:
            return
        assert self.choices is not None
        made = passed_on is None
        self.handed.append(self.choices.packed(docs, self.part.hands) if made else passed_on)


def keep_parts(model: HybridLM, parts: Sequence[StagePart]) -> None:
    """Prune a model, best on the meta device, to the modules of a rank's stages, in place."""
    layers = {layer for part in parts for layer in part.layers}
    _keep(model, layers, any(p.first for p in parts), any(p.last for p in parts))


def make_stages(model: HybridLM, parts: Sequence[StagePart]) -> list[Stage]:
    """Return the stages of a rank, from a model that holds their modules.

    Call it after blocks are replaced (tensor parallelism, recomputation) and before FSDP2
    shards each stage; afterwards call `model.tie()`, which gives a tied weight its name again.
    """
    stages = [Stage(model, part) for part in parts]
    both = model.begins and hasattr(model, "head")
    if stages and both and has_embedding_copy(model.config):
        (first,), (last,) = [s for s in stages if s.part.first], [s for s in stages if s.part.last]
        vars(last)["lender"] = first  # not a submodule
        if model.config.tie_embeddings:  # the head sees whatever FSDP2 puts in the embedding
            vars(model.head)["_parameters"] = model.embed._parameters
    return stages


def second_copies(model: HybridLM) -> list[nn.Parameter]:
    """Return parameters of which this rank holds the second copy; a norm must not count them.

    Those of a tied weight, or all of a rank whose stages go both ways and that is not the first of
    the two that have them.
    """
    stages: list[Stage] = vars(model).get("stages", [])
    if any(stage.part.back for stage in stages):
        there, back = (stage.part.index for stage in stages)
        return [*model.parameters()] if there > back else []
    copy = has_embedding_copy(model.config) and not model.begins and hasattr(model, "head")
    weight = model.embed._parameters["weight"] if copy else None
    return [] if weight is None else [weight]


def _keep(model: HybridLM, layers: Collection[int], first: bool, last: bool) -> None:
    """Drop the modules that a part of the model doesn't run; names of the rest stay.

    A tied weight is called `embed.weight` wherever it is, so a last part keeps that module too;
    and multi-token prediction looks tokens up there.

    Args:
        model: whole; changed in place.
        layers: blocks to keep.
        first: keep the embedding.
        last: keep the last norm and the head.
    """
    model.begins = first
    for key in list(model.blocks):
        if int(key) not in layers:
            del model.blocks[key]
    named = last and has_embedding_copy(model.config)
    for name in ENTRANCE if not first else ():
        if hasattr(model, name) and not (name == "embed" and named):
            delattr(model, name)
    for name in EXIT if not last else ():
        if hasattr(model, name):
            delattr(model, name)


def has_embedding_copy(config: ModelConfig) -> bool:
    """Whether the last pipeline stage has `embed` too: a second copy of the first stage's.

    For its head, or for blocks behind the last layer, which are fed tokens further ahead.
    """
    return config.tie_embeddings or bool(ahead_blocks(config))
