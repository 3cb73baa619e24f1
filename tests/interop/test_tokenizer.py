"""Tokenizers of published folders leave as they came: the same files, the same ids."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import processors

from megacpp.cli.main import main
from megacpp.data.corpus import Corpus
from megacpp.data.prepare import CorpusSpec, ensure_corpus
from megacpp.data.specials import config_values
from megacpp.data.tokenizer import CorpusTokenizer
from megacpp.data.words import Kind
from megacpp.interop.tokenizer import write_tokenizer
from megacpp.state.export import export_weights
from tests.data.test_given_tokenizer import TEXTS, gpt2
from tests.interop.models import built, final_folder
from tests.model.small import small

transformers = pytest.importorskip("transformers")

TEXT = "Hello wörld <|endoftext|>\n\n  <|im_start|>user 漢字<|im_end|>\tit's"
END = {"__type": "AddedToken", "content": "<|endoftext|>", "lstrip": False, "special": True}
CHAT = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>\n{% endfor %}"
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen": {  # a base model: no start token
        "add_prefix_space": False,
        "bos_token": None,
        "chat_template": CHAT,
        "clean_up_tokenization_spaces": False,
        "eos_token": END,
        "errors": "replace",
        "model_max_length": 131072,
        "pad_token": "<|endoftext|>",
        "split_special_tokens": False,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": None,
    },
    "llama3": {  # its post-processor puts a start token in front
        "bos_token": "<|begin_of_text|>",
        "eos_token": "<|end_of_text|>",
        "model_max_length": 8192,
        "tokenizer_class": "PreTrainedTokenizerFast",
    },
}


def written(name: str, folder: Path) -> Path:
    """Write a tokenizer as a family publishes it; return the folder."""
    folder.mkdir()
    names = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|end_of_text|>")
    inner = gpt2(names[:3] if name == "qwen" else names)
    if name == "llama3":
        begin = processors.TemplateProcessing(
            single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", 3)]
        )
        inner.post_processor = begin  # type: ignore[assignment]
    inner.save(str(folder / "tokenizer.json"), pretty=True)
    text = json.dumps(CONFIGS[name], indent=2)  # without a line break at the end
    (folder / "tokenizer_config.json").write_text(text)
    return folder


def corpus_of(given: Path, home: Path) -> Corpus:
    (home / "texts").mkdir()
    for i, text in enumerate(TEXTS[:5]):
        (home / "texts" / f"{i}.txt").write_text(text)
    spec = CorpusSpec(str(home / "texts"), tokenizer=str(given))
    return Corpus(ensure_corpus(spec, home / "corpus").path, 64)


def exported(corpus: Path, home: Path, to: str = "hf") -> Path:
    """Return the folder of a model with a corpus's tokenizer, exported as a run's is."""
    ids = CorpusTokenizer.load(corpus / "tokenizer.json").vocab_size
    model = built(small("AFAF", dim=24, vocab_size=ids))
    beside = tuple(corpus / name for name in ("tokenizer.json", "tokenizer_config.json"))
    export_weights(model, home / "final", model.config, beside=beside, step=1)
    command = ["export", str(home / "final"), "--out", str(home / "out"), "--dtype", "fp32"]
    assert main([*command, "--to", to]) == 0
    return home / "out"


@pytest.mark.parametrize("name", CONFIGS)
def test_files_and_ids_are_those_that_came_in(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    came = written(name, tmp_path / "came")
    left = exported(corpus_of(came, tmp_path).path, tmp_path)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        assert (left / file).read_bytes() == (came / file).read_bytes(), file
    auto = transformers.AutoTokenizer
    first, then = auto.from_pretrained(came), auto.from_pretrained(left)
    opening = list(CorpusTokenizer.load(left / "tokenizer.json").opening)
    assert opening == ([3] if name == "llama3" else [])
    for text in (*TEXTS, TEXT, "", " "):
        ids = first(text)["input_ids"]
        assert then(text)["input_ids"] == ids
        assert opening + first(text, add_special_tokens=False)["input_ids"] == ids
    card = (left / "README.md").read_text()
    assert ("puts the start of a document in front" in card) == (name == "llama3")
    assert ("began with `<|endoftext|>`" in card) == (name == "qwen")
    assert "llama.cpp" not in card + capsys.readouterr().out, "it knows published vocabularies"


@pytest.mark.parametrize(
    ("template", "ends"),
    [
        (CHAT, [2, 0]),
        (CHAT.replace("<|im_end|>", "{{ eos_token }}"), 0),
        ("{{ raise_exception('no') }}", 0),
        ("", 0),
    ],
)
def test_generation_ends_where_the_chat_template_ends_an_answer(
    template: str, ends: int | list[int], tmp_path: Path
) -> None:
    came = written("qwen", tmp_path / "came")
    config = json.dumps({**CONFIGS["qwen"], "chat_template": template})
    (came / "tokenizer_config.json").write_text(config)
    folder = exported(corpus_of(came, tmp_path).path, tmp_path)
    assert transformers.GenerationConfig.from_pretrained(folder).eos_token_id == ends
    assert transformers.AutoConfig.from_pretrained(folder).eos_token_id == 0


@pytest.mark.parametrize("to", ["hf", "hf-code"])
def test_llama_cpp_does_not_know_a_learned_vocabulary(
    to: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Folders with code are none of its models."""
    final = final_folder(tmp_path / "run", built(small("AFAF", dim=24, vocab_size=300)))
    assert main(["export", str(final), "--out", str(tmp_path / "out"), "--to", to]) == 0
    said = " ".join(capsys.readouterr().out.split())
    card = " ".join((tmp_path / "out" / "README.md").read_text().split())
    for text in (said, card):
        assert ("llama.cpp doesn't know vocabularies that megacpp learned" in text) == (to == "hf")


@pytest.mark.parametrize("name", CONFIGS)
def test_a_folder_is_sampled_with_its_own_tokenizer(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Greedy text equals that of transformers, which opens a prompt as the tokenizer says."""
    folder = exported(corpus_of(written(name, tmp_path / "came"), tmp_path).path, tmp_path)
    capsys.readouterr()
    prompt = "The import statement"
    words = ["sample", str(folder), "--prompt", prompt, "--temperature", "0", "--json"]
    assert main([*words, "--max-tokens", "30", "--device", "cpu"]) == 0
    found = json.loads(capsys.readouterr().out)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    made = model.generate(ids, max_new_tokens=30, do_sample=False)[0, ids.shape[1] :]
    assert found["text"] == tokenizer.decode(made, skip_special_tokens=True)
    assert len(set(made.tolist())) > 5
    assert main(["sample", str(folder), "--max-tokens", "3", "--device", "cpu"]) == 0
    assert main([*words, "--checkpoint", "latest"]) == 2
    assert "has no such weights" in capsys.readouterr().err
    (folder / "tokenizer.json").unlink()
    assert main(words) == 2
    assert "has no tokenizer.json. Fix: fetch tokenizer.json and" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["code", "prose"])
def test_an_exported_vocabulary_is_read_back_with_the_same_ids(kind: Kind, tmp_path: Path) -> None:
    """Its post-processor opens a text, and no word of it."""
    first, texts = CorpusTokenizer.train([TEXTS], 400, kind), [*TEXTS, TEXT, "int x = 1;", ""]
    wanted = [ids.tolist() for ids in first.encode_many(texts)]
    write_tokenizer(first, tmp_path, 64)
    again = CorpusTokenizer.load(tmp_path / "tokenizer.json")
    assert again.inner.post_processor is not None
    assert again.opening == first.opening == (first.specials.bos,)
    assert [ids.tolist() for ids in again.encode_many(texts)] == wanted


def test_another_end_of_documents_is_written(tmp_path: Path) -> None:
    """Named by hand, it takes the place of the end that came in; all else stays."""
    came = written("qwen", tmp_path / "came")
    tokenizer = CorpusTokenizer.load(came / "tokenizer.json", eos="<|im_end|>")
    (tmp_path / "saved").mkdir()
    tokenizer.save(tmp_path / "saved" / "tokenizer.json")
    values = config_values((tmp_path / "saved" / "tokenizer_config.json").read_text())
    assert values == {**CONFIGS["qwen"], "eos_token": "<|im_end|>"}
    again = CorpusTokenizer.load(tmp_path / "saved" / "tokenizer.json")
    assert again.specials == tokenizer.specials and again.template == CHAT


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_post_processor_alone_opens_a_text(name: str, told: bool, tmp_path: Path) -> None:
    came = written(name, tmp_path / "came")
    values = {**CONFIGS[name], "bos_token": "<|im_start|>", "add_bos_token": told}
    if name == "llama3":
        values["bos_token"] = CONFIGS[name]["bos_token"]
    (came / "tokenizer_config.json").write_text(json.dumps(values))
    theirs = transformers.AutoTokenizer.from_pretrained(came)
    opening = list(CorpusTokenizer.load(came / "tokenizer.json").opening)
    assert opening == ([3] if name == "llama3" else [])
    ids = theirs(TEXT, add_special_tokens=False)["input_ids"]
    assert theirs(TEXT)["input_ids"] == opening + ids
