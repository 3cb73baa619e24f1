"""Conversations: what is learned, as transformers renders them, whole rows, masks, mistakes."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

from megacpp.config.mix import mix_stages
from megacpp.data import token_shares
from megacpp.data.batches import IGNORED
from megacpp.data.conversations import ChatTemplate
from megacpp.data.corpus import Corpus
from megacpp.data.mixture import Mixture
from megacpp.data.prepare import CorpusSpec, ensure_corpus
from megacpp.data.shards import fingerprint, read_index
from megacpp.data.token_shares import TokenWalk
from megacpp.data.tokenizer import CorpusTokenizer
from megacpp.errors import ConfigError, DataError
from megacpp.model.hybrid import HybridLM
from tests.data.chats import TALK, chatml_folder
from tests.model.small import small


def question(n: int) -> dict[str, object]:
    text = f"What is {n} plus {n * n % 17}" + " and no more" * (n % 5) + "?"
    return {"prompt": text, "completion": f"It is {n + n * n % 17}."}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("talks") / "talks.jsonl"
    long = [{"role": r, "content": f"{r} says. " * 60} for r in ("user", "assistant")]
    records = [*map(question, range(60)), {"messages": TALK}, {"messages": long}]
    path.write_text("\n".join(map(json.dumps, records)))
    return path


@pytest.fixture(scope="module")
def path(source: Path) -> Path:
    spec = CorpusSpec(str(source), vocab_size=400, validation_fraction=0.1, shard_tokens=900)
    return ensure_corpus(spec, source.parent / "talks").path


@pytest.fixture(scope="module")
def chatml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chatml_folder(tmp_path_factory.mktemp("chatml"))


def answers(corpus: Corpus, split: str) -> list[list[int]]:
    """Return runs of learned labels straight from the rows."""
    found: list[list[int]] = []
    rows = corpus.rows_per_epoch if split == "train" else corpus.num_validation_rows
    for number in range(rows):
        before = IGNORED
        for label in corpus.row(split, number).labels_T.tolist():
            if label != IGNORED:
                if before == IGNORED:
                    found.append([])
                found[-1].append(label)
            before = label
    return found


def test_labels_are_the_answers_and_their_ends(path: Path) -> None:
    corpus = Corpus(path, 2000)
    tokenizer, found = corpus.tokenizer, []
    for split in ("train", "validation"):
        for ids in answers(corpus, split):
            assert ids[-1] == tokenizer.specials.eos and ids.count(ids[-1]) == 1
            found.append(tokenizer.decode(ids[:-1]))
    expected = [str(question(n)["completion"]) for n in range(60)]
    expected += ["Ein Zeichen.", "Gern, <|im_end|> 🙂", "assistant says. " * 60]
    assert sorted(found) == sorted(expected)
    entry = corpus.index["splits"]["validation"]["learned"]
    assert (
        corpus.validation_targets
        == entry["targets"]
        == sum(map(len, answers(corpus, "validation")))
    )
    batch = corpus.validation_batch(range(corpus.num_validation_rows))
    assert batch.target_bytes == corpus.validation_text_bytes == entry["text_bytes"]
    assert batch.num_targets == corpus.validation_targets


def test_a_row_holds_whole_conversations(path: Path) -> None:
    """Every answer stands behind its question, but in the one that is longer than a row."""
    corpus = Corpus(path, 90)
    offsets = corpus.train.offsets.read(0, corpus.train.documents + 1)
    longest = int(np.diff(offsets).argmax())
    targets, seen = 0, []
    for number in range(corpus.rows_per_epoch):
        row = corpus.row("train", number)
        targets += (row.labels_T != IGNORED).sum()
        for document in dict.fromkeys(row.documents_T.tolist()):
            if document in (longest, corpus.train.documents):
                continue
            seen.append(document)
            ids = row.ids_T[row.documents_T == document]
            whole = corpus.train.document(document)
            assert len(ids) >= len(whole) - 1 and (ids == whole[: len(ids)]).all()
    assert seen == [d for d in range(corpus.train.documents) if d != longest]
    assert targets == corpus.index["splits"]["train"]["learned"]["targets"]
    assert (corpus.row("validation", corpus.num_validation_rows).labels_T == IGNORED).all()
    assert "rows 8" in " ".join(corpus.describe()) or "rows 9" in " ".join(corpus.describe())


def test_special_tokens_of_a_message_are_text(path: Path) -> None:
    template = ChatTemplate(Corpus(path, 64).tokenizer)
    ids, learned = template.encode([TALK])[0]
    assert ids.tolist().count(template.end) == 2 and learned[ids == template.end].all()
    assert ids[0] == Corpus(path, 64).tokenizer.specials.bos
    text = template.tokenizer.decode(ids.tolist())
    assert "Was heißt <|im_end|> und <eos>?" in text and "\ufdd0" not in text


def test_a_prompt_is_the_beginning_of_what_is_learned(path: Path, chatml: Path) -> None:
    for folder in (path, chatml):
        template = ChatTemplate(CorpusTokenizer.load(folder / "tokenizer.json"))
        ids, learned = template.encode([TALK])[0]
        for count in (2, 4):
            prompt = template.prompt_ids(TALK[:count])
            assert ids[: len(prompt)].tolist() == prompt
            assert learned[len(prompt)] and not learned[len(prompt) - 1]


def test_tokens_that_are_not_learned_have_no_gradient(path: Path) -> None:
    """Hidden states that predict a question get exactly 0; so does the row of an unseen label."""
    batch = Corpus(path, 64).train_batch(range(4))
    model = HybridLM(small("AFEM", vocab_size=400)).double()
    noise = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=noise)
    states: list[torch.Tensor] = []

    def keep(module: object, args: tuple[torch.Tensor, ...]) -> None:
        args[0].retain_grad()
        states.append(args[0])

    model.head.register_forward_pre_hook(keep)
    model(batch.ids_BT, batch.labels_BT, batch.docs).loss_sum.backward()
    grad_BTD = states[0].grad
    assert grad_BTD is not None
    sizes_BT = grad_BTD.unflatten(0, batch.ids_BT.shape) if grad_BTD.dim() == 2 else grad_BTD
    moved_BT = sizes_BT.abs().amax(-1) > 0
    assert torch.equal(moved_BT, batch.labels_BT != IGNORED)
    assert 0 < moved_BT.double().mean() < 0.5


@pytest.fixture(scope="module")
def plain(path: Path, tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """Return a corpus of plain texts with the tokenizer of the conversations."""
    home = tmp_path_factory.mktemp("plain")
    (home / "texts").mkdir()
    for n in range(40):
        (home / "texts" / f"{n}.txt").write_text(f"Paragraph {n} tells of {n}. " * 9)
    spec = CorpusSpec(str(home / "texts"), tokenizer=str(path / "tokenizer.json"))
    made = Corpus(ensure_corpus(spec, home / "corpus").path, 64, seed=3)
    (made.path / "tokenizer_config.json").unlink()  # of a corpus that knows no template
    return made


def test_a_mixture_keeps_the_masks_and_the_template(path: Path, plain: Corpus) -> None:
    talks = Corpus(path, 64, seed=3)
    mixed = Mixture(
        {"plain": Corpus(plain.path, 64, 3), "talks": talks}, mix_stages("plain=1,talks=1")
    )
    batch = mixed.train_batch(range(8))
    for row in range(8):
        name, number = mixed.place(row)
        corpus = plain if name == "plain" else talks
        assert torch.equal(batch.labels_BT[row], corpus.train_batch([number]).labels_BT[0])
    assert mixed.path == path and mixed.validation_targets == sum(
        one.validation_targets for one in (plain, talks)
    )
    assert mixed.no_verdict.startswith(("plain: ", "talks: only answers count"))


MIX = "plain=1,talks=3@0,plain=1,talks=1@5"


def mixture(path: Path, plain: Corpus, mix: str = MIX) -> Mixture:
    return Mixture(
        {"plain": Corpus(plain.path, 64, 3), "talks": Corpus(path, 64, 3)}, mix_stages(mix)
    )


def test_shares_are_exact_by_token_where_rows_are_padded(path: Path, plain: Corpus) -> None:
    """After any row of a stage a source is less than a row's tokens from its share of them."""
    mixed = mixture(path, plain)
    assert "shares exact by token" in mixed.describe()[0]
    tokens, rows = Counter[str](), Counter[str]()
    for row in range(400):
        if row % 40 == 0:
            mixed.begin_step(row // 40, row)
        if row == 200:
            tokens.clear()
        name, number = mixed.place(row)
        assert number == rows[name], "none is left out"
        rows[name] += 1
        text = mixed.train_batch([row]).ids_BT[0] != mixed.tokenizer.specials.pad
        tokens[name] += mixed.corpora[name].row_tokens(number)
        assert mixed.corpora[name].row_tokens(number) in (int(text.sum()), int(text.sum()) - 1)
        for source, share in mixed.stages[row >= 200].shares.items():
            assert abs(tokens[source] - share * tokens.total()) < 64
    full = [mixed.corpora["talks"].row_tokens(n) for n in range(100)]
    assert sum(full) < 0.9 * 64 * len(full), "else shares by row would pass"


def test_every_rank_and_a_resumed_run_have_the_same_order(path: Path, plain: Corpus) -> None:
    straight, found = mixture(path, plain), []
    for step in range(9):
        straight.begin_step(step, 7 * step)
        found += [straight.place(row) for row in range(7 * step, 7 * step + 7)]
    for stop in range(1, 9):
        before, after = mixture(path, plain), mixture(path, plain, "talks=1")
        for step in range(stop):  # a rank that reads the last rows of each step alone
            before.begin_step(step, 7 * step)
            assert before.place(7 * step + 6) == found[7 * step + 6]
        state = json.loads(json.dumps(before.state()))
        assert state["segments"][-1]["first_row"] == 7 * (stop - 1)
        after.stages = before.stages
        after.restore(state)
        for step in range(stop, 9):
            after.begin_step(step, 7 * step)
            for row in range(7 * step, 7 * step + 7):
                assert after.place(row) == found[row], (stop, row)
    assert straight.place(0) == found[0], "rows that were read long ago"


def test_a_mixture_that_was_saved_by_row_goes_on_by_token(path: Path, plain: Corpus) -> None:
    mixed = mixture(path, plain)
    state = {"segments": [{"first_row": 0, "shares": {"plain": "1/4", "talks": "3/4"}}]}
    mixed.restore({"segments": [{**state["segments"][0], "before": {}}]})
    assert Counter(mixed.place(row)[0] for row in range(8)) == {"plain": 2, "talks": 6}
    mixed.begin_step(2, 8)
    assert [one.tokens for one in mixed.segments] == [None, {}]
    assert mixed.segments[1].before == {"plain": 2, "talks": 6}


def test_a_source_without_a_share_has_no_row(path: Path, plain: Corpus) -> None:
    mixed = mixture(path, plain, "talks=1,plain=0@0,plain=1,talks=1@2")
    for step in range(4):
        mixed.begin_step(step, 9 * step)
        names = {mixed.place(row)[0] for row in range(9 * step, 9 * step + 9)}
        assert names == ({"talks"} if step < 2 else {"talks", "plain"})


def test_places_that_were_forgotten_are_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    shares = {"a": Fraction(1, 3), "b": Fraction(2, 3)}
    args = 5, shares, {"a": 2}, {}, lambda name, row: 1 + (row * 7 + len(name)) % 5
    whole = [TokenWalk(*args).place(row) for row in range(5, 105)]
    monkeypatch.setattr(token_shares, "KEPT", 8)
    walk = TokenWalk(*args)
    assert [walk.place(row) for row in (104, 5, 60, 61)] == [
        whole[row - 5] for row in (104, 5, 60, 61)
    ]
    rows, tokens = walk.before(55)
    assert rows == Counter(name for name, _ in whole[:50]) + Counter(a=2)
    assert sum(tokens.values()) == sum(args[4](*place) for place in whole[:50])


def test_counts_before_a_row_read_ahead_need_no_walk_from_the_start() -> None:
    """Each step asks for its first row after the rows of the step were placed."""
    asked = list[int]()

    def tokens_of(name: str, row: int) -> int:
        asked.append(row)
        return 1 + (row * 7 + len(name)) % 5

    args = 5, {"a": Fraction(1, 3), "b": Fraction(2, 3)}, {"a": 2}, {}, tokens_of
    walk = TokenWalk(*args)
    for first in range(5, 905, 9):
        alone = TokenWalk(*args).before(first)
        walk.place(first + 8)
        asked.clear()
        assert walk.before(first) == alone
        assert len(asked) == 9


def test_a_damaged_mask_is_found(path: Path, tmp_path: Path) -> None:
    damaged = Path(shutil.copytree(path, tmp_path / "damaged"))
    shard = damaged / "train-learned-00000.bin"
    raw = shard.read_bytes()
    shard.write_bytes(bytes([raw[0] ^ 1]) + raw[1:])
    with pytest.raises(DataError, match=r"train-learned-00000.bin block 0 .*CRC-32"):
        Corpus(damaged, 64).row("train", 0)
    with pytest.raises(DataError, match="SHA-256 differs"):
        read_index(damaged, verify=True)
    shard.write_bytes(raw[:-1])
    with pytest.raises(DataError, match="truncated"):
        Corpus(damaged, 64)
    other = Path(shutil.copytree(path, tmp_path / "other"))
    index = json.loads((other / "index.json").read_text())
    assert index["format_version"] == 3, "an older edition would learn every token"
    before = fingerprint(index)
    index["splits"]["train"]["learned"]["shards"][0]["sha256"] = "0" * 64
    assert fingerprint(index) != before


CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]}


def made(tmp_path: Path, *records: object, **settings: object) -> None:
    file = tmp_path / "x.jsonl"
    file.write_text("\n".join(json.dumps(record) for record in records))
    ensure_corpus(CorpusSpec(str(file), **settings), tmp_path / "x")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"messages": []}, "must be a list"),
        ({"messages": "hi"}, "must be a list"),
        ({"messages": [{"role": "user"}]}, "message 1 has no text `role` and `content`"),
        ({"messages": [{"role": "user", "content": ["hi"]}]}, "message 1 has no text"),
        ({"messages": ["hi"]}, "message 1 has no text"),
        ({"messages": TALK[:2]}, "no message of the assistant"),
        ({"prompt": "hi", "completion": None}, "message 2 has no text"),
        ({"messages": [*TALK[:2], CALL]}, "message 3 has tool_calls, which isn't read"),
        ({"messages": [TALK[2] | {"weight": 0}]}, "message 1 has weight, which isn't read"),
        ({"messages": TALK, "tools": [{"name": "f"}]}, "has tools, which aren't read"),
        ({"text": "hello"}, "2 of 3 documents are conversations"),
    ],
)
def test_mistakes_name_line_and_fix(tmp_path: Path, record: object, said: str) -> None:
    with pytest.raises(DataError) as caught:
        made(tmp_path, question(1), question(2), record)
    assert said in str(caught.value) and "Fix: " in str(caught.value)
    assert "x.jsonl" in str(caught.value) and "\n" not in str(caught.value)


def test_conversations_are_not_cut(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"fim_rate=0\.5: conversations aren't cut"):
        made(tmp_path, question(1), question(2), fim_rate=0.5)


@pytest.mark.parametrize("field", ["", "conversations"])
def test_messages_of_another_shape_are_named(tmp_path: Path, field: str) -> None:
    record = {"conversations": [{"from": "human", "value": "1"}, {"from": "gpt", "value": "2"}]}
    with pytest.raises(DataError, match=r"has 'conversations', which aren't read\. Fix: write \{"):
        made(tmp_path, record, field=field)
