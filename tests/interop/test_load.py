"""First weights on any mesh equal those of one process; what doesn't fit is refused by name.

Forked gloo ranks.
"""

from __future__ import annotations

import dataclasses
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from safetensors.torch import load_file, save_file

from megacpp.cli.main import main
from megacpp.config.arguments import parse_run
from megacpp.config.schema import Config, MeshConfig, ModelConfig
from megacpp.errors import CheckpointError, MegacppError
from megacpp.interop import stored
from megacpp.interop.compare import load_model
from megacpp.interop.links import Link
from megacpp.interop.load import load_weights, open_source
from megacpp.interop.places import locate, read_model
from megacpp.model.init import Slice
from megacpp.state.checkpoint import save_checkpoint
from megacpp.state.export import load_trained
from megacpp.state.manifest import Manifest, write_manifest
from megacpp.state.tensors import model_tensors
from parallel.build import build_model, local_part
from tests.interop.models import built, final_folder, model_of
from tests.launch import Done, forked
from tests.ranks import run_ranks
from tests.run.test_mesh_runs import assert_close
from tests.state.meshes import config_of, world_of
from tests.state.toy import differences
from tests.test_run import ADAMW, records

# mesh, model; every kind of change of rows meets every kind of shard
MESHES: dict[str, tuple[MeshConfig, str]] = {
    "fsdp2 tp2": (MeshConfig(dp_shard=2, tp=2), "llama_tied_yarn"),
    "pp2 tp2": (MeshConfig(pp=2, dp_shard=1, tp=2), "qwen3_next_delta"),
    "pp2 tp2 ep2": (MeshConfig(pp=2, dp_shard=1, tp=2, ep=2), "granite"),
    "efsdp2 ep2": (MeshConfig(dp_shard=4, ep=2), "qwen3_next"),
    "tp2 ep4": (MeshConfig(dp_shard=2, tp=2, ep=4), "glm4"),
    "replicas2": (MeshConfig(dp_replicate=2, dp_shard=2), "glm_dsa"),
}


def even(name: str) -> ModelConfig:
    """Return a case's model with sizes that two ranks may share."""
    model = model_of(name)
    return dataclasses.replace(
        model,
        attention=dataclasses.replace(model.attention, num_heads=4, num_kv_heads=4),
    )


def exported(folder: Path, model: ModelConfig) -> Path:
    final = final_folder(folder / "run", built(model))
    assert main(["export", str(final), "--out", str(folder / "hf"), "--dtype", "fp32"]) == 0
    return final


class CountedFile:
    """File of safetensors that counts the bytes of what is read."""

    read = 0

    def __init__(self, path: Path, framework: str) -> None:
        self.file = safetensors.safe_open(path, framework)
        self.keys, self.metadata = self.file.keys, self.file.metadata

    def __enter__(self) -> CountedFile:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def get_slice(self, name: str) -> Any:
        part = self.file.get_slice(name)

        class Counted:
            get_shape, get_dtype = part.get_shape, part.get_dtype

            def __getitem__(self, at: Any) -> torch.Tensor:
                found = part[at]
                CountedFile.read += found.nbytes
                return found

        return Counted()


def unheld(link: Link) -> int:
    """Return how many numbers of a tensor of the folder none of ours holds."""
    width = link.width or (link.shape[-1] if len(link.shape) > 1 else 1)
    return link.numel - width * sum(part.count for part in link.parts)


@pytest.mark.parametrize("mesh", MESHES)
def test_every_rank_reads_its_part(
    mesh: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no byte more, but for those that must be zero: each is read by one rank."""
    monkeypatch.setattr(stored, "safe_open", CountedFile)
    axes, name = MESHES[mesh]
    model = even(name)
    final = exported(tmp_path, model)
    wanted = {n: t.detach() for n, t in model_tensors(built(model)).items()}
    config = config_of(axes, model)

    def body(rank: int, world: int) -> set[str]:
        there = world_of(axes, world)
        found = build_model(config, there)
        part = local_part(there)
        for folder in (tmp_path / "hf", final, tmp_path / "step-000003"):
            with torch.no_grad():
                for t in model_tensors(found).values():
                    part(t).local.fill_(-1)
            if folder.name == "step-000003":
                load_weights(found, open_source(locate(str(tmp_path / "hf"), ""), model), part)
                tensors = {f"model.{n}": t for n, t in model_tensors(found).items()}
                save_checkpoint(tmp_path, 3, tensors, extra_of(model), keep=1)
            source = open_source(locate(str(folder), "x"), model)
            CountedFile.read = 0
            load_weights(found, source, part)
            read = sum(unheld(link) for link in source.links[rank::world])
            for n, t in model_tensors(found).items():
                mine = part(t)
                read += mine.local.numel() * (n not in source.zeros)
                box = tuple(
                    slice(o, o + s) for o, s in zip(mine.offset, mine.local.shape, strict=True)
                )
                assert torch.equal(mine.local, wanted[n][box]), (folder.name, n)
            assert CountedFile.read == 4 * read, folder.name
        return set(model_tensors(found))

    names = run_ranks(body, 4)
    assert set().union(*names) == wanted.keys()
    alone = load_trained(tmp_path / "step-000003", model)
    assert not differences(wanted, dict(model_tensors(alone)))
    shutil.copy(final / "tokenizer.json", tmp_path / "step-000003")
    shutil.copy(final / "tokenizer_config.json", tmp_path / "step-000003")
    command = ["export", str(tmp_path / "step-000003"), "--out", str(tmp_path / "again")]
    assert main([*command, "--dtype", "fp32"]) == 0
    files = [tmp_path / folder / "model.safetensors" for folder in ("hf", "again")]
    assert files[0].read_bytes() == files[1].read_bytes()
    config_json = json.loads((tmp_path / "again" / "config.json").read_text())
    assert config_json["megacpp"]["step"] == 3


# Rows of a microbatch, of which a step has two on each data rank: one process, and two ranks.
CONTINUED = {"": 4, "--mesh.tp 2": 4, "--mesh.ep 2": 2, "--mesh.pp 2": 4}


def test_a_run_from_a_folder_is_the_same_on_any_mesh(corpus: Path, tmp_path: Path) -> None:
    """Six steps of `train.py` in fp64; the folder may go once a step is saved."""
    folder = tmp_path / "hf"
    exported(tmp_path, dataclasses.replace(even("qwen3_moe"), vocab_size=400))
    words = f"tiny --checkpoint.init {folder} --data.path {corpus} --data.seq-len 48 --run.steps 6"
    words += " --train.grad-accum 2 --run.eval-rows 8 --run.sample-tokens 0 --optim.lr 1e-2"
    words += " --checkpoint.every 3 --optim.schedule constant"

    def run(mesh: str, name: str, *more: str) -> Done:
        flags = [*words.split(), *ADAMW, *mesh.split(), "--run.dir", str(tmp_path / name), *more]
        batch = ["--train.device-batch-size", str(CONTINUED[mesh])]
        return forked(*flags, *batch, ranks=2 if mesh else 1)

    for mesh in CONTINUED:
        compared = not mesh
        done = run(mesh, f"run{mesh}", *["--checkpoint.init-check"] * compared)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("of the likeliest tokens equal") == compared
        assert f"weights of {folder} after 7 steps" in " ".join(done.stdout.split())
        assert_close(tmp_path / "run", tmp_path / f"run{mesh}")
    first, last = (records(tmp_path / "run")[step]["loss"] for step in (0, 5))
    assert last < first - 0.5
    folder.rename(tmp_path / "gone")
    done = run("", "run--mesh.pp 2", "--run.steps", "7")
    assert done.returncode == 0, done.stderr
    assert "weights of" not in done.stdout and "step 7/7" in done.stdout
    done = run("", "other")
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: checkpoint.init={folder}: no such folder. Fix: ")


@pytest.mark.parametrize("name", ["granite", "qwen3_next_delta", "glm_dsa", "mixtral_scaled"])
def test_any_box_of_any_tensor_is_read(name: str, tmp_path: Path) -> None:
    """Boxes with gaps between their rows too, as of experts whose rows are sharded."""
    model = model_of(name)
    final = exported(tmp_path, model)
    wanted = {n: t.detach() for n, t in model_tensors(built(model)).items()}
    draws = random.Random(0)
    boxes: list[tuple[torch.Tensor, Slice]] = []

    def part(t: torch.Tensor) -> Slice:
        ends = [sorted(draws.choices(range(size + 1), k=2)) for size in t.shape]
        local = torch.full([hi - lo for lo, hi in ends], torch.nan)
        boxes.append((t, Slice(local, tuple(t.shape), tuple(lo for lo, _ in ends))))
        return boxes[-1][1]

    for folder in (tmp_path / "hf", final):
        for _ in range(6):
            boxes.clear()
            load_weights(target := built(model), open_source(locate(str(folder), ""), model), part)
            names = {id(t): n for n, t in model_tensors(target).items()}
            for t, mine in boxes:
                whole = wanted[names[id(t)]]
                at = zip(mine.offset, mine.local.shape, strict=True)
                assert torch.equal(mine.local, whole[tuple(slice(o, o + s) for o, s in at)])
            assert sum(mine.local.numel() > 0 for _, mine in boxes) > len(wanted) / 2


def extra_of(model: ModelConfig) -> dict[str, Any]:
    return {"step": 3, "config": {"model": dataclasses.asdict(model)}}


def altered(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


Q = "model.layers.1.self_attn.q_proj.weight"
DAMAGE: dict[str, tuple[str, Callable[[dict[str, torch.Tensor]], Any], str]] = {
    "missing": ("qwen3_tied", lambda t: t.pop(Q), f"has no tensor {Q}"),
    "left over": (
        "qwen3_tied",
        lambda t: t.update({"model.layers.1.self_attn.q_proj.bias": torch.zeros(4)}),
        "has a tensor model.layers.1.self_attn.q_proj.bias that the model has no place for",
    ),
    "shape": (
        "qwen3_tied",
        lambda t: t.update({Q: t[Q][:-1].clone()}),
        f"{Q} is [31, 24], the model needs [32, 24]",
    ),
    "not finite": (
        "qwen3_tied",
        lambda t: t["model.embed_tokens.weight"][3, 2:3].fill_(float("nan")),
        "model.embed_tokens.weight has numbers that aren't finite in torch.float32",
    ),
    "bytes": (
        "qwen3_tied",
        lambda t: t.update({Q: t[Q].to(torch.float8_e4m3fn)}),
        f"{Q} has numbers of type F8_E4M3. Fix: dequantise the weights first.",
    ),
    "another head": (
        "qwen3_tied",
        lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1}),
        "config.json says tie_word_embeddings, and lm_head.weight isn't the embedding",
    ),
    "gate of attention": (
        "qwen3_next",
        lambda t: t[Q][8].fill_(1e-3),
        f"{Q} has numbers that aren't zero where no tensor of ours has any",
    ),
    "gate of the shared expert": (
        "qwen3_next",
        lambda t: t["model.layers.0.mlp.shared_expert_gate.weight"].fill_(1.0),
        "model.layers.0.mlp.shared_expert_gate.weight has numbers that aren't zero",
    ),
    "wider shared expert": (
        "glm4",
        lambda t: t["model.layers.0.mlp.shared_experts.down_proj.weight"][0, -1:].fill_(1.0),
        "model.layers.0.mlp.shared_experts.down_proj.weight has numbers that aren't zero",
    ),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_what_does_not_fit_is_named(what: str, tmp_path: Path) -> None:
    name, change, words = DAMAGE[what]
    exported(tmp_path, model_of(name))
    altered(tmp_path / "hf", change)
    place = locate(str(tmp_path / "hf"), "checkpoint.init")
    with pytest.raises(CheckpointError) as error:
        load_model(place, read_model(place))
    assert words in str(error.value) and "\n" not in str(error.value)


def test_final_weights_without_their_list_are_named(tmp_path: Path, capsys: Any) -> None:
    """A run's newest checkpoint stands in for them, and the note says so."""
    (tmp_path / "final").mkdir()
    saved = tmp_path / "checkpoints" / "step-000003"
    saved.mkdir(parents=True)
    write_manifest(saved, Manifest("checkpoint", 3, 1, {}, {}))
    assert locate(str(tmp_path), "run").folder == saved
    said = f"note: {tmp_path}/final has no manifest.json: taking {saved}\n"
    assert capsys.readouterr().err == said


def test_layers_that_predict_further_tokens_are_not_read(tmp_path: Path) -> None:
    model = model_of("glm4")
    exported(tmp_path, model)
    more = {"model.layers.2.eh_proj.weight": torch.ones(3)}
    altered(tmp_path / "hf", lambda tensors: tensors.update(more))
    source = open_source(locate(str(tmp_path / "hf"), ""), model)
    assert source.unused == tuple(more)
    more = {"model.layers.1.eh_proj.weight": torch.ones(3)}
    altered(tmp_path / "hf", lambda tensors: tensors.update(more))
    with pytest.raises(CheckpointError, match=r"has a tensor model.layers.1.eh_proj.weight"):
        open_source(locate(str(tmp_path / "hf"), ""), model)


def test_experts_may_be_stacked(tmp_path: Path) -> None:
    """Save gate and up of all experts in one tensor, as transformers holds them in memory."""
    model = model_of("qwen3_moe")
    model = dataclasses.replace(model, moe=dataclasses.replace(model.moe, route_scale=2.0))
    exported(tmp_path, model)

    def stack(t: dict[str, torch.Tensor]) -> None:
        for layer in ("model.layers.0.mlp.experts", "model.layers.1.mlp.experts"):
            gate, up, down = (
                torch.stack([t.pop(f"{layer}.{e}.{name}_proj.weight") for e in range(4)])
                for name in ("gate", "up", "down")
            )
            t[f"{layer}.gate_up_proj"] = torch.cat((gate, up), 1)
            t[f"{layer}.down_proj"] = down

    altered(tmp_path / "hf", stack)
    back = load_model(locate(str(tmp_path / "hf"), ""), model)
    assert not differences(dict(model_tensors(built(model))), dict(model_tensors(back)))


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    exported(tmp_path, model_of("llama"))
    file = tmp_path / "hf" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-5])
    place = locate(str(tmp_path / "hf"), "checkpoint.init")
    with pytest.raises(CheckpointError, match=r"model.safetensors: can't be read"):
        open_source(place, read_model(place))


def test_a_damaged_folder_of_ours_is_named(tmp_path: Path) -> None:
    final = exported(tmp_path, model_of("llama"))
    file = final / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x07")
    place = locate(str(final), "checkpoint.init")
    with pytest.raises(CheckpointError, match="is corrupt"):
        load_model(place, read_model(place))
    assert main(["export", str(final), "--out", str(tmp_path / "x")]) == 4
    assert not (tmp_path / "x").exists() and not (tmp_path / "x.tmp").exists()


def test_settings_of_the_model_come_from_the_folder(tmp_path: Path) -> None:
    exported(tmp_path, model_of("qwen3_yarn"))
    flags = ["tiny", "--checkpoint.init", str(tmp_path / "hf"), "--run.dir", str(tmp_path / "r")]
    resolved = parse_run(flags, 1)
    assert resolved.config.model == model_of("qwen3_yarn")
    assert resolved.provenance["model.dim"] == "checkpoint.init"
    assert not any(key.startswith("model.") for key in resolved.given)
    longer = parse_run([*flags, "--model.attention.max-seq-len", "128"], 1)
    assert longer.config.model.attention.max_seq_len == 128
    assert any("max_seq_len = 128: " in note and "has 64" in note for note in longer.notes)
    deeper = parse_run([*flags, "--model.depth", "6"], 1).config
    with pytest.raises(MegacppError, match=r"has no tensor model.layers.2.input_layernorm.weight"):
        open_source(locate(str(tmp_path / "hf"), ""), deeper.model)


def test_show_prints_flags_that_make_the_model(tmp_path: Path, capsys: Any) -> None:
    model = model_of("deepseek_v3_yarn")
    exported(tmp_path, model)
    capsys.readouterr()
    assert main(["show", "--from", str(tmp_path / "hf"), "--json"]) == 0
    words = " ".join(json.loads(capsys.readouterr().out)["flags"]).split()
    words = ["" if word == "''" else word for word in words]
    assert parse_run(["tiny", *words], 1).config.model == model
    assert isinstance(Config(), Config)
