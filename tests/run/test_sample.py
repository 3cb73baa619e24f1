"""Generation by recurrent state equals the full forward, token by token."""

from __future__ import annotations

import dataclasses
import io
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

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
from megacpp.model import decoding
from megacpp.model.hybrid import HybridLM
from megacpp.run import sample
from megacpp.run.sample import Sampling, choose, generate
from megacpp.run.text_stream import TextStream
from megacpp.state.checkpoint import save_checkpoint
from megacpp.state.export import export_weights
from megacpp.state.tensors import model_tensors
from tests.state.small import SMALL, build


def full_logits(model: HybridLM, ids: list[int]) -> Tensor:
    """Logits `[T, V]` of one whole forward."""
    with torch.no_grad():
        return model.head.logits(model.hidden(torch.tensor([ids])))[0]


def greedy(model: HybridLM, prompt: list[int], tokens: int) -> list[int]:
    return generate(model, [prompt], tokens)[0]


def sampled(model: HybridLM, tokens: int, seed: int = 0, **more: Any) -> list[int]:
    return generate(model, [[1]], tokens, Sampling(seed=seed), **more)[0]


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


def test_a_prompt_is_read_once_and_each_new_token_is_fed_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = build(SMALL)
    fed: list[Any] = []
    step, prefill = decoding.decode, decoding.prefill

    def counted(model: HybridLM, ids_B: Tensor, state: list) -> tuple[Tensor, list]:
        fed.extend(ids_B.tolist())
        return step(model, ids_B, state)

    def read(model: HybridLM, ids_BT: Tensor) -> tuple[Tensor, list]:
        fed.extend(ids_BT.tolist())
        return prefill(model, ids_BT)

    monkeypatch.setattr(sample, "decode", counted)
    monkeypatch.setattr(decoding, "prefill", read)
    ids = greedy(model, [7, 8, 9], 4)
    assert fed == [[7, 8, 9], *ids[:3]]


def test_prompts_of_any_lengths_go_on_together_as_alone() -> None:
    model = wide(build(SMALL, dtype=torch.float64))
    prompts = [[3, 1, 4, 1, 5], [9], [2, 6, 5, 3, 5], [8, 9, 7, 9, 3, 2, 3, 8]]
    settings = Sampling(temperature=0.9, top_p=0.95, repetition_penalty=1.3, seed=4)
    alone = [
        generate(model, [prompt], 24, dataclasses.replace(settings, seed=4 + row))[0]
        for row, prompt in enumerate(prompts)
    ]
    heard: list[list[int]] = [[], [], [], []]
    together = generate(model, prompts, 24, settings, stream=lambda row, i: heard[row].append(i))
    assert together == alone == heard
    stop = alone[2][7]  # some rows end early, and leave
    ended = [ids[: ids.index(stop)] if stop in ids else ids for ids in alone]
    assert generate(model, prompts, 24, settings, stop_id=stop) == ended
    assert len({len(ids) for ids in ended}) > 1
    few = generate(model, prompts, 24, settings, finished=lambda row, ids: len(ids) > row)
    assert few == [ids[: row + 1] for row, ids in enumerate(alone)]


def test_the_seed_decides() -> None:
    model = build(SMALL)
    texts = [tuple(sampled(model, 30, seed)) for seed in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]
    torch.manual_seed(9)
    assert tuple(sampled(model, 30)) == texts[0]


def test_stream_stop_and_limits() -> None:
    model = build(SMALL)
    heard: list[int] = []
    ids = sampled(model, 12, 3, stream=lambda row, i: heard.append(i))
    assert heard == ids and len(ids) == 12
    stop = ids[5]
    assert sampled(model, 12, 3, stop_id=stop) == ids[: ids.index(stop)]
    assert generate(model, [[1], [2]], 0) == [[], []]
    assert max(sampled(model, 50, num_ids=4)) < 4


def test_the_model_is_left_as_it_was() -> None:
    model = build(SMALL).train()
    before = {name: t.clone() for name, t in model_tensors(model).items()}
    generate(model, [[1, 2]], 5)
    assert model.training
    assert all(torch.equal(t, before[name]) for name, t in model_tensors(model).items())
    ids_BT = torch.arange(12).view(1, 12)
    model(ids_BT, ids_BT).loss_sum.backward()  # nothing made while sampling stops autograd


def test_temperature_and_top_k_are_the_distribution_they_say() -> None:
    logits_V = torch.tensor([1.0, 2.0, 0.5, 2.5, -1.0])
    generator = torch.Generator().manual_seed(0)
    draws, n = Counter(choose(logits_V, Sampling(0.7, 3), generator) for _ in range(4000)), 4000
    kept = [3, 1, 0]
    share = (logits_V[kept].double() / 0.7).softmax(0)
    assert set(draws) == set(kept)
    for i, p in zip(kept, share.tolist(), strict=True):
        assert abs(draws[i] - n * p) < 5 * (n * p * (1 - p)) ** 0.5  # five standard deviations
    assert choose(logits_V, Sampling(0), generator) == 3
    assert choose(logits_V, Sampling(1.0, 1), generator) == 3
    ties = {choose(torch.zeros(5), Sampling(1.0, 2), generator) for _ in range(50)}
    assert len(ties) == 2  # k all the same


def test_top_p_min_p_and_the_penalty_cut_what_they_say() -> None:
    generator = torch.Generator().manual_seed(0)
    share = torch.tensor([0.1, 0.4, 0.05, 0.3, 0.15])

    def drawn(sampling: Sampling, so_far: tuple[int, ...] = ()) -> set[int]:
        return {choose(share.log(), sampling, generator, so_far) for _ in range(400)}

    assert drawn(Sampling()) == {0, 1, 2, 3, 4}
    assert drawn(Sampling(top_p=0.7)) == {1, 3}  # 0.4 + 0.3 reach it
    assert drawn(Sampling(top_p=0.71)) == {1, 3, 4}
    assert drawn(Sampling(top_p=1e-9)) == {1}
    assert drawn(Sampling(min_p=0.3)) == {1, 3, 4}  # at least 0.12
    assert drawn(Sampling(top_k=4, top_p=0.99, min_p=0.7)) == {1, 3}
    assert drawn(Sampling(temperature=0, repetition_penalty=2.0), (1,)) == {3}
    logits = torch.tensor([2.0, -1.0, 1.5])  # divided above zero, multiplied below
    assert choose(logits, Sampling(0, repetition_penalty=1.5), generator, (0,)) == 2
    assert choose(-logits, Sampling(0, repetition_penalty=3.0), generator, (1, 7)) == 1


@pytest.mark.parametrize(
    ("prompt", "settings", "message"),
    [
        ([], {}, "prompt=: has no token"),
        ([40], {}, "prompt=40: id 40 is outside of the 40 ids"),
        ([1], {"temperature": -0.1}, "temperature=-0.1: must be 0 or more"),
        ([1], {"temperature": float("nan")}, "temperature=nan: must be 0 or more"),
        ([1], {"top_k": -1}, "top-k=-1: must be 0 or more"),
        ([1], {"top_p": 0.0}, "top-p=0.0: must be above 0 and at most 1"),
        ([1], {"min_p": 1.5}, "min-p=1.5: must be from 0 to 1"),
        ([1], {"repetition_penalty": 0.0}, "repetition-penalty=0.0: must be above 0"),
    ],
)
def test_mistakes_are_one_line(prompt: list[int], settings: dict, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        generate(build(SMALL), [prompt], 3, Sampling(**settings))
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


def test_a_text_cant_control_the_terminal(
    run_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = (str(run_folder), "--prompt", "a\x1b[2J\t\x9b\x7f", "--max-tokens", "1")
    assert command(capsys, *words)[1].startswith("a\x1b[2J\t\x9b\x7f"), "a file has it as it is"
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdout", terminal)
    assert main(["sample", *words]) == 0
    assert terminal.getvalue().startswith("a\u241b[2J\t\ufffd\u2421")


def test_the_prompt_begins_a_document(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {}

    def spy(model: HybridLM, prompts: Any, *args: object, **kwargs: object) -> list[list[int]]:
        seen.update(kwargs, prompts=prompts)
        return [[]]

    monkeypatch.setattr("megacpp.run.text_stream.generate", spy)
    assert main(["sample", str(run_folder), "--prompt", "int"]) == 0
    tokenizer = CorpusTokenizer.load(run_folder / "final" / "tokenizer.json")
    assert seen["prompts"] == [[BOS, *tokenizer.encode("int")]]
    assert seen["stop_id"] == EOS and seen["num_ids"] == tokenizer.vocab_size


def test_more_tokens_than_attention_learned_are_noted(
    run_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megacpp.run.text_stream.generate", lambda *_, **more: [[]])
    most = SMALL.attention.max_seq_len
    for tokens, noted in ((most - 2, False), (most, True)):
        note = command(capsys, str(run_folder), "--prompt", "i", "--max-tokens", str(tokens))[2]
        assert ("model.attention.max_seq_len" in note) == noted
        assert (f"{most + 2:,} tokens are more than" in note) == noted


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
        ([], 2, "run=: is needed: folder or URL of the run, or of Hugging"),
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
    assert (args.run, args.prompt, args.checkpoint) == ("runs/tiny", "", "final")
    assert (args.max_tokens, args.temperature, args.top_k, args.seed) == (200, 0.8, 50, 0)
    assert args.device == "auto" and not args.json


# ---- several prompts, stops ---------------------------------------------------------------------


def test_a_stop_string_ends_the_text_and_is_never_shown() -> None:
    tokenizer = CorpusTokenizer.train([["int main() { return 0; }\n" * 3]], 280)
    ids = [int(i) for i in tokenizer.encode("int main() { retur return 0; } ∑")]
    for stops in ([], ["return 0"], ["retur r"], ["0; } ?"], ["∑"], ["x", " {", "main"]):
        stream = TextStream(tokenizer, stops)
        shown = "".join(stream.feed(i) for i in ids) + stream.end()
        whole = "int main() { retur return 0; } ∑"
        cuts = [whole.index(stop) for stop in stops if stop in whole]
        assert shown == stream.text == whole[: min(cuts, default=len(whole))]
        assert stream.ended == bool(cuts)
    half = TextStream(tokenizer)
    parts = [half.feed(int(i)) for i in tokenizer.encode("∑")[:-1]]
    assert parts == [""] * len(parts) and half.end() == "\ufffd"


def test_prompts_of_a_file(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = ["int main()", "return", "{ return 0; }", "int"]
    (tmp_path / "p.txt").write_text("\n".join(prompts) + "\n\n")
    marked = "\ufeff" + "".join(json.dumps({"prompt": p}) + "\n" for p in prompts)  # as on Windows
    (tmp_path / "p.jsonl").write_text(marked)
    words = [str(run_folder), "--max-tokens", "9", "--top-p", "0.9", "--seed", "3"]
    found = []
    for name, batch in (("p.txt", "16"), ("p.jsonl", "3")):
        file = ["--prompts", str(tmp_path / name), "--batch", batch, "--json"]
        code, out, _ = command(capsys, *words, *file)
        assert code == 0
        found.append([json.loads(line)["text"] for line in out.splitlines()])
    alone = [
        json.loads(command(capsys, *words[:-1], str(3 + n), "--prompt", p, "--json")[1])["text"]
        for n, p in enumerate(prompts)
    ]
    assert found[0] == found[1] == alone
    code, out, note = command(capsys, *words, "--prompts", str(tmp_path / "p.txt"))
    assert out.startswith(f"---- 1 of 4 ----\nint main(){alone[0]}\n---- 2 of 4 ----\n")
    assert "tokens/s" in note


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--prompts", "nowhere"], "prompts=nowhere: can't be read (No such file or directory)"),
        (["--prompts", "{run}/empty"], "has no line. Fix: write one prompt a line."),
        (["--prompts", "{run}/bad.jsonl"], "line 2 isn't an object with a text `prompt`"),
        (["--prompts", "{run}/half.jsonl"], "line 1 isn't an object with a text `prompt`"),
        (["--prompts", "x", "--prompt", "y"], "prompts=x: is given beside --prompt"),
        (["--stop", "[1]"], "stop=[1]: must be texts that aren't empty"),
        (["--top-p", "0"], "top_p=0.0: must be in (0, 1]"),
        (["--batch", "0"], "batch=0: must be at least 1"),
    ],
)
def test_wrong_prompts_and_stops(
    run_folder: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    (run_folder / "empty").write_text("\n \n")
    (run_folder / "bad.jsonl").write_text('{"prompt": "a"}\n{"text": "b"}\n')
    (run_folder / "half.jsonl").write_text('{"prompt": "\\ud800"}\n')  # of a surrogate pair
    given = [word.format(run=run_folder) for word in words]
    code, out, err = command(capsys, str(run_folder), *given)
    assert (code, out) == (2, "") and message in err and err.count("\n") == 1
