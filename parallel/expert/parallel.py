"""Expert parallelism: each rank of `ep` holds some experts, and every token goes where its are.

An E mixer routes the tokens of its own rank. `ExpertParallel` replaces its `dispatch` and
`combine`; between them the mixer's own `experts` work on the rows of all ranks that want them, so
that recomputing `experts` alone sends nothing again. It does not touch parameters: whoever cuts
them gives each rank the experts [r * E / ep, (r + 1) * E / ep) in order.

Legend: T tokens, K experts of a token, D model, S slots (rows in expert order).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from megacpp.blocks.experts.module import Arrived, MixtureOfExperts, expert_capacity
from megacpp.kernels.experts.grouped_mm import row_multiple
from parallel.expert.exchange import (
    EvenRouting,
    Owners,
    Trip,
    send_copies,
    send_slots,
    send_tokens,
)

Kind = Literal["per_rank", "per_expert"]


class ExpertParallel(ParallelStyle):
    """An E mixer whose experts lie on the ranks of a mesh axis.

    Args:
        kind: what travels when nothing is dropped: one row per rank that holds a chosen expert
            (`per_rank`, weighed and summed there), or one row per chosen expert (`per_expert`).
            With a capacity factor it is fixed slots per expert, of either kind.
        balanced: choose experts evenly instead of as the router says (`EvenRouting`): sizes are
            known without values. The outputs are those of a model with another router.
    """

    def __init__(self, kind: Kind = "per_rank", balanced: bool = False) -> None:
        self.kind, self.balanced = kind, balanced

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, MixtureOfExperts)
        moe = module.moe
        all_owners = Owners(moe.num_experts, device_mesh.get_group())
        assert all_owners.each * all_owners.ranks == moe.num_experts
        even = EvenRouting.of(moe) if self.balanced else None

        def dispatch(
            x_TD: Tensor, indices_TK: Tensor, weights_TK: Tensor, decoding: bool = False
        ) -> tuple[Arrived, Trip]:
            owners = replace(all_owners, backend=module.kernels.experts)  # told after it was cut
            if even is not None:
                indices_TK = even.indices(len(x_TD), x_TD.device)
            if moe.capacity_factor is not None and not decoding:
                slots = expert_capacity(len(x_TD), moe)
                return send_slots(x_TD, indices_TK, owners, slots)
            multiple = 1 if decoding else row_multiple(x_TD.device)
            if self.kind == "per_expert":
                return send_copies(x_TD, indices_TK, owners, multiple, even)
            return send_tokens(x_TD, indices_TK, weights_TK, owners, multiple, even)

        def combine(rows_SD: Tensor, weights_TK: Tensor, trip: Trip) -> Tensor:
            return trip.back(rows_SD, weights_TK)

        module.dispatch = dispatch  # type: ignore[method-assign]
        module.combine = combine  # type: ignore[method-assign]
        return module
