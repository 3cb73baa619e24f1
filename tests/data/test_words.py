"""Code or prose, and how well each kind of words serves texts of several scripts."""

import random
import sys
from pathlib import Path
from pydoc_data import topics

import pytest
import torch

from megacpp.data.tokenizer import CorpusTokenizer
from megacpp.data.words import Kind, text_kind
from tests.data.test_tokenizer import random_texts

# Sentences of each script; a corpus draws them in random order with random numbers.
SCRIPTS = {
    "English": "It's the reader's time that counts; don't waste it. They've read enough.",
    "German": "Der größte Baum stand am Ufer. Überall lagen Äste, und die Straße war naß.",
    "Chinese": "语言模型根据前面的文字预测后面的文字。训练需要大量的数据,也需要很长的时间。",
    "Japanese": "言語モデルは、前の文字から次の文字を予測します。データがたくさん必要です。",
    "Hindi": "भाषा मॉडल पिछले शब्दों से अगले शब्द का अनुमान लगाता है। इसे बहुत सारा पाठ चाहिए।",
    "Arabic": "يتنبأ النموذج اللغوي بالكلمة التالية من الكلمات السابقة. إِنَّهُ يحتاج إلى نصوص كثيرة.",
    "Thai": "แบบจำลองภาษาทำนายคำถัดไปจากคำก่อนหน้า การฝึกต้องใช้ข้อความจำนวนมาก",
    "Korean": "언어 모델은 앞의 글자에서 다음 글자를 예측한다. 많은 글이 필요하다.",
    "Russian": "Языковая модель предсказывает следующее слово. Ей нужно много текста.",
    "Emoji": "Well done 👩‍👩‍👧 🎉🎉! See you ❤️ — soon… 🇫🇷 👍🏽 «ça va»?",
}


def license_text() -> str:
    """Licences and notices that ship with torch."""
    folder = next(Path(torch.__file__).parents[1].glob("torch-*.dist-info"))
    return "\n".join(p.read_text(errors="ignore") for p in sorted(folder.rglob("LICENSE*")))


def stdlib() -> str:
    folder = Path(random.__file__).parent
    return "\n".join((folder / f"{n}.py").read_text() for n in ("random", "ast", "argparse"))


def header() -> str:
    return (Path(torch.__file__).parent / "include/c10/util/BFloat16.h").read_text()


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (license_text(), "prose"),
        (str(topics.topics["compound"]), "prose"),
        ("\n".join(SCRIPTS.values()), "prose"),
        (header(), "code"),
        (stdlib(), "code"),
        ("function f(x) { return x.map((y) => y[0]); }\n" * 9, "code"),
    ],
    ids=["licences", "reference", "scripts", "C++", "Python", "JavaScript"],
)
def test_the_kind_of_a_text(text: str, kind: Kind) -> None:
    found, why = text_kind([text])
    assert found == kind and f"of {len(text):,} characters" in why


def test_of_long_texts_the_start_decides() -> None:
    def texts():
        yield "x" * 2_000_000
        raise AssertionError("enough was seen")

    assert text_kind(texts())[0] == "prose"


def bytes_a_token(train: str, held_out: str, kind: Kind, vocab_size: int = 2000) -> float:
    tokenizer = CorpusTokenizer.train([[train]], vocab_size, kind)
    ids = tokenizer.encode(held_out)
    assert tokenizer.decode(ids.tolist()) == held_out
    return len(held_out.encode()) / len(ids)


@pytest.mark.parametrize("text", [license_text(), "\n\n".join(topics.topics.values())])
def test_prose_needs_fewer_tokens_with_words_of_prose(text: str) -> None:
    """Real English: licences, and Python's reference manual."""
    lines = text.split("\n")
    train, held_out = "\n".join(lines[::2]), "\n".join(lines[1::2])
    code, prose = (bytes_a_token(train, held_out, kind) for kind in ("code", "prose"))
    assert prose > code


@pytest.mark.parametrize("script", ["Hindi", "Thai", "Arabic", "Korean", "German"])
def test_words_with_combining_marks_stay_whole(script: str) -> None:
    """Check that a vowel sign is part of its word."""
    text = SCRIPTS[script]
    splitter = CorpusTokenizer.train([[text]], 300, "prose").inner.pre_tokenizer
    assert splitter is not None
    pieces = {text[a:b].strip() for _, (a, b) in splitter.pre_tokenize_str(text)}
    assert pieces >= {word.strip(".,।،") for word in text.split()}


def test_punctuation_of_a_script_is_not_glued_to_its_words() -> None:
    """Check that prose splits `时间。训练` at the full stop, where code makes one word of it."""
    chinese = SCRIPTS["Chinese"]
    prose = CorpusTokenizer.train([[chinese]], 300, "prose").inner.pre_tokenizer
    assert prose is not None
    cuts = {chinese[a:b] for _, (a, b) in prose.pre_tokenize_str(chinese)}
    assert "语言模型根据前面的文字预测后面的文字" in cuts and ",也需要很长的时间" in cuts


@pytest.mark.parametrize("kind", ["code", "prose"])
def test_any_text_comes_back(kind: Kind) -> None:
    tokenizer = CorpusTokenizer.train([list(SCRIPTS.values())], 600, kind)
    odd = [
        "",
        " ",
        "\r\n \t\x00",
        "a" * 1000,
        "मॉ" * 400,
        "<eos>",
        "\ufeffx",
        "e\u0301\u0301",
        "1234567",
    ]
    texts = [*SCRIPTS.values(), *odd, *random_texts(300)]
    everything = "".join(chr(i) for i in range(0, sys.maxunicode, 97) if not 0xD800 <= i < 0xE000)
    for text, ids in zip(texts, tokenizer.encode_many(texts), strict=True):
        assert tokenizer.decode(ids.tolist()) == text
        assert tokenizer.token_bytes_V[ids].sum() == len(text.encode())
        assert ids.tolist() == tokenizer.encode(text).tolist()
    assert tokenizer.decode(tokenizer.encode(everything).tolist()) == everything
