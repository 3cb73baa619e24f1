"""Messages between pipeline stages, and how long their tensors live.

A schedule of torch keeps the requests of all sends until its step has ended, and each keeps its
tensor alive (pytorch#194120). So a stage sends by itself, and lets a tensor go when an answer shows
that it has arrived; to wait for the send then costs nothing, and can't deadlock:

    what a forward sends    answered by the gradient of its microbatch
    a gradient              answered by a later input, which the stage before has computed after
                            the backward that used the gradient (`answered`)

Where all forwards come first no input follows a gradient, and a rank waits for each gradient before
it sends the next, as 1F1B does in torch. That one sends and receives in one batch, by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, schedules

from parallel.stages import Stage

NO_GRADIENTS: Mapping[int, Sequence[int]] = {}


class SendingStage(PipelineStage):
    """Torch's stage around one of ours, with tensors beside hidden states (handoff.py).

    Before the first step it greets neighbours, but not itself (torch 2.11; later ones vote): both
    stages at the bottom of a V are of one rank, and gloo can't send to itself, so the greeting of
    pytorch#160210 would never end. NCCL can.

    Args:
        stage: ours.
        number: in the schedule.
        buffer: returns memory for a choice that arrives.
        greets: neighbours exist.
        batched: the schedule sends what the stage returns, in one batch with receives.

    Attributes:
        answered: microbatches whose gradients have arrived when the input of one does.
    """

    submod: Stage

    def __init__(
        self,
        stage: Stage,
        number: int,
        *args: Any,
        buffer: Callable[[], Tensor],
        greets: bool,
        batched: bool,
        **kwargs: Any,
    ) -> None:
        super().__init__(stage, number, *args, **kwargs)
        self.buffer, self.greets, self.batched = buffer, greets, batched
        self.answered = NO_GRADIENTS
        self._sent: dict[tuple[str, int], tuple[list[dist.P2POp], list[dist.Work]]] = {}

    @property
    def is_first(self) -> bool:
        """Whether it begins with ids: both ways two stages do."""
        return self.submod.part.first

    @property
    def is_last(self) -> bool:
        """Whether it ends with the loss."""
        return self.submod.part.last

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the receives of a forward, with tensors beside the hidden states."""
        ops = super().get_fwd_recv_ops(fwd_chunk_id)
        return ops + _beside(ops, self.submod.arriving(self.buffer))

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Send the result of a forward; return what the schedule is to send."""
        ops = super().get_fwd_send_ops(fwd_chunk_id)
        return self._send("F", fwd_chunk_id, ops + _beside(ops, self.submod.leaving()))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Send the gradient of an input; return what the schedule is to send."""
        if not self.answered:
            self.settle("B")
        return self._send("B", bwd_chunk_id, super().get_bwd_send_ops(bwd_chunk_id))

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Run a forward, whose input shows that gradients have arrived."""
        for microbatch in self.answered.get(fwd_chunk_id, ()):
            self._settle("B", microbatch)
        return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        """Run a backward, whose gradient shows that the result of the forward has arrived."""
        self._settle("F", bwd_chunk_id)
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        for received in () if self.is_first else self.args_recv_info[bwd_chunk_id]:
            if received.buffer is not None:  # a walk for inputs alone leaves the gradient here, too
                received.buffer.grad = None

    def clear_runtime_states(self) -> None:
        """Forget the step before."""
        super().clear_runtime_states()
        self._sent.clear()  # of a step that failed

    def settle(self, kinds: str = "FB") -> None:
        """Wait for what forwards (`F`) and backwards (`B`) have sent, and let its tensors go."""
        for kind, microbatch in [*self._sent]:
            if kind in kinds:
                self._settle(kind, microbatch)

    def _settle(self, kind: str, microbatch: int) -> None:
        _, requests = self._sent.pop((kind, microbatch), ((), ()))
        for request in requests:
            request.wait()

    def _send(self, kind: str, microbatch: int, ops: list[dist.P2POp]) -> list[dist.P2POp]:
        """Send, unless the schedule does; return what is left to be sent."""
        if self.batched:
            return ops
        self._sent[kind, microbatch] = ops, schedules._batch_p2p(ops)
        return []

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        if not self.greets:
            return []
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.peer != dist.get_rank()]


def _beside(ops: list[dist.P2POp], tensors: list[Tensor]) -> list[dist.P2POp]:
    """Return sends or receives of further tensors, to or from the rank of the hidden states."""
    return [dist.P2POp(ops[0].op, t, ops[0].peer, ops[0].group) for t in tensors]
