"""F blocks: a dense feed-forward, SwiGLU or squared ReLU.

Legend: B rows, T tokens, D model, F hidden.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn

from megacpp.blocks.dense.init import mlp_rules
from megacpp.config.schema import ModelConfig
from megacpp.kernels.backend import PLAIN_KERNELS, Kernels
from megacpp.kernels.gated import gated
from megacpp.kernels.linears import gated_linear, is_plain, linears
from megacpp.model.documents import Documents
from megacpp.model.recompute import PLAIN, Recompute
from megacpp.model.tokenwise import Tokenwise


class MLP(Tokenwise):
    """Feed-forward w2(silu(w1 x) * w3 x) (SwiGLU, 2002.05202) or w2(relu(w1 x)^2) (2109.08668).

    `hidden_dim` and `activation` are those of `config.mlp` unless given (shared experts give
    theirs). Tokens don't meet here: documents are ignored and decoding has no state.
    """

    init_rules = mlp_rules
    recompute: Recompute = PLAIN
    kernels: Kernels = PLAIN_KERNELS

    def __init__(
        self,
        config: ModelConfig,
        hidden_dim: int | None = None,
        activation: Literal["swiglu", "relu2"] | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.activation = activation or config.mlp.activation
        hidden = hidden_dim or config.mlp.hidden_dim
        self.w1 = nn.Linear(config.dim, hidden, bias=False)
        if self.activation == "swiglu":
            self.w3 = nn.Linear(config.dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, config.dim, bias=False)

    def forward(self, x_BTD: Tensor, docs: Documents | None = None) -> Tensor:
        """Return the output `[..., D]` of inputs `[..., D]`, each token by itself."""
        hidden = self.recompute("mlp", self._hidden, x_BTD)
        if is_plain(self.w2):
            gate, up = hidden if len(hidden) == 2 else (*hidden, None)
            return gated_linear(self.w2.weight, gate, up, self.kernels.gates).to(x_BTD.dtype)
        return self.w2(gated(*hidden, backend=self.kernels.gates)).to(x_BTD.dtype)

    def _hidden(self, x_BTD: Tensor) -> tuple[Tensor, ...]:
        """Return gate and up, or the argument of the squared ReLU."""
        layers = (self.w1, self.w3) if self.activation == "swiglu" else (self.w1,)
        return linears(x_BTD, *layers, one_tensor=True)  # both live until the backward
