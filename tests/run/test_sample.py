"""Generation by recurrent state equals the full forward, token by token."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megacpp.cli.main import main
from megacpp.cli.sample import SampleArgs
from megacpp.config.arguments import parse_args
from megacpp.config.schema import Config, DataConfig, ModelConfig
from megacpp.data.specials import BOS, EOS
from megacpp.data.tokenizer import CorpusTokenizer
from megacpp.errors import ConfigError
from megacpp.launch.record import write_config
from megacpp.model.hybrid import HybridLM
from megacpp.run.sample import choose, generate
from megacpp.state.checkpoint import save_checkpoint
from megacpp.state.export import export_weights
from megacpp.state.tensors import model_tensors
from tests.state.small import SMALL, build


def full_logits(model: HybridLM, ids: list[int]) -> Tensor:
    """Logits `[T, V]` of one whole forward."""
    with torch.no_grad():
        return model.head.logits(model.hidden(torch.tensor([ids])))[0]


def greedy(model: HybridLM, prompt: list[int], tokens: int) -> list[int]:
    return generate(model, prompt, tokens, temperature=0)


@pytest.mark.parametrize(
    "config",
    [
        SMALL,
        dataclasses.replace(SMALL, tie_embeddings=True, logit_softcap=5.0),
        dataclasses.replace(SMALL, depth=2, pattern="MR"),
        dataclasses.replace(
            SMALL, attention=dataclasses.replace(SMALL.attention, kind="mla"), pattern="AF", depth=2
        ),
    ],
    ids=["AEMRF", "tied-softcap", "recurrent", "mla"],
)
def test_greedy_is_the_argmax_of_the_full_forward(config: ModelConfig) -> None:
    model = wide(build(config, dtype=torch.float64))
    prompt = [3, 1, 4, 1, 5]
    ids = greedy(model, prompt, 20)
    logits_TV = full_logits(model, prompt + ids)
    assert len(ids) == 20
    assert ids == logits_TV[len(prompt) - 1 : -1].argmax(-1).tolist()
    top = logits_TV.topk(2).values
    assert (top[:, 0] - top[:, 1]).min() > 1e-9, "ties would decide by rounding"
    assert len(set(ids)) > 1, "a constant text would prove little"


def wide(model: HybridLM) -> HybridLM:
    """Larger embeddings, so that the text depends on the tokens."""
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(8.0 if p.dim() > 1 else 1.0)
    return model


def test_each_token_is_fed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(SMALL)
    fed: list[int] = []
    step = model.step

    def counted(ids_B: Tensor, state: list) -> tuple[Tensor, list]:
        fed.extend(ids_B.tolist())
        return step(ids_B, state)

    monkeypatch.setattr(model, "step", counted)
    ids = greedy(model, [7, 8, 9], 4)
    assert fed == [7, 8, 9, *ids[:3]]


def test_the_seed_decides() -> None:
    model = build(SMALL)
    texts = [tuple(generate(model, [1], 30, seed=seed)) for seed in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]
    torch.manual_seed(9)
    assert tuple(generate(model, [1], 30, seed=0)) == texts[0]


def test_stream_stop_and_limits() -> None:
    model = build(SMALL)
    heard: list[int] = []
    ids = generate(model, [1], 12, seed=3, stream=heard.append)
    assert heard == ids and len(ids) == 12
    stop = ids[5]
    assert generate(model, [1], 12, seed=3, stop_id=stop) == ids[: ids.index(stop)]
    assert generate(model, [1], 0) == []
    assert max(generate(model, [1], 50, num_ids=4)) < 4


def test_the_model_is_left_as_it_was() -> None:
    model = build(SMALL).train()
    before = {name: t.clone() for name, t in model_tensors(model).items()}
    generate(model, [1, 2], 5)
    assert model.training
    assert all(torch.equal(t, before[name]) for name, t in model_tensors(model).items())
    ids_BT = torch.arange(12).view(1, 12)
    model(ids_BT, ids_BT).loss_sum.backward()  # nothing made while sampling stops autograd


def test_temperature_and_top_k_are_the_distribution_they_say() -> None:
    logits_V = torch.tensor([1.0, 2.0, 0.5, 2.5, -1.0])
    generator = torch.Generator().manual_seed(0)
    draws, n = Counter(choose(logits_V, 0.7, 3, generator) for _ in range(4000)), 4000
    kept = [3, 1, 0]
    share = (logits_V[kept].double() / 0.7).softmax(0)
    assert set(draws) == set(kept)
    for i, p in zip(kept, share.tolist(), strict=True):
        assert abs(draws[i] - n * p) < 5 * (n * p * (1 - p)) ** 0.5  # five standard deviations
    assert choose(logits_V, 0, 0, generator) == 3
    assert choose(logits_V, 1.0, 1, generator) == 3
    assert (
        len({choose(torch.zeros(5), 1.0, 2, generator) for _ in range(50)}) == 2
    )  # ties: k all the same


@pytest.mark.parametrize(
    ("prompt", "settings", "message"),
    [
        ([], {}, "prompt=: has no token"),
        ([40], {}, "prompt=40: id 40 is outside of the 40 ids"),
        ([1], {"temperature": -0.1}, "temperature=-0.1: must be 0 or more"),
        ([1], {"temperature": float("nan")}, "temperature=nan: must be 0 or more"),
        ([1], {"top_k": -1}, "top-k=-1: must be 0 or more"),
    ],
)
def test_mistakes_are_one_line(prompt: list[int], settings: dict, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        generate(build(SMALL), prompt, 3, **settings)
    assert str(error.value).startswith(message) and "Fix: " in str(error.value)


# ---- the command --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a finished run with final weights and one checkpoint of other weights."""
    folder = tmp_path_factory.mktemp("runs") / "small"
    corpus = folder.parent / "corpus"
    corpus.mkdir()
    tokenizer = CorpusTokenizer.train([["int main() { return 0; }\n" * 3]], 280)
    tokenizer.save(corpus / "tokenizer.json")
    model_config = dataclasses.replace(SMALL, vocab_size=tokenizer.vocab_size + 3)
    config = Config(model=model_config, data=DataConfig(path=str(corpus)))
    write_config(folder, config, {})
    model = build(model_config, seed=1)
    export_weights(model, folder / "final", model_config, beside=[corpus / "tokenizer.json"])
    other = build(model_config, seed=2)
    tensors = {f"model.{name}": t for name, t in model_tensors(other).items()}
    save_checkpoint(folder / "checkpoints", 30, tensors, {}, keep=0)
    return folder


def command(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(["sample", *words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_text_and_json_agree(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = (str(run_folder), "--prompt", "int ma", "--max-tokens", "12", "--seed", "5")
    code, text, note = command(capsys, *words)
    assert code == 0 and text.startswith("int ma")
    assert "tokens/s" in note
    code, line, note = command(capsys, *words, "--json")
    report = json.loads(line)
    assert code == 0 and note == ""
    assert text == report["prompt"] + report["text"] + "\n"
    assert report["tokens_per_s"] > 0
    assert report["tokens"] <= 12 and report["ended"] == (report["tokens"] < 12)
    assert command(capsys, *words)[1] == text
    assert command(capsys, *words[:-1], "6")[1] != text


def test_the_prompt_begins_a_document(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {}

    def spy(model: HybridLM, prompt_ids: list[int], *args: object, **kwargs: object) -> list[int]:
        seen.update(kwargs, prompt=prompt_ids)
        return []

    monkeypatch.setattr("megacpp.run.sample.generate", spy)
    assert main(["sample", str(run_folder), "--prompt", "int"]) == 0
    tokenizer = CorpusTokenizer.load(run_folder / "final" / "tokenizer.json")
    assert seen["prompt"] == [BOS, *tokenizer.encode("int")]
    assert seen["stop_id"] == EOS and seen["num_ids"] == tokenizer.vocab_size


def test_a_checkpoint_instead_of_the_final_weights(
    run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (str(run_folder), "--json", "--temperature", "0", "--max-tokens", "8")
    final, step, latest = (
        json.loads(command(capsys, *words, "--checkpoint", which)[1])
        for which in ("final", "30", "latest")
    )
    assert step["text"] == latest["text"] != final["text"]
    assert step["weights"].endswith("step-000030") and final["weights"].endswith("final")


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["nowhere"], 2, "run=nowhere: no such run folder. Fix: give the folder of a run."),
        ([], 2, "run=: is needed. Fix: write RUN."),
        (["{run}", "{run}"], 2, "is not a flag. Fix: "),
        (["{run}", "--tempersture", "1"], 2, "--tempersture: no such setting. Fix: did you mean"),
        (["{run}", "--max-tokens", "many"], 2, "max_tokens=many: must be a whole number"),
        (["{run}", "--checkpoint", "7"], 2, "has no such weights. Fix: write --checkpoint 30."),
        (["{run}", "--checkpoint", "best"], 2, "checkpoint=best: must be final, latest or a step"),
        (["{run}", "--device", "tpu"], 2, "device=tpu: must be one of auto, cpu, cuda"),
        (["{run}", "--temperature", "-1"], 2, "temperature=-1.0: must be at least 0"),
    ],
)
def test_mistakes_on_the_command_line(
    run_folder: Path,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    code: int,
    message: str,
) -> None:
    result, out, err = command(capsys, *(word.format(run=run_folder) for word in words))
    assert result == code and out == ""
    assert message in err and err.startswith("error: ") and err.count("\n") == 1


def test_a_missing_gpu_is_refused(
    run_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    code, out, err = command(capsys, str(run_folder), "--device", "cuda")
    assert (code, out) == (2, "")
    assert err == "error: device=cuda: there is no GPU here. Fix: write --device auto.\n"


def test_damaged_weights_are_refused(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import shutil

    shutil.copytree(run_folder, tmp_path / "run")
    (tmp_path / "run" / "final" / "model.safetensors").write_bytes(b"")
    code, out, err = command(capsys, str(tmp_path / "run"))
    assert code == 4 and out == ""
    assert "model.safetensors: has 0 bytes instead of" in err and err.count("\n") == 1


def test_defaults() -> None:
    args = parse_args(SampleArgs, ["runs/tiny"])
    assert (args.folder, args.prompt, args.checkpoint) == (Path("runs/tiny"), "", "final")
    assert (args.max_tokens, args.temperature, args.top_k, args.seed) == (200, 0.8, 50, 0)
    assert args.device == "auto" and not args.json
