"""Pictures of rows: of mixtures, of conversations, of weights on their way out, and of answers."""

from __future__ import annotations

import json
import random
import tempfile
from dataclasses import replace
from pathlib import Path

from bench.pictures.charts import Axes
from bench.pictures.measured import read
from bench.pictures.svg import Drawing
from megacpp.config.mix import mix_stages
from megacpp.config.presets import moe_small
from megacpp.data.corpus import Corpus
from megacpp.data.mixture import order_of_sources
from megacpp.data.prepare import CorpusSpec, ensure_corpus
from megacpp.interop.classes import class_of
from megacpp.interop.links import links

MIX = "code=0.62,prose=0.3,notes=0.08"
TYPES = "int float bool char long double".split()


def rows_of_a_mixture() -> Drawing:
    """Draw the source of each row, and how far a source is from its share."""
    shares = tuple(mix_stages(MIX)[0].shares.items())
    turn, _, counts = order_of_sources(shares)
    names, order = list(counts), turn * 2
    share = float(dict(shares)["code"])
    draw = random.Random(0)
    drawn = ["code" if draw.random() < share else "" for _ in order]
    drawing = Drawing(760, f"Source of each row of {MIX}, and rows of code beyond its share")
    drawing.legend(64, 12, [(fill, f"{name} {float(part):.0%}") for fill, (name, part) in
                            enumerate(shares)])  # fmt: skip
    for row, name in enumerate(order):
        drawing.rect(64 + row * 6.6, 36, 5.6, 26, names.index(name))
    lines = {}
    for kind, sources in (("s1", drawn), ("s0", order)):
        behind = [sources[:n].count("code") - n * share for n in range(len(sources) + 1)]
        lines[kind] = list(enumerate(behind))
    every = [y for line in lines.values() for _, y in line]
    most = max(2, int(max(map(abs, every))) + 1)
    axes = Axes(drawing, 64.0, 116.0, 6.6 * len(order), 190.0, (0, len(order)), (-most, most))
    axes.frame(range(0, len(order) + 1, 20), (-most, -1, 0, 1, most),
               ("rows read", "rows of code beyond its share"))  # fmt: skip
    for kind, line in lines.items():
        axes.line(line, kind)
    drawing.legend(420, 96, [("s0", "the trainer's order"), ("s1", "drawn at random")])
    return drawing


def rows_of_conversations() -> Drawing:
    """Draw whole conversations in rows of 64 tokens, and the labels that count."""
    texts = [{"prompt": f"Which type does this return?\n{TYPES[n % 6]} f{n}(int x) {{ }}",
              "completion": TYPES[n % 6]} for n in range(120)]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "talks.jsonl"
        path.write_text("\n".join(map(json.dumps, texts)))
        spec = CorpusSpec(str(path), vocab_size=300, validation_fraction=0.1)
        ensure_corpus(spec, Path(folder) / "talks")
        corpus = Corpus(Path(folder) / "talks", seq_len=64)
        rows = [corpus.row("train", n) for n in range(4)]
    pad = corpus.tokenizer.specials.pad
    drawing, left, cell = (
        Drawing(760, "Conversations in four rows, and labels that count"),
        64.0,
        10.6,
    )
    drawing.legend(left, 12, [(0, "a conversation"), (6, "the next one"), (1, "label that counts"),
                              ("off", "padding, or no label")])  # fmt: skip
    for number, row in enumerate(rows):
        y = 44.0 + number * 56
        drawing.text(14, y + 13, f"row {number}", "head")
        drawing.text(14, y + 33, "labels", "note")
        for t in range(64):
            x, document = left + t * cell, int(row.documents_T[t] - row.documents_T[0])
            kind = "off" if row.ids_T[t] == pad else (0, 6)[document % 2]
            drawing.rect(x, y, cell - 1, 18, kind)
            drawing.rect(x, y + 22, cell - 1, 14, 1 if row.labels_T[t] >= 0 else "off")
    return drawing


def rows_that_leave() -> Drawing:
    """Draw where each row of a query's weights comes from in a folder of Hugging Face's."""
    preset = moe_small().model
    attention = replace(preset.attention, num_heads=2, num_kv_heads=2, head_dim=8)
    model = replace(preset, dim=32, depth=2, vocab_size=300, attention=attention)
    link = next(one for one in links(class_of(model)[0], model) if "q_proj" in one.name)
    assert link.order is not None
    order, wide = link.order.tolist(), 22.5
    title = "Rows of a query's weights here, and in the folder: halves of a head, and zeros"
    drawing, left = Drawing(760, title), 16.0
    count = sum(part.count for part in link.parts)
    drawing.text(left, 22, f"here: {link.parts[0].name}, {count} rows", "head")
    drawing.text(left, 206, f"there: {link.name}, {len(order)} rows", "head")
    for row in range(count):
        drawing.rect(left + row * wide, 32, wide - 2, 28, row % 8 // 2, str(row))
    for place, row in enumerate(order):
        x = left + place * wide
        if row >= 0:
            drawing.path([(left + (row + 0.5) * wide, 60), (x + wide / 2, 156)], "line")
        kind, words = (row % 8 // 2, str(row)) if row >= 0 else ("off", "")
        drawing.rect(x, 156, wide - 2, 28, kind, words)
    words = "One colour: a pair that RoPE turns. Grey: rows of zeros, the gate that ours lacks."
    drawing.text(left, 228, words, "note")
    return drawing


def right_answers() -> Drawing:
    """Draw how many held-out questions are answered right over the steps of tuning."""
    record = read("questions")
    asked, (frequent, often) = record["asked"], record["most_frequent"]
    drawing = Drawing(760, f"Right answers of {asked} held-out questions, over steps of tuning")
    steps = {int(step): right for step, right in record["right"].items()}
    last = max(steps)
    axes = Axes(drawing, 60.0, 56.0, 670.0, 230.0, (0, last), (0, asked))
    axes.frame(list(steps), (0, often, asked), ("steps of tuning", "right answers"))
    axes.line([(0, often), (last, often)], "s1")
    x, y = axes.at(last, often)
    drawing.text(x, y + 18, f"always {frequent}", "note", end=True)
    axes.line(steps.items(), "s0")
    for step, right in steps.items():
        x, y = axes.dot(step, right, 0)
        kinds = record["kinds_right"][str(step)]
        at = (x - 4, y - 10) if step == last else (x + 10, y + 20 if step else y - 10)
        drawing.text(*at, f"{right} right, {kinds} types", end=step == last)
    return drawing
