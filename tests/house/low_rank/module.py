"""Z blocks: a feed-forward through a narrow layer.

Legend: B rows, T tokens, D model, L rank.
"""

# pyright: reportAttributeAccessIssue=false
from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from megacpp.config.schema import ModelConfig
from megacpp.model.documents import Documents
from megacpp.model.init import Rule
from megacpp.model.linear_init import input_rule, output_rule
from megacpp.model.recompute import PLAIN, Recompute
from megacpp.model.tokenwise import Tokenwise


class LowRank(Tokenwise):
    """Feed-forward up(gelu(down x)); tokens don't meet."""

    recompute: Recompute = PLAIN

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.down = nn.Linear(config.dim, config.low_rank.rank, bias=False)
        self.up = nn.Linear(config.low_rank.rank, config.dim, bias=False)

    def forward(self, x_BTD: Tensor, docs: Documents | None = None) -> Tensor:
        """Return the output `[..., D]` of inputs `[..., D]`, each token by itself."""
        return self.up(F.gelu(self.down(x_BTD))).to(x_BTD.dtype)

    def init_rules(self) -> dict[str, Rule]:
        """Return the rule of every parameter, by name below the mixer."""
        return {"down.weight": input_rule(self.config), "up.weight": output_rule(self.config)}
