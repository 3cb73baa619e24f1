"""Corpora with somebody's `tokenizer.json`: byte-level, with blanks as `▁`, with `##` pieces."""

import json
import pickle
import shutil
from pathlib import Path
from pydoc_data import topics

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from megacpp.data import fim
from megacpp.data.batches import IGNORED
from megacpp.data.corpus import Corpus
from megacpp.data.prepare import CorpusSpec, ensure_corpus
from megacpp.data.tokenizer import CorpusTokenizer
from megacpp.errors import ConfigError, DataError
from tests.data.reading import restore

TEXTS = [str(text)[:500] for text in topics.topics.values()][:60]
TEXT = "Hello wörld, it's 漢字 — ﬁne.\n\n\tNext  line 🙂 <s>[SEP]<|endoftext|>"


def trained(inner: tokenizers.Tokenizer, trainer: object) -> tokenizers.Tokenizer:
    inner.train_from_iterator(TEXTS, trainer)  # type: ignore[arg-type]
    return inner


def gpt2(specials: tuple[str, ...] = ("<|endoftext|>",)) -> tokenizers.Tokenizer:
    """GPT-2's way: byte-level BPE, one special token."""
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    inner.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    inner.post_processor = processors.ByteLevel(trim_offsets=False)  # type: ignore[assignment]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=list(specials), initial_alphabet=alphabet
    )  # fmt: skip
    return trained(inner, trainer)


def llama() -> tokenizers.Tokenizer:
    """SentencePiece's way: blanks are `▁`, bytes of unknown letters, a blank before the text."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    inner = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    inner.normalizer = normalizers.Sequence(  # type: ignore[assignment]
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    inner.decoder = decoders.Sequence(  # type: ignore[assignment]
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    inner = trained(inner, trainers.BpeTrainer(vocab_size=900, special_tokens=names))
    state = json.loads(inner.to_str())
    state["added_tokens"] = state["added_tokens"][:3]  # bytes are ordinary tokens
    return tokenizers.Tokenizer.from_str(json.dumps(state))


def unigram() -> tokenizers.Tokenizer:
    inner = tokenizers.Tokenizer(models.Unigram())
    inner.normalizer = normalizers.NFKC()  # type: ignore[assignment]
    inner.pre_tokenizer = pre_tokenizers.Metaspace()  # type: ignore[assignment]
    inner.decoder = decoders.Metaspace()  # type: ignore[assignment]
    names = ["<pad>", "<eos>", "<unk>"]
    trainer = trainers.UnigramTrainer(vocab_size=400, special_tokens=names, unk_token="<unk>")
    return trained(inner, trainer)


def bert() -> tokenizers.Tokenizer:
    """Folds case, drops blanks, cuts at 512 ids and pads: nothing of which a corpus may keep."""
    inner = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    inner.normalizer = normalizers.BertNormalizer()  # type: ignore[assignment]
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()  # type: ignore[assignment]
    inner.decoder = decoders.WordPiece()  # type: ignore[assignment]
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    inner = trained(inner, trainers.WordPieceTrainer(vocab_size=900, special_tokens=names))
    inner.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))  # type: ignore[assignment]
    inner.enable_truncation(512)
    inner.enable_padding(length=512)
    return inner


MAKERS = {"gpt2": gpt2, "llama": llama, "unigram": unigram, "bert": bert}
MARKS = {
    "gpt2": "documents begin and end with <|endoftext|>",
    "llama": "documents begin with <s> and end with </s>",
    "unigram": "documents begin and end with <eos>",
    "bert": "documents begin with [CLS] and end with [SEP]",
}
LOSSY = ("unigram", "bert")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("tokenizers")
    for name, make in MAKERS.items():
        make().save(str(folder / f"{name}.json"))
    return {name: folder / f"{name}.json" for name in MAKERS}


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents that use capitals, several blanks and letters that no tokenizer has seen."""
    path = tmp_path_factory.mktemp("texts") / "a.jsonl"
    lines = [json.dumps({"content": f"{text}\n{TEXT} {i}"}) for i, text in enumerate(TEXTS * 11)]
    path.write_text("\n".join(lines))
    return path


@pytest.fixture(scope="module", params=MAKERS)
def made(
    request: pytest.FixtureRequest,
    files: dict[str, Path],
    records: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[str, Corpus]:
    out = tmp_path_factory.mktemp("made") / "corpus"
    spec = CorpusSpec(str(records), tokenizer=str(files[request.param]))
    return request.param, Corpus(ensure_corpus(spec, out).path, 64)


def test_documents_come_back_as_the_tokenizer_gives_them(
    made: tuple[str, Corpus], files: dict
) -> None:
    name, corpus = made
    plain = tokenizers.Tokenizer.from_file(str(files[name]))
    plain.no_truncation()
    plain.no_padding()
    plain.encode_special_tokens = True
    facts = corpus.index["tokenizer"]
    assert facts["marks"] == MARKS[name] and facts["given"] == str(files[name])
    marks = corpus.tokenizer.specials
    for number, text in zip(range(4), corpus.validation_documents(), strict=False):
        begin, *ids, end = corpus.validation.document(number).tolist()
        assert (begin, end) == (marks.bos, marks.eos)
        original = next(t for t in TEXTS if plain.decode(plain.encode(t[:60]).ids)[:50] in text)
        assert plain.decode(ids) == text and marks.eos not in ids
        assert plain.encode(original, add_special_tokens=False).ids[:40] == ids[:40]


def test_a_worker_gets_the_whole_tokenizer(files: dict[str, Path], tmp_path: Path) -> None:
    """A pickled copy encodes the same, with special tokens as text, and is saved as it came."""
    for name, path in files.items():
        one = CorpusTokenizer.load(path)
        two = pickle.loads(pickle.dumps(one))
        text = TEXT + "".join(one.special_names.values())
        assert (two.encode(text) == one.encode(text)).all()
        assert two.opening == one.opening and two.specials == one.specials
        two.save(tmp_path / f"{name}.json")
        assert (tmp_path / f"{name}.json").read_bytes() == path.read_bytes()


def test_a_lossy_tokenizer_gets_no_verdict(made: tuple[str, Corpus]) -> None:
    name, corpus = made
    held_out = corpus.validation.documents
    assert held_out >= 64
    changed = corpus.index["tokenizer"]["changed"]
    assert changed == (held_out if name in LOSSY else 0)
    words = f"the tokenizer changes {held_out} of {held_out} held-out documents"
    assert corpus.no_verdict == (words if changed else "")


def test_bytes_of_ids_add_up(made: tuple[str, Corpus]) -> None:
    """Sum the bytes of ids of lossless tokenizers: the text; llama's has a blank before it."""
    name, corpus = made
    batches = list(corpus.validation_batches(8))
    labels = [i for b in batches for i in b.labels_BT.flatten().tolist() if i != IGNORED]
    assert len(labels) == corpus.validation_targets
    assert max(labels) < corpus.vocab_size == corpus.tokenizer.vocab_size
    total, text = sum(b.target_bytes for b in batches), corpus.validation_text_bytes
    extra = {"gpt2": 0, "llama": corpus.validation.documents}.get(name)
    assert total == text + extra if extra is not None else 0.8 < total / text < 1.05


def test_two_corpora_share_one(made: tuple[str, Corpus], tmp_path: Path) -> None:
    first = made[1]
    (tmp_path / "texts").mkdir()
    for i, text in enumerate(TEXTS[:5]):
        (tmp_path / "texts" / f"{i}.txt").write_text(text)
    spec = CorpusSpec(str(tmp_path / "texts"), tokenizer=str(first.path))
    second = Corpus(ensure_corpus(spec, tmp_path / "second").path, 64)
    same = [(c.path / "tokenizer.json").read_bytes() for c in (first, second)]
    assert same[0] == same[1]
    assert first.tokenizer.specials == second.tokenizer.specials
    assert first.tokenizer.encode(TEXT).tolist() == second.tokenizer.encode(TEXT).tolist()


def test_a_learned_tokenizer_is_shared_too(
    corpus_path: Path, spec: CorpusSpec, tmp_path: Path
) -> None:
    other = CorpusSpec(spec.source, tokenizer=str(corpus_path), fim_rate=0.5, seed=7)
    made = ensure_corpus(other, tmp_path / "other")
    old = (corpus_path / "tokenizer.json").read_bytes()
    assert (made.path / "tokenizer.json").read_bytes() == old
    assert made.index["fill_in_the_middle"]["psm"] > 0
    assert "text_kind" not in made.index["tokenizer"]


def test_fill_in_the_middle_needs_its_tokens(files: dict, records: Path, tmp_path: Path) -> None:
    spec = CorpusSpec(str(records), tokenizer=str(files["gpt2"]), fim_rate=0.5)
    with pytest.raises(ConfigError) as caught:
        ensure_corpus(spec, tmp_path / "out")
    assert str(caught.value) == (
        f"fim_rate=0.5: {files['gpt2']} has no special tokens <fim_prefix> <fim_middle> "
        "<fim_suffix>. Fix: use --fim-rate 0."
    )
    # As Qwen and StarCoder spell them, and as ordinary added tokens.
    qwen = gpt2()
    names = ["<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"]
    qwen.add_tokens(names)
    qwen.save(str(tmp_path / "qwen.json"))
    tokenizer = CorpusTokenizer.load(tmp_path / "qwen.json")
    sentinels = tokenizer.specials.fim
    assert sentinels is not None
    assert [tokenizer.special_names[i] for i in sentinels] == names
    assert not set(sentinels) & set(tokenizer.encode("".join(names)).tolist())  # text stays text
    ids = fim.arrange(fim.FimParts("ab", "c", "de", False), tokenizer.encode, sentinels)
    assert tokenizer.decode(restore(ids, sentinels).tolist()) == "abcde"
    assert [i for i in ids.tolist() if i in sentinels] == [
        sentinels.prefix, sentinels.suffix, sentinels.middle
    ]  # fmt: skip


def test_which_token_ends_a_document(tmp_path: Path, files: dict) -> None:
    path = tmp_path / "tokenizer.json"
    gpt2(("<|one|>", "<|two|>")).save(str(path))
    with pytest.raises(DataError) as caught:
        CorpusTokenizer.load(path)
    assert str(caught.value) == (
        f"{path}: none of its special tokens (<|one|> <|two|>) is known to end a document. "
        "Fix: name one, --eos '<|one|>'."
    )
    named = CorpusTokenizer.load(path, eos="<|two|>")
    assert named.specials.eos == named.specials.bos == 1
    with pytest.raises(DataError, match=r"eos=<\|tow\|>: .* Fix: did you mean '<\|two\|>'\."):
        CorpusTokenizer.load(path, eos="<|tow|>")
    # Hugging Face's file beside it decides; a corpus keeps the decision in one.
    config = {"eos_token": {"content": "<|two|>"}, "bos_token": "<|one|>", "pad_token": None}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    given = CorpusTokenizer.load(path)
    assert (given.specials.bos, given.specials.eos, given.specials.pad) == (0, 1, 1)
    saved = tmp_path / "saved" / "tokenizer.json"
    saved.parent.mkdir()
    named.save(saved)
    assert CorpusTokenizer.load(saved).specials == named.specials
    shutil.copy(files["bert"], saved)
    (saved.parent / "tokenizer_config.json").write_text("[not json")
    assert CorpusTokenizer.load(saved).specials.eos == 3


def test_a_token_that_is_named_and_missing_is_refused(tmp_path: Path) -> None:
    """Another spelling in its place would end documents by a token that the weights don't know."""
    path = tmp_path / "tokenizer.json"
    gpt2(("<|endoftext|>", "</s>", "<s>")).save(str(path))
    for role, name in (("eos", "<|eot_id|>"), ("bos", "<|begin|>")):
        config = {"eos_token": "<|endoftext|>", f"{role}_token": name}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        with pytest.raises(DataError) as caught:
            CorpusTokenizer.load(path)
        assert str(caught.value).startswith(
            f"{path}: has no token {name}, which tokenizer_config.json beside it names as "
            f"{role}_token. Fix: name one there that it has ("
        )
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|eot_id|>"}))
    assert CorpusTokenizer.load(path, eos="</s>").specials.eos == 1


@pytest.mark.parametrize("specials", [(), ("<|endoftext|>",)])
def test_an_ordinary_token_that_is_named_becomes_special(
    specials: tuple[str, ...], tmp_path: Path
) -> None:
    """Transformers does so; a text that spells it stays text."""
    inner = gpt2(specials)
    inner.add_tokens(["<|im_end|>"])
    inner.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    tokenizer = CorpusTokenizer.load(tmp_path / "tokenizer.json")
    end = tokenizer.specials.eos
    assert tokenizer.inner.id_to_token(end) == "<|im_end|>"
    assert end == tokenizer.vocab_size - 1 == inner.get_vocab_size() - 1
    assert end not in tokenizer.encode("a <|im_end|>").tolist()


def test_a_tokenizer_without_special_tokens_gets_one(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    gpt2(()).save(str(path))
    tokenizer = CorpusTokenizer.load(path)
    assert tokenizer.special_names == {tokenizer.vocab_size - 1: "<|endoftext|>"}
    ids = np.append(tokenizer.encode(TEXT), tokenizer.specials.eos)
    assert tokenizer.decode(ids.tolist()) == TEXT


@pytest.mark.parametrize("name", ["nowhere", "folder", "text.json"])
def test_what_is_no_tokenizer(name: str, tmp_path: Path, records: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "text.json").write_text("not json")
    with pytest.raises(
        DataError, match=r"tokenizer=.*: (no such file|is not a tokenizer).*Fix: "
    ) as caught:
        ensure_corpus(CorpusSpec(str(records), tokenizer=str(tmp_path / name)), tmp_path / "out")
    assert "\n" not in str(caught.value) and not (tmp_path / "out").exists()


def test_no_start_token_is_taken_where_the_configuration_has_null(
    tmp_path: Path, files: dict[str, Path]
) -> None:
    """The model was trained without one, although the tokenizer has a token of that name."""
    path = tmp_path / "tokenizer.json"
    shutil.copy(files["llama"], path)
    for config, bos in (({"eos_token": "</s>"}, 1), ({"eos_token": "</s>", "bos_token": None}, 2)):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"legacy": False}))
        tokenizer = CorpusTokenizer.load(path)
        assert (tokenizer.specials.bos, tokenizer.specials.eos) == (bos, 2)


def test_padding_that_the_tokenizer_lacks_is_that_of_the_corpus(
    tmp_path: Path, files: dict[str, Path]
) -> None:
    """transformers would add it as a new id, for which the weights have no row."""
    transformers = pytest.importorskip("transformers")
    (tmp_path / "saved").mkdir()
    path, saved = tmp_path / "tokenizer.json", tmp_path / "saved" / "tokenizer.json"
    shutil.copy(files["llama"], path)
    config = {"eos_token": "</s>", "pad_token": "<pad>", "legacy": False}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = CorpusTokenizer.load(path)
    tokenizer.save(saved)
    kept = json.loads((saved.parent / "tokenizer_config.json").read_text())
    assert kept == config | {"pad_token": "</s>"} and tokenizer.specials.pad == 2
    theirs = transformers.AutoTokenizer.from_pretrained(saved.parent)
    assert theirs.pad_token_id == 2 and len(theirs) == tokenizer.vocab_size
