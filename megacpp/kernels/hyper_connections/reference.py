"""Both ends of a hyper-connection: the input of a layer from its streams, and the streams behind.

    read    x -> u = sum_i pre_i x_i, and post, res
    mix     x, y -> x'_o = sum_i res[o, i] x_i + post_o y

with coefficients of every token, in fp32 or wider, from all of its streams (arXiv 2512.24880, eq. 7
and 8): r = 1 / rms(vec x), m = r phi vec x, z = scale m + bias and

    pre = sigmoid(z_pre)      post = 2 sigmoid(z_post)      res = sinkhorn(z_res)

DeepSeek-V4 adds 1e-6 to pre and applies its matrix transposed; Megatron adds 1e-6 to the rms
instead of a small number to its square. Either end saves only its arguments, `read` also m and r.
fp32 tensors as wide as the streams exist for `CHUNK` numbers at a time.

Legend: S tokens in any leading dims, n streams, D model, C = n D, K = n^2 + 2 n coefficients: pre,
post, rows of res.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megacpp.kernels.hyper_connections.sinkhorn import (
    EPS,
    TINY,
    Ordering,
    sinkhorn_gradient,
    sinkhorn_reference,
)
from megacpp.torch_extras import needs_input_grad_now, once_differentiable, wide

CHUNK = 1 << 24  # numbers of all streams that are in fp32 at once


@dataclass(frozen=True)
class Coefficients:
    """Settings by which the coefficients of a token are computed.

    Attributes:
        streams: n.
        ordering: source of the formulas.
        iterations: of Sinkhorn.
        eps: of the norm of the streams.
    """

    streams: int
    ordering: Ordering
    iterations: int
    eps: float

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Numbers of pre, post and res."""
        return self.streams, self.streams, self.streams**2

    def scales(self, scale_3: Tensor) -> Tensor:
        """Return the scale of each coefficient, `[K]`.

        Args:
            scale_3: `[3]`, of pre, post and res.
        """
        sizes = zip(scale_3.unbind(), self.sizes, strict=True)
        return torch.cat([scale.expand(size) for scale, size in sizes])

    def inverse_rms(self, square_S: Tensor) -> Tensor:
        """Return r, from the mean square of a token's streams."""
        if self.ordering == "megatron":
            return 1.0 / (square_S.sqrt() + EPS)
        return torch.rsqrt(square_S + self.eps)

    def logits(self, m_SK: Tensor, scale_3: Tensor, bias_K: Tensor) -> tuple[Tensor, ...]:
        """Return z of pre `[S, n]`, of post `[S, n]` and of res `[S, n, n]`.

        Args:
            m_SK: projections of the streams.
            scale_3: `[3]`, of pre, post and res.
            bias_K: of each coefficient.
        """
        pre, post, res = (m_SK * self.scales(scale_3) + bias_K).split(self.sizes, -1)
        return pre, post, res.unflatten(-1, (self.streams, self.streams))

    def pre(self, z_Sn: Tensor) -> Tensor:
        """Return pre from its logits `[S, n]`."""
        p_Sn = torch.sigmoid(z_Sn)
        return p_Sn + EPS if self.ordering == "deepseek_v4" else p_Sn

    def turned(self, res_Snn: Tensor) -> Tensor:
        """Return Sinkhorn's matrices as they are applied; its own inverse."""
        return res_Snn.mT if self.ordering == "deepseek_v4" else res_Snn


def read(
    x_SnD: Tensor, phi_KC: Tensor, scale_3: Tensor, bias_K: Tensor, how: Coefficients
) -> tuple[Tensor, Tensor, Tensor]:
    """Return u `[S, D]` in the dtype of `x`, post `[S, n]` and res `[S, n, n]` in fp32 or wider.

    Args:
        x_SnD: streams, `[..., n, D]`.
        phi_KC: projection of the streams.
        scale_3: `[3]`, of pre, post and res.
        bias_K: of each coefficient.
        how: settings.
    """
    if torch.compiler.is_compiling():
        return read_reference(x_SnD, phi_KC, scale_3, bias_K, how)
    return _Read.apply(x_SnD, phi_KC, scale_3, bias_K, how)  # type: ignore[return-value]


def mix(x_SnD: Tensor, y_SD: Tensor, post_Sn: Tensor, res_Snn: Tensor) -> Tensor:
    """Return x' `[S, n, D]` in the dtype of `x`, whatever that of `y`.

    Args:
        x_SnD: streams before the layer.
        y_SD: output of the layer.
        post_Sn: coefficients of y.
        res_Snn: coefficients of x.
    """
    if torch.compiler.is_compiling():
        return mix_reference(x_SnD, y_SD, post_Sn, res_Snn)
    return _Mix.apply(x_SnD, y_SD, post_Sn, res_Snn)  # type: ignore[return-value]


def read_reference(
    x_SnD: Tensor, phi_KC: Tensor, scale_3: Tensor, bias_K: Tensor, how: Coefficients
) -> tuple[Tensor, Tensor, Tensor]:
    """Return `read` by torch's operators: the definition.

    Args:
        x_SnD: streams, `[..., n, D]`.
        phi_KC: projection of the streams.
        scale_3: `[3]`, of pre, post and res.
        bias_K: of each coefficient.
        how: settings.
    """
    with torch.autocast(x_SnD.device.type, enabled=False):
        part_SnD = wide(x_SnD)
        m_SK, _ = projected(part_SnD, phi_KC, how)
        pre_Sn, post_Sn, res_Snn = how.logits(m_SK, scale_3, bias_K)
        u_SD = torch.matmul(how.pre(pre_Sn)[..., None, :], part_SnD)[..., 0, :]
        matrices_Snn = sinkhorn_reference(res_Snn, how.ordering, how.iterations)
        return u_SD.to(x_SnD.dtype), 2.0 * torch.sigmoid(post_Sn), how.turned(matrices_Snn)


def mix_reference(x_SnD: Tensor, y_SD: Tensor, post_Sn: Tensor, res_Snn: Tensor) -> Tensor:
    """Return `mix` by torch's operators: the definition.

    Args:
        x_SnD: streams before the layer.
        y_SD: output of the layer.
        post_Sn: coefficients of y.
        res_Snn: coefficients of x.
    """
    with torch.autocast(x_SnD.device.type, enabled=False):
        kept_SnD = torch.matmul(res_Snn, wide(x_SnD))
        return (kept_SnD + post_Sn[..., None] * wide(y_SD)[..., None, :]).to(x_SnD.dtype)


def projected(x_SnD: Tensor, phi_KC: Tensor, how: Coefficients) -> tuple[Tensor, Tensor]:
    """Return m `[S, K]` and r `[S]`."""
    x_SC = x_SnD.flatten(-2)
    r_S = how.inverse_rms(torch.linalg.vector_norm(x_SC, dim=-1).square() / x_SC.shape[-1])
    return torch.matmul(x_SC, phi_KC.mT) * r_S[..., None], r_S


def token_parts(x_SnD: Tensor) -> list[slice]:
    """Return the tokens whose streams are `CHUNK` numbers together."""
    tokens, most = len(x_SnD), max(1, CHUNK // (x_SnD.shape[1] * x_SnD.shape[2]))
    return [slice(first, first + most) for first in range(0, tokens, most)]


class _Read(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_SnD: Tensor, phi_KC: Tensor, scale_3: Tensor, bias_K: Tensor, how: Coefficients
    ) -> tuple[Tensor, Tensor, Tensor]:
        # Results are allocated in their own shape: a view must not leave a block (FSDP2).
        x_xnD, x_SnD, (*lead, n, D) = x_SnD, _rows(x_SnD, 2), x_SnD.shape
        S = len(x_SnD)
        u = x_SnD.new_empty(*lead, D)
        post, res = phi_KC.new_empty(*lead, n), phi_KC.new_empty(*lead, n, n)
        m_SK, r_S = phi_KC.new_empty(S, len(phi_KC)), phi_KC.new_empty(S)
        u_SD, post_Sn, res_Snn = _rows(u, 1), _rows(post, 1), _rows(res, 2)
        with torch.autocast(x_SnD.device.type, enabled=False):
            for part in token_parts(x_SnD):
                x = wide(x_SnD[part])
                m_SK[part], r_S[part] = projected(x, phi_KC, how)
                z_pre, z_post, z_res = how.logits(m_SK[part], scale_3, bias_K)
                u_SD[part] = torch.matmul(how.pre(z_pre)[:, None], x)[:, 0]
                post_Sn[part] = 2.0 * torch.sigmoid(z_post)
                res_Snn[part] = how.turned(sinkhorn_reference(z_res, how.ordering, how.iterations))
                del x
        ctx.save_for_backward(x_xnD, phi_KC, scale_3, bias_K, m_SK, r_S)
        ctx.how = how
        return u, post, res

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, du_SD: Tensor, dpost_Sn: Tensor, dres_Snn: Tensor
    ) -> tuple[Tensor | None, ...]:
        x, phi_KC, scale_3, bias_K, m_SK, r_S = ctx.saved_tensors
        how, wanted = ctx.how, needs_input_grad_now(ctx)
        dx = x.new_empty(x.shape) if wanted[0] else None
        x_SnD, dx_SnD = _rows(x, 2), None if dx is None else _rows(dx, 2)
        du_SD, dpost_Sn, dres_Snn = _rows(du_SD, 1), _rows(dpost_Sn, 1), _rows(dres_Snn, 2)
        dphi_KC = torch.zeros_like(phi_KC) if wanted[1] else None
        dz_K, dzm_K = torch.zeros_like(bias_K), torch.zeros_like(bias_K)
        with torch.autocast(x_SnD.device.type, enabled=False):
            for part in token_parts(x_SnD):
                x_PnD, du, m_PK = wide(x_SnD[part]), wide(du_SD[part]), m_SK[part]
                pre, post, res = how.logits(m_PK, scale_3, bias_K)
                s_pre, s_post = torch.sigmoid(pre), torch.sigmoid(post)
                dpre = torch.matmul(x_PnD, du[:, :, None])[:, :, 0]
                dres = how.turned(dres_Snn[part])
                dres = sinkhorn_gradient(res, dres, how.ordering, how.iterations)
                dz_PK = torch.cat(
                    [
                        dpre * s_pre * (1.0 - s_pre),
                        2.0 * dpost_Sn[part] * s_post * (1.0 - s_post),
                        dres.flatten(1),
                    ],
                    -1,
                )
                dz_K += dz_PK.sum(0)
                dzm_K += (dz_PK * m_PK).sum(0)
                dm_PK, r_P = dz_PK * how.scales(scale_3), r_S[part]
                through_rms_P = _through_rms(r_P, how) * (dm_PK * m_PK).sum(-1) / phi_KC.shape[1]
                dm_PK = dm_PK * r_P[:, None]
                if dphi_KC is not None:
                    dphi_KC += torch.matmul(dm_PK.mT, x_PnD.flatten(1))
                if dx_SnD is not None:
                    of_part = torch.matmul(dm_PK, phi_KC).unflatten(1, x_PnD.shape[1:])
                    of_part.addcmul_(how.pre(pre)[:, :, None], du[:, None])
                    of_part.addcmul_(through_rms_P[:, None, None], x_PnD, value=-1.0)
                    dx_SnD[part] = of_part
                    del of_part
                del x_PnD, du
        dscale_3 = torch.stack([d.sum() for d in dzm_K.split(how.sizes)])
        return dx, dphi_KC, dscale_3, dz_K, None


def _rows(t: Tensor, last: int) -> Tensor:
    """Return `t` with all but its `last` dims flattened; a view if it is contiguous."""
    return t.reshape(-1, *t.shape[-last:])


def _through_rms(r_S: Tensor, how: Coefficients) -> Tensor:
    """Return -dr / dx over x r / C: r^2, or r / rms where eps is added to the rms."""
    if how.ordering == "megatron":
        return r_S / (1.0 / r_S - EPS).clamp(min=TINY)  # streams of zeros have a gradient of zeros
    return r_S * r_S


class _Mix(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_SnD: Tensor, y_SD: Tensor, post_Sn: Tensor, res_Snn: Tensor) -> Tensor:
        ctx.save_for_backward(x_SnD, y_SD, post_Sn, res_Snn)
        out = x_SnD.new_empty(x_SnD.shape)
        x_SnD, y_SD, out_SnD = _rows(x_SnD, 2), _rows(y_SD, 1), _rows(out, 2)
        post_Sn, res_Snn = _rows(post_Sn, 1), _rows(res_Snn, 2)
        with torch.autocast(x_SnD.device.type, enabled=False):
            for part in token_parts(x_SnD):
                kept = torch.matmul(res_Snn[part], wide(x_SnD[part]))
                out_SnD[part] = kept.addcmul_(post_Sn[part][:, :, None], wide(y_SD[part])[:, None])
                del kept
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_SnD: Tensor) -> tuple[Tensor | None, ...]:
        given = ctx.saved_tensors
        found = [t.new_empty(t.shape) for t in given]
        x_SnD, y_SD, post_Sn, res_Snn = map(_rows, given, (2, 1, 1, 2))
        dx_SnD, dy_SD, dpost_Sn, dres_Snn = map(_rows, found, (2, 1, 1, 2))
        dout_SnD = _rows(dout_SnD, 2)
        with torch.autocast(x_SnD.device.type, enabled=False):
            for part in token_parts(x_SnD):
                g = wide(dout_SnD[part])
                dres_Snn[part] = torch.matmul(g, wide(x_SnD[part]).mT)
                dpost_Sn[part] = torch.matmul(g, wide(y_SD[part])[:, :, None])[:, :, 0]
                dy_SD[part] = torch.matmul(post_Sn[part][:, None], g)[:, 0]
                dx_SnD[part] = torch.matmul(res_Snn[part].mT, g)
                del g
        return tuple(found)
