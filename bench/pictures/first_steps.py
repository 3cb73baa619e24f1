"""Pictures of the first chapters: a step, a configuration, initial weights, rows of a corpus."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from bench.pictures.svg import Drawing
from megacpp.config.arguments import parse_run
from megacpp.config.checks.every import lookup, resolve
from megacpp.config.presets import PRESETS, tiny
from megacpp.config.schema import Config
from megacpp.data.batches import IGNORED
from megacpp.data.corpus import Corpus
from megacpp.data.prepare import CorpusSpec, ensure_corpus
from megacpp.lessons.batches import ragged_batch
from megacpp.lessons.models import small
from megacpp.model.init import Normal, tensor_key
from optim.build import build_optimizer
from optim.clip import clip_gradients
from optim.schedule import build_scheduler
from parallel.boundary import AccumulationBoundary
from parallel.build import build_model
from parallel.mesh import World

STEPS = ("accumulate", "clip_gradients", "check_step", "optimizer.step", "scheduler.step",
         "zero_grad", "finish_step")  # fmt: skip
FLAGS = "dense_110m --train.device-batch-size 8 --optim.lr 5e-4"
KEYS = ("run.seed", "optim.lr", "data.seq_len", "train.device_batch_size",
        "train.tokens_per_step", "mesh.dp_shard", "train.grad_accum")  # fmt: skip


def stages(spoilt: bool) -> Iterator[tuple[str, dict[str, list[Tensor]]]]:
    """Yield what a rank holds before a step and after each of its stages.

    Args:
        spoilt: whether a gradient isn't finite.
    """
    base = tiny()
    optim = replace(base.optim, warmup_steps=4, clip_norm=0.1)
    config = resolve(replace(base, model=small("AME"), optim=optim), 1)
    model = build_model(config, World(0, 1, torch.device("cpu")))
    optimizer = build_optimizer(model, config)
    scheduler = build_scheduler(optimizer, config.optim, config.run.steps)
    boundary = AccumulationBoundary(model, World(0, 1, torch.device("cpu")), config)

    def held() -> dict[str, list[Tensor]]:
        found = {
            "weights": [p for p in model.parameters()],
            "gradients": [p.grad for p in model.parameters() if p.grad is not None],
            "optimizer state": [*optimizer.state_tensors().values()],
            "learning rate": [torch.tensor([float(g["lr"]) for g in optimizer.param_groups])],
            "router's bias": [r.expert_bias for r in boundary.loads.routers.values()],
        }
        return {name: [t.detach().clone() for t in some] for name, some in found.items()}

    yield "", held()
    sums = boundary.accumulate([ragged_batch(range(4)), ragged_batch(range(4, 8))])
    if spoilt:
        next(p.grad for p in model.parameters() if p.grad is not None).view(-1)[0] = torch.nan
    yield STEPS[0], held()
    norm = clip_gradients(model.parameters(), config.optim.clip_norm, along=sums.along)
    yield STEPS[1], held()
    status = boundary.check_step(sums, norm)
    yield STEPS[2], held()
    if status.healthy:
        optimizer.step()
        yield STEPS[3], held()
        scheduler.step()
        yield STEPS[4], held()
    optimizer.zero_grad()
    yield STEPS[5], held()
    boundary.finish_step(status)
    yield STEPS[6], held()


def stages_of_a_step() -> Drawing:
    """Draw what each stage of a step changes, with finite gradients and with one that isn't."""
    drawing = Drawing(
        760, "What each stage of a step changes: with finite gradients, and with one that is not"
    )
    columns, top, cell, wide = list(next(stages(False))[1]), 74.0, 30.0, 92.0
    drawing.legend(150, 12, [(0, "changes"), ("off", "stays"), ("pale", "not called")])
    for half, spoilt in enumerate((False, True)):
        y = top + half * (len(STEPS) * cell + 44)
        head = "a gradient is NaN: every rank skips the step" if spoilt else "a healthy step"
        drawing.text(14, y - 24, head, "head")
        for i, name in enumerate(columns):
            drawing.text(150 + i * 120, y - 6, name, "note")
        moments = list(stages(spoilt))
        seen = dict(moments)
        after = {name: here for (name, here) in moments[1:]}
        before = dict(zip(after, (here for _, here in moments), strict=False))
        for row, name in enumerate(STEPS):
            drawing.text(14, y + row * cell + 19, name, "" if name in seen else "note")
            for i, column in enumerate(columns):
                x, at = 150 + i * 120, y + row * cell
                if name not in seen:
                    drawing.rect(x, at, wide + 18, cell - 4, "pale")
                    continue
                old, new = before[name][column], after[name][column]
                same = len(old) == len(new) and all(map(_equal, old, new))
                words = "freed" if old and not new else "changed"
                drawing.rect(
                    x, at, wide + 18, cell - 4, "off" if same else 0, "" if same else words
                )
    return drawing


def settings_by_layer() -> Drawing:
    """Draw the value of settings in every layer, and which one a run has."""
    words = FLAGS.split()
    given = parse_run(words, 2)
    layers = [("default", Config()), ("preset", PRESETS[words[0]]()), ("command line", None)]
    drawing = Drawing(
        760, "Seven settings by layer: the value that a run takes, and who decided it"
    )
    left, wide, cell = 190.0, 132.0, 34.0
    drawing.text(14, 26, f"train.py {FLAGS}", "head")
    for i, name in enumerate([*(name for name, _ in layers), "derived"]):
        drawing.text(left + i * (wide + 6), 56, name, "note")
    drawing.text(left, 76 + len(KEYS) * cell, "on 2 ranks; coloured: what the run has", "note")
    for row, key in enumerate(KEYS):
        y, final, source = 66 + row * cell, lookup(given.config, key), given.provenance[key]
        drawing.text(14, y + 20, key)
        last: object = None
        for i, (name, config) in enumerate(layers):
            value, x = lookup(config, key) if config else final, left + i * (wide + 6)
            if source == name:
                drawing.rect(x, y, wide, cell - 6, i, _plain(value))
            elif config and value != last:
                drawing.rect(x, y, wide, cell - 6, "off")
                drawing.text(x + 10, y + 19, _plain(value), "note")
            last = value
        if source == "derived":
            drawing.rect(left + 3 * (wide + 6), y, wide, cell - 6, 3, _plain(final))
    return drawing


def _equal(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)


def _plain(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def _told(numbers: Tensor, most: float) -> list[tuple[int, float]]:
    """Return fill and side, of one, of a square for each number: its sign, and its size."""
    return [(int(n < 0), min(1.0, abs(n) / most) ** 0.5) for n in numbers.tolist()]


def weights_on_ranks() -> Drawing:
    """Draw a matrix as one, two and three ranks make it: with a counter, and with a generator."""
    shape, cell, top = (12, 6), 20.0, 70.0
    rule, key = Normal(0.02), tensor_key(42, "blocks.3.mixer.wq.weight")
    drawing = Drawing(760, "A matrix that one, two and three ranks make, each its rows: by counters"
                      " it is the same, by generators it is not")  # fmt: skip
    drawing.legend(14, 12, [(0, "above 0"), (1, "below 0"), ("off", "side of a square: size")])
    for half, words in enumerate(("rule(index): a counter", "randn: a generator per rank")):
        left = 14 + half * 378.0
        drawing.text(left, 50, words, "head")
        for i, ranks in enumerate((1, 2, 3)):
            x = left + i * (shape[1] * cell / 1.25 + 28)
            drawing.text(x, top - 4, f"{ranks} rank{'s' * (ranks > 1)}", "note")
            for rank, rows in enumerate(torch.arange(shape[0]).chunk(ranks)):
                index = torch.arange(int(rows[0]) * shape[1], int(rows[-1] + 1) * shape[1])
                drawn = torch.randn(len(index), generator=torch.Generator().manual_seed(42)) * 0.02
                made = drawn if half else rule(index, shape, key)
                for at, (fill, side) in zip(index.tolist(), _told(made, 0.05), strict=True):
                    box = cell * 0.8
                    cx = x + at % shape[1] * box
                    cy = top + 4 + at // shape[1] * box + 6 * rank
                    drawing.rect(cx, cy, box - 1, box - 1, "off")
                    size = max(1.0, (box - 3) * side)
                    drawing.rect(
                        cx + (box - 1 - size) / 2, cy + (box - 1 - size) / 2, size, size, fill
                    )
    return drawing


def row_of_a_step() -> Drawing:
    """Draw which rows the first steps read, and the tokens and labels of row 7 of step 3."""
    rows, length, step, place = 8, 24, 3, 7
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "source"
        source.mkdir()
        for n in range(40):
            (source / f"{n}.h").write_text(f"int f{n}(int x) {{ return x + {n}; }}\n")
        spec = CorpusSpec(str(source), vocab_size=263, validation_fraction=0.2)
        ensure_corpus(spec, Path(folder) / "corpus")
        corpus = Corpus(Path(folder) / "corpus", seq_len=length)
        table = [[corpus.split_row(s * rows + i) for i in range(rows)] for s in range(step + 3)]
        first = table[step][place]
        found = {corpus.split_row(g): g for g in range(corpus.rows_per_epoch)}
        batch = corpus.train_batch([found[first], found[first + 1]])
        tokenizer = corpus.tokenizer
        letters = {i: tokenizer.decode([i]) for i in range(tokenizer.vocab_size)}
        letters |= tokenizer.special_names | {IGNORED: ""}
    short = {"<bos>": "^", "<eos>": "$", "\n": "\\n"}
    drawing = Drawing(760, "Which rows of the corpus the first steps read on two ranks, and the"
                      " tokens of row 7 of step 3")  # fmt: skip
    left, cell, top = 86.0, 62.0, 62.0
    drawing.legend(left, 12, [(0, "read by rank 0"), (1, "read by rank 1")])
    for i in range(rows):
        drawing.text(left + i * cell + 16, top - 6, f"row {i}", "note")
    for s, numbers in enumerate(table):
        drawing.text(14, top + s * 30 + 18, f"step {s}", "note")
        for i, number in enumerate(numbers):
            drawing.rect(left + i * cell, top + s * 30, cell - 4, 26, i // (rows // 2), f"{number}")
    at = left + place * cell, top + step * 30
    drawing.rect(at[0] - 2, at[1] - 2, cell, 30, "edge")
    y, small = top + len(table) * 30 + 44, 26.0
    drawing.text(14, y - 14, f"Row {first} of the corpus, and the next one", "head")
    owners = batch.docs.ids_BT.flatten().tolist()
    fills = {d: 2 + n for n, d in enumerate(dict.fromkeys(owners))}
    for line, ids_BT in enumerate((batch.ids_BT, batch.labels_BT) * 2):
        row, name = line // 2, ("tokens", "labels")[line % 2]
        height = y + line * 30 + row * 12
        drawing.text(14, height + 18, f"{first + row} {name}", "note")
        for i, token in enumerate(ids_BT[row].tolist()):
            kind = "off" if token == IGNORED else fills[batch.docs.ids_BT[row, i].item()]
            word = letters[token]
            drawing.rect(left + i * small, height, small - 2, 26, kind, short.get(word, word))
    drawing.text(left, y + 150, "A colour is a document; ^ begins it, $ ends it. Grey: no label,"
                 " nothing says which one is next.", "note")  # fmt: skip
    return drawing
