"""Chat templates: whose they are, how they are read, which of their answers are learned."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from megacpp.data.conversations import DATED, ONLY_LAST, SIMPLE, ChatTemplate
from megacpp.data.corpus import Corpus
from megacpp.data.prepare import CorpusSpec, ensure_corpus
from megacpp.data.tokenizer import CorpusTokenizer
from megacpp.errors import DataError
from megacpp.interop.tokenizer import write_tokenizer
from tests.data.chats import CHATML, TALK, chatml_folder


@pytest.fixture(scope="module")
def chatml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chatml_folder(tmp_path_factory.mktemp("chatml"))


def test_a_template_of_the_tokenizer_is_read_as_transformers_reads_it(
    source: Path, chatml: Path, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    spec = CorpusSpec(str(source), tokenizer=str(chatml), validation_fraction=0.1)
    corpus = Corpus(ensure_corpus(spec, tmp_path / "corpus").path, 64)
    write_tokenizer(corpus.tokenizer, tmp_path, 64)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    template = ChatTemplate(corpus.tokenizer)
    talk = [{**one, "content": one["content"].replace("<|im_end|>", "")} for one in TALK]
    both = theirs.apply_chat_template(talk, return_assistant_tokens_mask=True, return_dict=True)
    ids, learned = template.encode([talk])[0]
    assert ids.tolist() == both["input_ids"] and learned.tolist() == both["assistant_masks"]
    prompt = theirs.apply_chat_template(talk[:2], add_generation_prompt=True, return_dict=True)
    assert template.prompt_ids(talk[:2]) == prompt["input_ids"]
    assert template.end == theirs.convert_tokens_to_ids("<|im_end|>")


ASKS = "{{ NAME is defined }} {{ NAME is none }}{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.mark.parametrize("name", ["tools", "documents"])
def test_what_a_talk_lacks_is_none_as_for_transformers(
    name: str, chatml: Path, tmp_path: Path
) -> None:
    """Templates ask whether it is none, or defined, before they write what comes of it."""
    transformers = pytest.importorskip("transformers")
    tokenizer = CorpusTokenizer.load(chatml / "tokenizer.json")
    tokenizer.template = ASKS.replace("NAME", name)
    tokenizer.save(tmp_path / "tokenizer.json")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    found = ChatTemplate(tokenizer).render(TALK[1:3])
    assert found.startswith("True True")
    assert theirs.apply_chat_template(TALK[1:2], tokenize=False)[:9] == found[:9]


BEGINS = "{{ bos_token }}{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"


@pytest.mark.parametrize("template", [BEGINS, SIMPLE])
@pytest.mark.parametrize("bos", [None, "<|im_start|>"])
def test_a_talk_begins_as_for_transformers(
    template: str, bos: str | None, chatml: Path, tmp_path: Path
) -> None:
    """Without a start token in the configuration a template writes none, not the end token."""
    transformers = pytest.importorskip("transformers")
    config = {"bos_token": bos, "eos_token": "<|endoftext|>", "model_max_length": 64}
    shutil.copy(chatml / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = CorpusTokenizer.load(tmp_path / "tokenizer.json")
    tokenizer.template = template
    (tmp_path / "out").mkdir()
    write_tokenizer(tokenizer, tmp_path / "out", 64)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    talk = [{"role": role, "content": role} for role in ("user", "assistant")]
    wanted = theirs.apply_chat_template(talk, tokenize=False)
    assert wanted.startswith("user" if bos is None else "<|im_start|>user")
    for one in (tokenizer, CorpusTokenizer.load(tmp_path / "out" / "tokenizer.json")):
        assert ChatTemplate(one).render(talk) == wanted


def test_a_template_file_goes_before_the_configuration(chatml: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(chatml, tmp_path / "named"))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = [
        {"name": "tools", "template": "x"},
        {"name": "default", "template": "y"},
    ]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    assert CorpusTokenizer.load(folder / "tokenizer.json").template == "y"
    (folder / "chat_template.jinja").write_text("z")
    assert CorpusTokenizer.load(folder / "tokenizer.json").template == "z"


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{% if %}", "isn't valid Jinja"),
        ("{{ raise_exception('no\nsystem') }}", r"refuses the conversation '1' \(no system\)"),
        (
            "{% for m in messages %}{{ m.role + m.content }}"
            "{{ messages | length if messages[0].role == 'system' }}{% endfor %}",
            "writes message 3 of the conversation 'Be brief.' another way once more follow",
        ),
    ],
)
def test_a_template_that_does_not_fit_is_named(chatml: Path, template: str, said: str) -> None:
    tokenizer = CorpusTokenizer.load(chatml / "tokenizer.json")
    tokenizer.template = template
    with pytest.raises(DataError, match=said):
        ChatTemplate(tokenizer).encode([TALK])


# As Qwen3's: an answer has thoughts, here empty ones, until a question follows.
THINKS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ '<think></think>' if m.role == 'assistant' and loop.last }}{{ m.content }}<|im_end|>\n"
    "{% endfor %}{{ '<|im_start|>assistant\n' if add_generation_prompt }}"
)


def test_the_last_answer_is_learned_if_the_template_changes_earlier_ones(chatml: Path) -> None:
    tokenizer = CorpusTokenizer.load(chatml / "tokenizer.json")
    tokenizer.template = THINKS
    template = ChatTemplate(tokenizer)
    assert template.notes == [ONLY_LAST]
    two = [{"role": role, "content": text} for text in "ab" for role in ("user", "assistant")]
    ((ids, learned), (one, all_of_it)) = template.encode([two, two[:2]])
    assert tokenizer.decode(ids[learned > 0].tolist()) == "<think></think>b"
    assert tokenizer.decode(one[all_of_it > 0].tolist()) == "<think></think>a"
    with pytest.raises(DataError, match="another way once more follow"):
        template.encode([[*two, two[0]]])  # nothing is left to learn


def test_a_template_writes_the_date(chatml: Path) -> None:
    """Write today's date, as transformers does, unless the template has one of its own."""
    tokenizer, asks = CorpusTokenizer.load(chatml / "tokenizer.json"), "{{ strftime_now('%Y') }}"
    tokenizer.template = asks + CHATML
    template = ChatTemplate(tokenizer)
    assert template.notes == [DATED] and re.match(r"\d{4}<", template.render(TALK))
    tokenizer.template = "{% if strftime_now is defined %}" + asks + "{% else %}2024{% endif %}"
    template = ChatTemplate(tokenizer)
    assert template.notes == [] and template.render(TALK) == "2024"
