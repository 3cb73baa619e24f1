"""FP8 of linear layers that tp shards: scales are of whole rows and columns, as one rank has them.

Scales are powers of two, so a wrong one shows in numbers that are too small for it alone: one half
of all rows and columns is 2^16 times the other here.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from checkpointing.fp8_shards import Float8Shard, shard_in_fp8
from megacpp.config.checks.fp8 import fp8_rules
from megacpp.config.schema import Config
from parallel.notation import Array
from parallel.styles import shard_parameter
from tests.checkpointing.fp8_cases import changed, config_with
from tests.differences import largest, relative
from tests.ranks import run_ranks

TOKENS, IN, OUT, RANKS = 8, 32, 64, 2
ROWS = {
    "rows": Array.parse("w[F_tp, D]"),
    "columns": Array.parse("w[F, D_tp]"),
    "whole": Array.parse("w[F, D]"),
}


def noise(rows: int, columns: int, seed: int) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def half(x: Tensor, dim: int, part: int) -> Tensor:
    """Return x with one half along `dim` 2^16 times as large."""
    parts = list(x.chunk(2, dim))
    parts[part] = parts[part] * 2.0**16
    return torch.cat(parts, dim)


X_TD = half(noise(TOKENS, IN, 0), 1, 0)
W_FD = half(half(noise(OUT, IN, 1), 1, 1), 0, 1)
DY_TF = half(noise(TOKENS, OUT, 2), 1, 0)


def torchao_config(recipe: str) -> Any:
    from torchao.float8 import Float8LinearConfig

    config = Float8LinearConfig.from_recipe_name(recipe)  # type: ignore[arg-type]
    object.__setattr__(config, "emulate", True)
    return config


def results(linear: nn.Module, x_TD: Tensor, dy_TF: Tensor) -> list[Tensor]:
    """Output, gradient of the input, gradient of the weight."""
    x_TD = x_TD.clone().requires_grad_()
    y_TF = linear(x_TD)
    weight = linear._parameters["weight"]
    assert weight is not None
    return [y_TF.detach(), *torch.autograd.grad(y_TF, [x_TD, weight], dy_TF)]


def whole(recipe: str) -> list[Tensor]:
    """torchao's own layer, on one rank."""
    from torchao.float8 import convert_to_float8_training

    linear = nn.Linear(IN, OUT, bias=False)
    linear.weight = nn.Parameter(W_FD.clone())
    layer = convert_to_float8_training(linear, config=torchao_config(recipe))
    return results(layer, X_TD, DY_TF)


def of_rank(rank: int, world_size: int, recipe: str, shard: str) -> list[Tensor]:
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",))
    linear = nn.Linear(IN, OUT, bias=False)
    linear.weight = nn.Parameter(W_FD.clone())
    shard_parameter(linear, "weight", ROWS[shard], mesh)
    shard_in_fp8(linear, torchao_config(recipe))
    assert isinstance(linear, Float8Shard)
    x_TD = X_TD.chunk(world_size, 1)[rank] if shard == "columns" else X_TD
    dy_TF = DY_TF.chunk(world_size, 1)[rank] if shard == "rows" else DY_TF
    y_TF, dx_TD, dw_FD = results(linear, x_TD, dy_TF)
    return [y_TF, dx_TD, dw_FD.to_local()]  # type: ignore[attr-defined]


@pytest.mark.parametrize("recipe", ["rowwise_with_gw_hp", "rowwise", "tensorwise"])
@pytest.mark.parametrize("shard", ROWS)
def test_ranks_of_tp_round_as_one_does(shard: str, recipe: str) -> None:
    """fp32: sums over ranks in another order."""
    pytest.importorskip("torchao")
    found = run_ranks(functools.partial(of_rank, recipe=recipe, shard=shard), RANKS)
    y, dx, dw = (list(parts) for parts in zip(*found, strict=True))
    joined = {
        "rows": lambda: [torch.cat(y, 1), sum(dx), torch.cat(dw, 0)],
        "columns": lambda: [sum(y), torch.cat(dx, 1), torch.cat(dw, 1)],
        "whole": lambda: [y[0], dx[1], dw[0]],
    }[shard]()
    assert largest(relative(a, b) for a, b in zip(joined, whole(recipe), strict=True)) <= 1e-5


def refusals(config: Config) -> list[str]:
    return [str(error) for error in fp8_rules(config)]


def test_what_tp_refuses() -> None:
    pytest.importorskip("torchao")
    fits = changed(config_with(), mesh={"tp": 2}, precision={"fp8_layers": "F"})
    assert not refusals(changed(fits, model={"mlp": type(fits.model.mlp)(hidden_dim=64)}))
    (narrow,) = refusals(fits)
    assert narrow.startswith("mesh.tp=2: leaves 24 of 48 rows of F w1.weight on a rank; FP8 takes")
    gather = {"fp8_all_gather": True, "fp8_recipe": "tensorwise"}
    assert refusals(changed(fits, precision=gather))[0].startswith(
        "precision.fp8_all_gather=True: gathers whole weights, of which a rank of mesh.tp=2 has"
    )
