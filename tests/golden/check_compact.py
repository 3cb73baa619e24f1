"""CompAct: a compressed Linear and two optimizer steps of its latent."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from checkpointing.compress import CompressedProduct
from optim.compressed import LowRankUpdate
from optim.muon_adamw import MuonAdamW
from tests.golden.harness import GoldenFile

KNOWN = ("compact*.safetensors",)


class Given:
    """The projection of the file."""

    number = 0

    def __init__(self, p_DZ: Tensor) -> None:
        self.p_DZ = p_DZ

    def matrix(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self.p_DZ.to(device, dtype)


def check(golden: GoldenFile) -> None:
    weight, p_DZ = golden.input("W"), golden.input("P")
    lr, beta1, beta2, eps = golden.input("hyper").tolist()
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    latent = nn.Parameter(weight.new_zeros(len(weight), p_DZ.shape[1]))
    group = {
        "params": [latent],
        "algorithm": "adamw",
        "folds": [LowRankUpdate(layer.weight, latent, Given(p_DZ))],
        "lr": lr,
        "betas": (beta1, beta2),
        "eps": eps,
        "weight_decay": 0.0,
    }
    optimizer = MuonAdamW([group])
    for step in range(1, len(golden.names("x")) + 1):
        x = golden.input(f"x{step}", grad=True)
        y = CompressedProduct.apply(x, latent, x.detach() @ p_DZ, (layer,))
        golden.expect(f"y{step}", y)
        y.backward(golden.input(f"d_y{step}"))
        golden.expect(f"grad_x{step}", x.grad)
        golden.expect(f"small_grad{step}", latent.grad, "gradient")
        optimizer.step()
        optimizer.zero_grad()
        golden.expect(f"W{step}", layer.weight)
        assert not latent.any()
