"""Mamba-3 scan of one rank in Triton: what product.py computes, in a few launches.

    forward    rates of tokens, angles over chunks, states of chunks, states over chunks, outputs
    backward   the first two again, gradients of states, these over chunks, gradients of chunks,
               of angles over chunks, of rates

Beside its inputs, the scan keeps for backward the state in front of each chunk, in the dtype of V:
nothing that is rotated or decayed. While it runs, forward also holds a state of each chunk in fp32,
and so does backward, and gradients of Q and K for each head in the dtype of V. Nothing is added by
atomics: results repeat exactly.

Legend: as megacpp/kernels/mamba3/inputs.py, and J chunks of a row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megacpp.kernels.graph_operator import graph_operator
from megacpp.kernels.mamba3.carried import final_state
from megacpp.kernels.mamba3.chunks import first_state
from megacpp.kernels.mamba3.inputs import HeadWeights, Mamba3State, Pairing, ScanInputs
from megacpp.kernels.mamba3.ops import check_contract
from megacpp.kernels.mamba3.triton_launch import Scan, ScanPlan
from megacpp.kernels.recurrent_gates import gated_ranks
from megacpp.kernels.strides import side_by_side
from megacpp.model.documents import Documents
from megacpp.torch_extras import once_differentiable

LEAST = 16  # tokens of a chunk
MOST = {2: 64, 4: 32}  # whose tiles a program holds, by the bytes of a number of V


def mamba3_triton(
    inputs: ScanInputs,
    weights: HeadWeights,
    docs: Documents,
    pairing: Pairing,
    chunk_size: int,
    initial: Mamba3State | None = None,
    *,
    with_state: bool = False,
) -> tuple[Tensor, Mamba3State | None]:
    """Return `mamba3_chunked` of one rank by Triton kernels; a state only `with_state`.

    Args:
        inputs: of every token.
        weights: of the heads.
        docs: documents.
        pairing: of the rotated dims.
        chunk_size: most tokens of a chunk; the kernels take 16, 32 or 64 (fp32: 16 or 32).
        initial: state in front of each row; None: zeros.
        with_state: return the state after each row, which is one more sum over the tokens.
    """
    check_contract(inputs, weights)
    assert weights.mimo_x is None and inputs.Q.shape[2] == 1, "the kernels have one rank"
    assert inputs.V.dtype != torch.float64, "the kernels compute in fp32"
    fused = weights.norm is None
    with torch.autocast(inputs.V.device.type, enabled=False):
        most = MOST[inputs.V.element_size()]
        chunk = min(most, max(LEAST, 1 << (chunk_size.bit_length() - 1)))
        y_BTHP = _Scan.apply(
            inputs.Q,
            inputs.K,
            inputs.V,
            inputs.Z if fused else None,
            inputs.ADT,
            inputs.DT,
            inputs.Trap,
            inputs.Angles,
            weights.Q_bias,
            weights.K_bias,
            weights.D,
            None if initial is None else first_state(inputs, weights, initial, pairing),
            None if initial is None else initial.angle,
            ScanPlan(chunk, pairing == "half", runs(docs), fused),
        )
        if not fused:
            norm = {"norm_eps": weights.norm_eps, "dtype": inputs.V.dtype}
            y_BTH1P = y_BTHP[:, :, :, None]  # type: ignore[index]
            y_BTHP = gated_ranks(y_BTH1P, inputs.Z, weights.norm, None, None, **norm)  # type: ignore
    if not with_state:
        return y_BTHP, None  # type: ignore[return-value]
    return y_BTHP, final_state(inputs, weights, docs, pairing, initial)  # type: ignore


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        Q: Tensor,
        K: Tensor,
        V: Tensor,
        Z: Tensor | None,
        ADT: Tensor,
        DT: Tensor,
        Trap: Tensor,
        Angles: Tensor,
        Q_bias: Tensor,
        K_bias: Tensor,
        D: Tensor,
        first_BHNP: Tensor | None,
        angle_BHA: Tensor | None,
        plan: ScanPlan,
    ) -> Tensor:
        given = Q, K, V, Z, ADT, DT, Trap, Angles, Q_bias, K_bias, D
        y_BTHP, states_BHJNP = _forward(*given, first_BHNP, angle_BHA, *plan)
        ctx.save_for_backward(*given, first_BHNP, angle_BHA, states_BHJNP)
        ctx.plan = plan
        return y_BTHP

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        *given, first_BHNP, angle_BHA, states_BHJNP = ctx.saved_tensors
        Q, _, _, Z, *_, Q_bias, _, _ = given
        with torch.autocast(grads[0].device.type, enabled=False):
            everything = grads[0], states_BHJNP, *given, first_BHNP, angle_BHA, *ctx.plan
            dqk, dV, dZ, *of_rates, of_heads, dfirst_BHNP, dangle_BHA = _backward(*everything)
        H, (dQ, dK) = len(Q_bias), dqk.unbind()
        *dbiases, dD = of_heads.split([Q_bias.numel(), Q_bias.numel(), H])
        of_weights = *(x.view_as(Q_bias) for x in dbiases), dD
        vectors = dQ.to(Q.dtype), dK.to(Q.dtype), dV, None if Z is None else dZ.to(Z.dtype)
        first = None if first_BHNP is None else dfirst_BHNP
        angle = None if angle_BHA is None else dangle_BHA
        return *vectors, *of_rates, *of_weights, first, angle, None


@graph_operator("mamba3_forward")
def _forward(
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    Z: Tensor | None,
    ADT: Tensor,
    DT: Tensor,
    Trap: Tensor,
    Angles: Tensor,
    Q_bias: Tensor,
    K_bias: Tensor,
    D: Tensor,
    first_BHNP: Tensor | None,
    angle_BHA: Tensor | None,
    chunk: int,
    halves: bool,
    runs_BT: Tensor | None,
    narrow: bool,
) -> list[Tensor]:
    """Return the outputs, and the state in front of each chunk."""
    plan = ScanPlan(chunk, halves, runs_BT, narrow)
    scan = Scan(plan, Q, K, V, Z, ADT, DT, Trap, Angles, Q_bias, K_bias, D)
    rates = scan.rates(angle_BHA)
    states_BHJNP = scan.states(rates, first_BHNP)
    return [scan.outputs(rates, states_BHJNP), states_BHJNP]


@graph_operator("mamba3_backward")
def _backward(
    dy_BTHP: Tensor,
    states_BHJNP: Tensor,
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    Z: Tensor | None,
    ADT: Tensor,
    DT: Tensor,
    Trap: Tensor,
    Angles: Tensor,
    Q_bias: Tensor,
    K_bias: Tensor,
    D: Tensor,
    first_BHNP: Tensor | None,
    angle_BHA: Tensor | None,
    chunk: int,
    halves: bool,
    runs_BT: Tensor | None,
    narrow: bool,
) -> list[Tensor]:
    """Return the gradients; biases and D are one tensor, and what isn't wanted has no numbers."""
    plan = ScanPlan(chunk, halves, runs_BT, narrow)
    scan = Scan(plan, Q, K, V, Z, ADT, DT, Trap, Angles, Q_bias, K_bias, D)
    rates = scan.rates(angle_BHA)
    dy_BTHP = side_by_side(dy_BTHP)
    dstates_BHJNP, dfirst_BHNP = scan.dstates(rates, dy_BTHP, first_BHNP is not None)
    found = scan.gradients(rates, states_BHJNP, dstates_BHJNP, dy_BTHP)
    del dstates_BHJNP, states_BHJNP
    *of_rates, dangle_BHA = scan.drates(found, angle_BHA is not None)
    results = found.dqk, found.dv, found.dz, *of_rates, found.of_heads, dfirst_BHNP, dangle_BHA
    return [V.new_empty(0) if x is None else x for x in results]


def runs(docs: Documents) -> Tensor | None:
    """Return the number of each token's document in its row; None: a row is one document."""

    def make() -> Tensor:
        changes_BT = docs.ids_BT[:, 1:] != docs.ids_BT[:, :-1]
        return torch.nn.functional.pad(changes_BT.cumsum(1), (1, 0)).to(torch.int32)

    return None if docs.whole else docs.memo("runs", make)
