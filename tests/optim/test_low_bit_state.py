"""State of an optimizer with 8- or 4-bit moments: saved, loaded, moved to other ranks.

Saving what was just loaded gives the same tensors to the bit, so a run that stops often equals one
that never stopped.
"""

from __future__ import annotations

import copy
import functools
import logging
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # FSDP2 imports it; ranks that are forked afterwards needn't
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from megacpp.config.checks.every import resolve
from megacpp.config.schema import Config
from megacpp.quiet import quiet_import
from megacpp.state.training import TrainingState
from megacpp.torch_extras import local_part
from optim import low_bit
from optim.low_bit import BLOCKS, Bits, is_packed
from optim.muon_adamw import MuonAdamW
from parallel.simulate.fake import fake_tensors
from tests.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("torchao")
KINDS: list[Bits] = ["8bit", "4bit"]


@pytest.fixture
def torchao() -> None:
    pytest.importorskip("torchao.optim", reason="torchao isn't installed (the lowp extra)")


class Net(nn.Module):
    """Shapes are chosen for what two ranks make of them.

    `even`: whole blocks in both halves. `odd`: 65 and 64 rows of 96, of which only the second part
    is of whole blocks of 256 (of 128: both), and the whole matrix isn't. `hidden` is moved by Muon.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.even = nn.Linear(128, 96)
        self.hidden = nn.Linear(96, 96, bias=False)
        self.odd = nn.Linear(96, 129, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.odd(self.hidden(self.even(x).tanh()))


def made(kind: Any, ranks: int = 1, dtype: torch.dtype = torch.float32) -> tuple[Net, MuonAdamW]:
    net = Net().to(dtype)
    if ranks > 1:
        fully_shard(net, mesh=init_device_mesh("cpu", (ranks,)))
    named = dict(net.named_parameters())
    muon = [("hidden.weight", named.pop("hidden.weight"))]
    adamw = {"params": list(named.items()), "algorithm": "adamw"}
    return net, MuonAdamW([{"params": muon, "algorithm": "muon"}, adamw], adamw_state=kind)


def train(net: Net, optimizer: MuonAdamW, steps: range) -> None:
    for step in steps:
        x = torch.randn(4, 128, generator=torch.Generator().manual_seed(step))
        net(x.to(net.odd.weight.dtype)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def wholes(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    found = {k: t.full_tensor() if isinstance(t, DTensor) else t for k, t in tensors.items()}
    return {name: t.detach().clone() for name, t in found.items()}


def everything(net: Net, optimizer: MuonAdamW) -> dict[str, Tensor]:
    return wholes({**dict(net.named_parameters()), **optimizer.state_tensors()})


def differing(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    assert a.keys() == b.keys()
    return [name for name in a if not torch.equal(a[name], b[name])]


@pytest.mark.parametrize("form", ["tensors by name", "state_dict", "torch's, flat"])
@pytest.mark.parametrize("kind", KINDS)
def test_saved_state_is_plain_and_found_to_the_bit(
    kind: Bits, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, optimizer = made(kind)
    train(net, optimizer, range(3))
    again, fresh = made(kind)
    again.load_state_dict(copy.deepcopy(net.state_dict()))
    if form == "tensors by name":
        saved = optimizer.state_tensors()
        fresh.load_state_tensors(saved)
    elif form == "state_dict":
        monkeypatch.setattr(low_bit, "PIECE", 5120)  # of 12288 entries
        saved = copy.deepcopy(optimizer.state_dict())["state"]
        fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    else:
        flat = StateDictOptions(flatten_optimizer_state_dict=True)
        saved = get_optimizer_state_dict(net, optimizer, options=flat)
        set_optimizer_state_dict(again, fresh, copy.deepcopy(saved), options=flat)
    leaves = [t for t in tree_leaves(saved) if isinstance(t, Tensor)]
    assert len(leaves) == 1 + 3 * 3 and all(type(t) is Tensor for t in leaves)
    assert is_packed(fresh.state[again.even.weight]["exp_avg"]), "loading keeps the form"
    assert not differing(everything(again, fresh), everything(net, optimizer))
    train(net, optimizer, range(3, 5))
    train(again, fresh, range(3, 5))
    assert not differing(everything(again, fresh), everything(net, optimizer))


def test_only_packed_entries_are_copies() -> None:
    _, optimizer = made("8bit")
    first, second = optimizer.state_tensors(), optimizer.state_tensors()
    copies = {name for name in first if first[name] is not second[name]}
    assert copies == {"even.weight.exp_avg", "even.weight.exp_avg_sq"}
    assert first["hidden.weight.momentum"] is second["hidden.weight.momentum"]


def visit(
    rank: int,
    world: int,
    kind: Any,
    folder: Path,
    source: Path | None,
    steps: range,
    dtype: torch.dtype = torch.float32,
) -> tuple[Path, dict[str, Tensor]]:
    """Loads or starts, trains, saves; the checkpoint and all whole tensors."""
    net, optimizer = made(kind, world, dtype)
    state = TrainingState(folder, net, optimizer, resolve(Config(), 1), "corpus")
    if source is not None:
        train(net, optimizer, range(90, 91))  # other values, to be overwritten
        state.resume(str(source))
    train(net, optimizer, steps)
    state.step = 7
    return state.save(keep=0), everything(net, optimizer)


def moved(ranks: int, *arguments: Any) -> tuple[Path, dict[str, Tensor]]:
    body = functools.partial(_visit, arguments)
    results = [visit(0, 1, *arguments)] if ranks == 1 else run_ranks(body, ranks)
    for _, tensors in results:
        assert not differing(tensors, results[0][1])
    return results[0]


def _visit(arguments: tuple[Any, ...], rank: int, world: int) -> tuple[Path, dict[str, Tensor]]:
    return visit(rank, world, *arguments)


def contents(path: Path) -> dict[str, bytes]:
    """Return the bytes of a checkpoint's files of tensors."""
    files = {file.name: file.read_bytes() for file in path.glob("*.safetensors")}
    assert files
    return files


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_saving_what_was_loaded_gives_the_same(kind: Bits, ranks: int, tmp_path: Path) -> None:
    first, saved = moved(ranks, kind, tmp_path / "a", None, range(3))
    second, found = moved(ranks, kind, tmp_path / "b", first, range(0))
    assert not differing(found, saved)
    assert contents(second) == contents(first)
    _, whole = moved(ranks, kind, tmp_path / "c", None, range(5))
    _, resumed = moved(ranks, kind, tmp_path / "d", second, range(3, 5))
    assert not differing(resumed, whole)


def rounded(before: Tensor, after: Tensor) -> bool:
    """By at most half of the 8-bit table's widest gap, 0.016, times the largest of the block."""
    before, after = (t.reshape(-1, BLOCKS["8bit"]) for t in (before, after))
    largest = before.abs().amax(1, keepdim=True)
    assert largest.all() and after.any()
    return bool(((after - before).abs() <= 0.008 * largest).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_other_ranks_pack_what_their_blocks_are(dtype: torch.dtype, tmp_path: Path) -> None:
    """Blocks that both have are the same to the bit; what was wide and is packed now is rounded."""
    one, saved = moved(1, "8bit", tmp_path / "a", None, range(3), dtype)
    two, found = moved(2, "8bit", tmp_path / "b", one, range(0), dtype)
    odd = ["odd.weight.exp_avg", "odd.weight.exp_avg_sq"]
    assert differing(found, saved) == odd
    for name in odd:
        assert torch.equal(found[name][:65], saved[name][:65])
        assert rounded(saved[name][65:], found[name][65:])
    _, back = moved(1, "8bit", tmp_path / "c", two, range(0), dtype)
    assert not differing(back, found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_run_may_change_how_it_keeps_them(dtype: torch.dtype, tmp_path: Path) -> None:
    """From fp32 to 8 bits, which rounds, and back, which doesn't; the header of a run says so."""
    wide, saved = moved(1, "fp32", tmp_path / "a", None, range(3), dtype)
    packed, found = moved(1, "8bit", tmp_path / "b", wide, range(0), dtype)
    names = ["even.weight.exp_avg", "even.weight.exp_avg_sq"]
    assert differing(found, saved) == names
    assert all(rounded(saved[name], found[name]) for name in names)
    _, back = moved(1, "fp32", tmp_path / "c", packed, range(0), dtype)
    assert not differing(back, found)
    assert local_part(back["even.weight.exp_avg"]).dtype == dtype


def test_importing_torchao_leaves_logs_and_warnings_alone() -> None:
    loggers = [logging.getLogger(name) for name in ("torchao", "torch.utils._pytree")]
    before = [logger.level for logger in loggers], list(warnings.filters)
    with quiet_import():
        assert not any(logger.isEnabledFor(logging.WARNING) for logger in loggers)
        warnings.filterwarnings("ignore", message="as torchao does")
    assert ([logger.level for logger in loggers], list(warnings.filters)) == before


@pytest.mark.parametrize("bits", KINDS)
def test_tables_are_real_where_tensors_are_fake(bits: Bits) -> None:
    """torchao makes a table once; values made up for a trace would serve every later run."""
    packed = low_bit._packed_class(bits)
    module = sys.modules[packed.__module__]
    module.get_qmap_signed.cache_clear()
    module.get_qmap_unsigned.cache_clear()
    with fake_tensors():
        low_bit.new_low_bit_state(torch.empty(4096), bits)
    for table in (module.get_qmap_signed(), module.get_qmap_unsigned()):
        assert len(set(table)) == {"8bit": 256, "4bit": 16}[bits]
