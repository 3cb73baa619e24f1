"""Block kinds by their letter; no torch import here."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from megacpp.blocks.attention.descriptor import ATTENTION
from megacpp.blocks.dense.descriptor import DENSE
from megacpp.blocks.descriptor import BlockKind
from megacpp.blocks.experts.descriptor import EXPERTS
from megacpp.blocks.gated_deltanet.descriptor import GATED_DELTANET
from megacpp.blocks.m2rnn.descriptor import M2RNN_KIND
from megacpp.blocks.mamba3.descriptor import MAMBA3

KINDS: Mapping[str, BlockKind] = MappingProxyType(
    {kind.letter: kind for kind in (ATTENTION, MAMBA3, EXPERTS, M2RNN_KIND, GATED_DELTANET, DENSE)}
)
