"""Exported folders compute what the run's model computes, in transformers itself."""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megacpp.cli.main import main
from megacpp.interop.compare import WITHIN, load_model, our_logits
from megacpp.interop.places import locate, read_model
from megacpp.model.hybrid import HybridLM
from megacpp.run.sample import generate
from megacpp.state.tensors import model_tensors
from megacpp.terminal import progress
from tests.figures import Record
from tests.interop.models import CASES, built, final_folder, model_of
from tests.interop.real_text import assert_equal_on_text
from tests.state.toy import differences

transformers = pytest.importorskip("transformers")

IDS = torch.randint(300, (2, 48), generator=torch.Generator().manual_seed(3))

# Tensors that a class holds in another way, so that without our key they come back in its way.
PADDED, GATED, OUTPUT = r"shared\.w[123]\.", r"shared\.(gate|w2)\.", r"mixer\.w[go]\."
IN_ANOTHER_WAY = {
    **dict.fromkeys(("glm4", "glm4_bias", "glm4_partial", "glm4_dense_first"), PADDED),
    **dict.fromkeys(("deepseek_v3", "deepseek_v3_yarn", "deepseek_v3_llama3"), PADDED),
    **dict.fromkeys(("deepseek_v2", "deepseek_v32", "glm_dsa"), PADDED),
    "mixtral_scaled": r"experts\.w2$",
    "qwen2_moe_ungated": GATED,
    "qwen3_next": f"{GATED}|{OUTPUT}",
    "qwen3_next_gated": OUTPUT,
    "qwen3_next_delta": f"{GATED}|{OUTPUT}",
}

# Random weights whose likeliest tokens repeat after a few.
LOOPS = (
    "llama3 qwen2 llama_tied_yarn arcee qwen3_tied mixtral_scaled glm4_unshared deepseek_v2".split()
)


def exported(name: str, folder: Path) -> tuple[HybridLM, Path]:
    """Return a model and its exported folder."""
    model = built(model_of(name))
    return model, written(model, folder)


def written(model: HybridLM, folder: Path) -> Path:
    """Return the exported folder of a model."""
    final, out = final_folder(folder / "run", model), folder / "out"
    assert main(["export", str(final), "--out", str(out), "--dtype", "fp32"]) == 0
    return out


@pytest.mark.parametrize("name", CASES)
def test_transformers_computes_the_same(name: str, tmp_path: Path, record_property: Record) -> None:
    model, out = exported(name, tmp_path)
    written = json.loads((out / "config.json").read_text())
    assert written["architectures"] == [f"{CASES[name][0]}ForCausalLM"]
    auto = transformers.AutoModelForCausalLM
    other, info = auto.from_pretrained(
        out, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    with torch.no_grad():
        theirs = other.eval()(IDS).logits
    ours = our_logits(model, IDS)
    assert (ours - theirs).abs().max() <= WITHIN * theirs.abs().max()
    assert theirs.std() > 0.1
    assert_equal_on_text(model, other)
    other.generation_config.eos_token_id = None
    made = other.generate(IDS[:1, :5], max_new_tokens=200, do_sample=False)[0, 5:].tolist()
    assert generate(model, [IDS[0, :5].tolist()], 200) == [made]
    assert len(set(made)) > 15 or name in LOOPS
    record_property("models equal in transformers, 200 greedy tokens too", 1)
    record_property(
        "largest relative difference of a logit",
        ((ours - theirs).abs().max() / theirs.abs().max()).item(),
    )


def test_weights_that_are_not_finite_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run saves none; a folder may be older, or somebody else's."""
    model = built(model_of("llama_tied_yarn"))
    with torch.no_grad():
        model.blocks["0"].norm.weight[2] = float("nan")
    final = final_folder(tmp_path / "run", model)
    assert main(["export", str(final), "--out", str(tmp_path / "out")]) == 4
    said = capsys.readouterr().err
    assert "1 values that are not finite" in said and "Fix: export a checkpoint from before" in said
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob("*.tmp"))


@pytest.mark.parametrize("of", ["weights", "card"])
def test_a_full_disk_is_one_line_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, of: str
) -> None:
    """A limit on the size of files stops the weights, a disk without space the model card."""
    final, out = final_folder(tmp_path / "run", built(model_of("llama_tied_yarn"))), tmp_path / "o"

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if of == "card":
        monkeypatch.setattr("megacpp.interop.export.model_card", full)
    else:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 14, before[1]))
    try:
        assert main(["export", str(final), "--out", str(out)]) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    said = capsys.readouterr().err
    why = "file too large" if of == "weights" else "no space left on device"
    assert said.count("\n") == 1, said
    assert said.startswith(f"error: out={out}: can't be written ({why}). Fix: free disk space")
    assert not out.exists() and not list(tmp_path.glob("*.tmp"))


def test_a_folder_that_cant_be_written_is_refused_before_any_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    final = final_folder(tmp_path / "run", built(model_of("llama_tied_yarn")))
    (tmp_path / "file").touch()
    for out, rule in (
        (tmp_path / "file" / "o", f"can't be made below {tmp_path / 'file'}, which is a file"),
        (tmp_path, "is there already"),
        (Path("/proc/o"), "can't be written (no such file or directory)"),
    ):
        assert main(["export", str(final), "--out", str(out)]) == 2
        said = capsys.readouterr()
        assert said.err.startswith(f"error: out={out}: {rule}. Fix: "), said.err
        assert said.out == "" or str(out).startswith("/proc")  # where root may write, by its rights


def test_a_wrong_word_is_answered_without_torch() -> None:
    code = (
        "import sys; from megacpp.cli.main import main;"
        "assert main(['export', 'no/run', '--out', 'out']) == 2 and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)


@pytest.mark.parametrize("name", CASES)
def test_a_folder_comes_back_bit_for_bit(
    name: str, tmp_path: Path, record_property: Record
) -> None:
    model, out = exported(name, tmp_path)
    place = locate(str(out), "run")
    assert read_model(place) == model.config
    back = load_model(place, model.config)
    assert not differences(dict(model_tensors(model)), dict(model_tensors(back)))
    record_property("exported folders read back bit for bit", 1)
    again = written(back, tmp_path / "b")
    for file in ("model.safetensors", "config.json"):
        assert (again / file).read_bytes() == (out / file).read_bytes(), file


@pytest.mark.parametrize("name", CASES)
def test_a_folder_without_our_key_comes_back(name: str, tmp_path: Path) -> None:
    """By the class's own keys: bit for bit, but for what the class holds in another way.

    Written again, the files are the same whatever way that is.
    """
    model, out = exported(name, tmp_path)
    values = json.loads((out / "config.json").read_text())
    del values["megacpp"]
    (out / "config.json").write_text(json.dumps(values))
    place = locate(str(out), "run")
    back = load_model(place, read_model(place))
    first, then = dict(model_tensors(model)), dict(model_tensors(back))
    other = {
        key
        for key in first.keys() | then.keys()
        if key not in first or key not in then or not torch.equal(first[key], then[key])
    }
    rule = re.compile(IN_ANOTHER_WAY.get(name, "no tensor"))
    assert other == {key for key in first.keys() | then.keys() if rule.search(key)}
    ours, theirs = our_logits(model, IDS), our_logits(back, IDS)
    assert (ours - theirs).abs().max() <= WITHIN * ours.abs().max()
    again = written(back, tmp_path / "again")
    assert (again / "model.safetensors").read_bytes() == (out / "model.safetensors").read_bytes()
    keys = json.loads((again / "config.json").read_text())
    assert keys.pop("megacpp") and keys == values


def test_progress_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In lines, as the error stream is no terminal here."""
    monkeypatch.setattr(progress, "EVERY_S", 0.0)
    _, out = exported("llama", tmp_path)
    lines = capsys.readouterr().err.splitlines()
    count = len(load_file(out / "model.safetensors"))
    wanted = [f"export: {(done + 1) / count:.0%}, " for done in range(count)]
    told = [line for line in lines if line.startswith("export: ")]
    assert [re.sub(r"\d+:\d\d left$", "", line) for line in told] == wanted
    assert any(line.startswith("verify: 100%") for line in lines)


SPELT = (
    "llama_tied_yarn llama3 qwen3_yarn olmo3_yarn glm4_partial qwen3_next_published "
    "deepseek_v3_yarn deepseek_v3_llama3"
).split()


@pytest.mark.parametrize("name", SPELT)
def test_the_spelling_of_version_4_alone_is_enough(name: str, tmp_path: Path) -> None:
    """Take `rope_parameters` away: transformers 4 and older servers read the other keys."""
    model, out = exported(name, tmp_path)
    values = json.loads((out / "config.json").read_text())
    del values["rope_parameters"], values["megacpp"]
    assert {"rope_scaling", "partial_rotary_factor"} & values.keys() and "rope_theta" in values
    (out / "config.json").write_text(json.dumps(values))
    auto = transformers.AutoModelForCausalLM
    other = auto.from_pretrained(out, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        theirs = other.eval()(IDS).logits
    place = locate(str(out), "run")
    for ours in (model, load_model(place, read_model(place))):
        assert (our_logits(ours, IDS) - theirs).abs().max() <= WITHIN * theirs.abs().max()


def test_a_routers_bias_stays_wide(tmp_path: Path) -> None:
    """A bf16 folder: choices of experts go by a bias of small steps, which transformers keeps."""
    model = built(model_of("deepseek_v3"))
    final = final_folder(tmp_path / "run", model)
    assert main(["export", str(final), "--out", str(tmp_path / "out")]) == 0
    other = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    bias = other.model.layers[0].mlp.gate.e_score_correction_bias
    assert other.dtype == torch.bfloat16 and bias.dtype == torch.float32
    assert torch.equal(bias, model.get_buffer("blocks.1.mixer.router.expert_bias"))
    place = locate(str(tmp_path / "out"), "run")
    back = load_model(place, model.config)
    for (name, t), (_, first) in zip(
        back.named_parameters(), model.named_parameters(), strict=True
    ):
        assert torch.equal(t, first.to(torch.bfloat16).float()), name
