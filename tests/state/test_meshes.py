"""Checkpoints between meshes, bit for bit: tensor, expert, data and pipeline axes.

Forked gloo ranks. Parameters, optimizer state and router bias are compared as whole tensors.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from torch import Tensor

from megacpp.config.schema import Config, MeshConfig
from megacpp.state.checkpoint import load_checkpoint, save_checkpoint, verify
from megacpp.state.manifest import read_manifest
from tests.figures import Record
from tests.ranks import LONG_S, run_ranks
from tests.state.meshes import (
    config_of,
    digests,
    fill,
    merged,
    model_config,
    state_of,
    world_of,
)
from tests.together import Together


@dataclass(frozen=True)
class Layout:
    """Mesh and the model on it."""

    mesh: MeshConfig = MeshConfig(dp_shard=1)  # noqa: RUF009 - frozen
    experts: int = 4
    tied: bool = False
    ahead: int = 0  # depths of multi-token prediction

    @property
    def world(self) -> int:
        m = self.mesh
        return m.pp * m.dp_replicate * m.dp_shard * m.cp * m.tp

    @property
    def config(self) -> Config:
        return config_of(self.mesh, model_config(self.experts, self.tied, self.ahead))

    @property
    def alone(self) -> Layout:
        """The same model on one process."""
        return Layout(experts=self.experts, tied=self.tied, ahead=self.ahead)


LAYOUTS = {
    "fsdp2": Layout(MeshConfig(dp_shard=2)),
    "tp2": Layout(MeshConfig(dp_shard=1, tp=2)),
    "ep2": Layout(MeshConfig(dp_shard=2, ep=2)),
    "pp2": Layout(MeshConfig(pp=2, dp_shard=1)),
    "tied interleaved": Layout(MeshConfig(pp=2, dp_shard=1, pp_schedule="interleaved"), tied=True),
    "tp4": Layout(MeshConfig(dp_shard=1, tp=4)),
    "fsdp2 tp2": Layout(MeshConfig(dp_shard=2, tp=2)),
    "replicas2 tp2": Layout(MeshConfig(dp_replicate=2, dp_shard=1, tp=2)),
    "efsdp2 ep2": Layout(MeshConfig(dp_shard=4, ep=2)),
    "efsdp2 ep2, an expert on two ranks": Layout(MeshConfig(dp_shard=4, ep=2), experts=2),
    "tp2 ep4": Layout(MeshConfig(dp_shard=2, tp=2, ep=4)),
    "replicas2 ep2": Layout(MeshConfig(dp_replicate=2, dp_shard=2, ep=2)),
    "pp2 fsdp2": Layout(MeshConfig(pp=2, dp_shard=2)),
    "pp2 tp2 ep2": Layout(MeshConfig(pp=2, dp_shard=1, tp=2, ep=2)),
    "pp2 fsdp2 interleaved": Layout(MeshConfig(pp=2, dp_shard=2, pp_schedule="interleaved")),
    "tied pp2 tp2": Layout(MeshConfig(pp=2, dp_shard=1, tp=2), tied=True),
    "pp2 tp2, tokens ahead": Layout(MeshConfig(pp=2, dp_shard=1, tp=2), ahead=2),
    "tied pp2 dualpipev": Layout(MeshConfig(pp=2, dp_shard=2, pp_schedule="dualpipev"), tied=True),
    "pp2 zbv, tokens ahead": Layout(MeshConfig(pp=2, dp_shard=2, pp_schedule="zbv"), ahead=2),
    "tied pp2 dualpipe": Layout(MeshConfig(pp=2, dp_shard=2, pp_schedule="dualpipe"), tied=True),
    "pp2 zbv": Layout(MeshConfig(pp=2, dp_shard=2, pp_schedule="zbv")),
}
MOVES = [  # beyond those to and from one process; never to fewer ranks
    ("tp2", "fsdp2"),
    ("pp2", "ep2"),
    ("fsdp2", "pp2 fsdp2"),
    ("tp4", "fsdp2 tp2"),
    ("fsdp2 tp2", "pp2 tp2 ep2"),
    ("efsdp2 ep2", "tp2 ep4"),
    ("pp2 fsdp2", "efsdp2 ep2"),
    ("pp2 tp2 ep2", "pp2 fsdp2 interleaved"),
    ("replicas2 ep2", "pp2 zbv"),
    ("tied interleaved", "tied pp2 tp2"),
    ("tied pp2 tp2", "tied pp2 dualpipe"),
    ("tied pp2 dualpipe", "tied pp2 dualpipev"),
    ("pp2 zbv, tokens ahead", "pp2 tp2, tokens ahead"),
    ("fsdp2 tp2", "fsdp2 tp2"),
    ("efsdp2 ep2, an expert on two ranks", "efsdp2 ep2, an expert on two ranks"),
    ("tied pp2 tp2", "tied pp2 tp2"),
]
Move = tuple[Layout, Layout]  # saver and loader
BACK = [(layout, layout.alone) for layout in LAYOUTS.values()]
ACROSS = [(LAYOUTS[a], LAYOUTS[b]) for a, b in MOVES]
SAVED, OTHER = 1, 2  # what tensors are filled with


def state(layout: Layout, seed: int) -> dict[str, Tensor]:
    tensors = state_of(layout.config, world_of(layout.mesh, layout.world))
    fill(tensors, seed)
    return tensors


@functools.cache
def expected(layout: Layout, seed: int = SAVED) -> dict[str, str]:
    """Whole tensors of the model on one process."""
    return digests(state(layout.alone, seed))


@dataclass
class Loaded:
    """Result of one rank after loading over other values."""

    digests: dict[str, str]
    extra: dict[str, Any]


def save_and_load(
    layouts: list[Layout], moves: list[tuple[Layout, Layout]], paths: dict[Layout, Path]
) -> list[Loaded]:
    """Saves every layout, then loads what each move asks for."""
    states = {layout: state(layout, SAVED) for layout in layouts}
    for layout, tensors in states.items():
        save_checkpoint(paths[layout].parent, 3, tensors, {"of": str(layout)}, keep=1)
    found = []
    for saver, loader in moves:
        fill(states[loader], OTHER)
        extra = load_checkpoint(paths[saver], states[loader])
        found.append(Loaded(digests(states[loader]), extra))
    return found


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[Layout, Path]:
    """Return the path of every layout's checkpoint, and of its model on one process."""
    folder = tmp_path_factory.mktemp("saved")
    layouts = dict.fromkeys(x for a in LAYOUTS.values() for x in (a, a.alone))
    return {a: folder / str(i) / "step-000003" for i, a in enumerate(layouts)}


@pytest.fixture(scope="module")
def loaded(paths: dict[Layout, Path]) -> Together[Move, list[Loaded]]:
    """Return the results of every rank, by saver and loader."""

    def make(moves: list[Move]) -> dict[Move, list[Loaded]]:
        layouts = dict.fromkeys(layout for move in moves for layout in move)
        alone = [layout for layout in layouts if layout.world == 1]
        save_and_load(alone, [], paths)
        found: dict[Move, list[Loaded]] = {}
        for world in sorted({layout.world for layout in layouts} - {1}):
            some = [move for move in moves if move[1].world == world]
            here = [layout for layout in layouts if layout.world == world]

            def body(rank: int, _world: int, args: Any = (here, some, paths)) -> list[Loaded]:
                return save_and_load(*args)

            of_ranks = run_ranks(body, world, timeout_s=LONG_S)
            found |= {m: list(x) for m, x in zip(some, zip(*of_ranks, strict=True), strict=True)}
        back = [move for move in moves if move[1].world == 1]
        of_one = save_and_load(alone, back, paths)
        return found | {move: [x] for move, x in zip(back, of_one, strict=True)}

    def beside(move: Move) -> list[Move]:
        return [move[::-1]] if move[1].world == 1 else []

    return Together(__name__, [*BACK, *ACROSS], make, beside)


@pytest.mark.parametrize("move", BACK, ids=LAYOUTS)
def test_to_one_process_and_back(
    loaded: Together[Move, list[Loaded]], move: Move, record_property: Record
) -> None:
    agrees(loaded[move], *move)
    agrees(loaded[move[::-1]], *move[::-1])
    record_property("moves from mesh to mesh, hashes of all tensors equal", 2)


@pytest.mark.parametrize("move", ACROSS, ids=map("-".join, MOVES))
def test_from_mesh_to_mesh(
    loaded: Together[Move, list[Loaded]], move: Move, record_property: Record
) -> None:
    agrees(loaded[move], *move)
    record_property("moves from mesh to mesh, hashes of all tensors equal", 1)


def agrees(results: list[Loaded], saver: Layout, loader: Layout) -> None:
    assert merged([x.digests for x in results]) == expected(saver)
    assert not expected(saver).items() & expected(saver, OTHER).items(), "else nothing is proven"
    for x in results:
        assert x.extra["of"] == str(saver)
        assert (x.extra["rng"] is not None) == (saver.world == loader.world)


def test_ranks_of_a_pipeline_hold_different_tensors() -> None:
    """Check that only a tied weight is on two stages; each router's bias is on one."""
    layout = Layout(MeshConfig(pp=2, dp_shard=1), tied=True)
    one, other = (
        set(names) for names in run_ranks(lambda rank, world: list(state(layout, SAVED)), 2)
    )
    states = (f"optim.embed.weight.{key}" for key in ("exp_avg", "exp_avg_sq", "step"))
    assert one & other == {"model.embed.weight", *states}
    assert one | other == expected(layout).keys()
    for names, block in ((one, 1), (other, 3)):
        biases = [name for name in names if name.endswith("expert_bias")]
        assert biases == [f"model.blocks.{block}.mixer.router.expert_bias"]


@pytest.mark.parametrize("move", BACK, ids=LAYOUTS)
def test_every_element_is_stored_once(
    paths: dict[Layout, Path], loaded: Together[Move, list[Loaded]], move: Move
) -> None:
    assert loaded[move], "saved"
    layout, _ = move
    path = paths[layout]
    assert verify(path) == []
    sizes: dict[str, int] = {}
    header = 0
    for file in path.glob("*.safetensors"):
        with file.open("rb") as raw:
            header += 8 + int.from_bytes(raw.read(8), "little")
        with safe_open(file, framework="pt") as reader:
            for key in reader.keys():  # noqa: SIM118 - no mapping
                sizes[key] = sizes.get(key, 0) + reader.get_tensor(key).nbytes
    wanted = {key: entry.num_bytes for key, entry in manifest(paths[layout.alone]).items()}
    assert sizes == wanted
    on_disk = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    assert on_disk == sum(wanted.values()) + header
    assert manifest(path) == manifest(paths[layout.alone])


def manifest(path: Path) -> dict[str, Any]:
    return read_manifest(path, "checkpoint").tensors


def test_stages_share_no_file_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are bounded by what one rank writes, and no rank has to know another's tensors."""
    monkeypatch.setattr("megacpp.state.checkpoint._FILE_BYTES", 20_000)
    layout = LAYOUTS["pp2 fsdp2"]

    def body(rank: int, world: int) -> None:
        save_checkpoint(tmp_path, 3, state(layout, SAVED), {}, keep=1)

    run_ranks(body, 4)
    files = list((tmp_path / "step-000003").glob("*.safetensors"))
    assert len(files) > 8 and max(f.stat().st_size for f in files) < 40_000
    back = state(layout.alone, OTHER)
    load_checkpoint(tmp_path / "step-000003", back)
    assert digests(back) == expected(layout)
