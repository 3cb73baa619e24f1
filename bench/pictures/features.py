"""Pictures of features of a model: chosen keys, tokens further ahead, hashed rows, streams."""

from __future__ import annotations

from dataclasses import replace

import torch

from bench.ablate import BASE, lines_of
from bench.pictures.charts import Axes
from bench.pictures.continued import LEFT, Panel, draw
from bench.pictures.measured import read
from bench.pictures.svg import Drawing
from megacpp.blocks.hyper_connections.config import HyperConnectionConfig
from megacpp.blocks.hyper_connections.module import HyperConnection
from megacpp.blocks.mtp.config import MTPConfig
from megacpp.blocks.ngram.hashing import PAD, hashed_orders, odd_multipliers
from megacpp.kernels.memory_gate import memory_gate
from megacpp.kernels.sparse_attention.indexer import choose_keys
from megacpp.kernels.token_order import TokensAhead
from megacpp.lessons.models import small
from megacpp.model.beside import tokens_beside
from megacpp.model.documents import Documents
from megacpp.model.hybrid import HybridLM
from megacpp.model.init import initialise

WORDS = "the cat saw the dog".split()
PRIMES = ((11, 13), (17, 19))  # rows of the tables of orders 2 and 3
IDS, DOCUMENTS = [10, 11, 12, 13, 14, 25, 26, 27], [0, 0, 0, 0, 0, 1, 1, 1]


def chosen_keys() -> Drawing:
    """Draw the keys that each query sees, and those that the indexer chooses for it."""
    lengths, top_k, cell = (36, 20), 4, 8.0
    tokens = sum(lengths)
    ids_BT = torch.arange(2).repeat_interleave(torch.tensor(lengths))[None]
    docs = Documents.from_ids(ids_BT)
    draw = torch.Generator().manual_seed(0)
    q, k, w = (torch.randn(shape, generator=draw) for shape in
               ((1, tokens, 2, 4), (1, tokens, 4), (1, tokens, 2)))  # fmt: skip
    chosen = choose_keys(q, k, w.abs(), docs, docs, top_k)[0].tolist()
    title = f"Keys that each of {tokens} queries sees, and the {top_k} that it attends to"
    drawing, left, top = Drawing(620, title), 170.0, 58.0
    drawing.legend(left, 12, [("off", "visible key"), (0, "chosen, document 0"),
                              (1, "document 1")])  # fmt: skip
    drawing.text(left, top - 10, "keys, from the first of the row to the last", "note")
    visible = 0
    for query, keys in enumerate(chosen):
        document = int(ids_BT[0, query])
        for key in range(document * lengths[0], query + 1):
            kind = document if key in keys else "off"
            place = left + key * cell, top + query * cell
            drawing.rect(*place, cell - 1, cell - 1, kind)
            visible += 1
    drawing.text(14, top + 9, "first query", "note")
    drawing.text(14, top + tokens * cell - 2, "last query", "note")
    taken = sum(key >= 0 for keys in chosen for key in keys)
    words = f"{visible} pairs are visible, {taken} are attended to."
    drawing.text(left, top + tokens * cell + 20, words, "note")
    return drawing


def tokens_further_ahead() -> Drawing:
    """Draw what each depth of multi-token prediction is fed and asked, for a packed row."""
    tokens, left, cell = len(IDS), 200.0, 58.0
    model = HybridLM(replace(small("AF"), mtp=MTPConfig(depths=2, hidden_dim=24)))
    assert model.mtp is not None
    docs = Documents.from_ids(torch.tensor([DOCUMENTS]))
    ahead = [*IDS[1:], -100]
    ends = [a != b for a, b in zip(DOCUMENTS, [*DOCUMENTS[1:], -1], strict=True)]
    labels = [-100 if end else label for end, label in zip(ends, ahead, strict=True)]
    docs = docs.with_tokens(torch.tensor([IDS]), torch.tensor([labels]))
    fed = model.mtp.ids(docs).tolist()
    asked = model.mtp.ahead(torch.zeros(2, tokens, 16), docs).labels_NT.tolist()
    rows: list[tuple[str, str, list[int]]] = [
        ("trunk and head", "fed", IDS), ("", "asked", labels),
        ("depth 1", "fed", fed[0]), ("", "asked", asked[0]),
        ("depth 2", "fed", fed[1]), ("", "asked", asked[1]),
    ]  # fmt: skip
    drawing = Drawing(700, "Tokens that each depth is fed and asked for, in a row of two documents")
    for t in range(tokens):
        drawing.text(left + t * cell, 24, f"state {t}", "note")
    for number, (name, word, values) in enumerate(rows):
        y = 36.0 + number * 28 + number // 2 * 12
        drawing.text(14, y + 16, name, "head")
        drawing.text(left - 12, y + 16, word, "note", end=True)
        for t, value in enumerate(values):
            kind = IDS.index(value) if value > 0 else "off"
            drawing.rect(left + t * cell, y, cell - 4, 24, kind, str(value) if value > 0 else "")
    y = 36.0 + 6 * 28 + 3 * 12 + 8
    drawing.text(left, y, "One colour is one token. Grey: nothing, the document has ended.", "note")
    return drawing


def order_of_words() -> Drawing:
    """Draw the target of each token of a sentence: shares of the words that come, by distance."""
    number = {word: i for i, word in enumerate(dict.fromkeys(WORDS))}
    ids = torch.tensor([[number[word] for word in WORDS]])
    ends = torch.arange(len(WORDS))[None] == len(WORDS) - 1
    found, shares = TokensAhead.from_rows(ids, ends, window=4).targets(
        slice(0, len(WORDS)), torch.float64
    )
    names, left, wide = list(number), 110.0, 620.0
    drawing = Drawing(760, "Target of each token of a sentence: which words come, and how soon")
    drawing.text(14, 22, "after", "note")
    drawing.text(left, 22, "share of each word in the target", "note")
    for t, word in enumerate(WORDS):
        y, x = 34.0 + t * 34, left
        drawing.text(14, y + 18, word, "head")
        for at, share in zip(found[t].tolist(), shares[t].tolist(), strict=True):
            if share > 0:
                w = share * wide
                words = f"{names[at]} {share:.2f}"
                drawing.rect(
                    x, y, w - 1.5, 26, at, words if w > 44 else names[at] if w > 22 else ""
                )
                x += w
        if x == left:
            drawing.text(left, y + 18, "no word comes: the sentence has ended", "note")
    return drawing


def hashed_rows() -> Drawing:
    """Draw the rows that two n-grams read in four tables."""
    multipliers = odd_multipliers(seed=1, layer=0, num_ids=100, order=3)
    ids = torch.tensor([[7, 3, 7]])
    docs = Documents.rows(1, 3).with_tokens(ids, ids)
    shifted = [tokens_beside(docs, -back, PAD) for back in range(3)]
    found = hashed_orders(shifted, multipliers, list(PRIMES))[0].tolist()
    drawing = Drawing(760, "Rows that two n-grams read in four tables: some shared, others not")
    drawing.legend(16, 12, [(0, "read after 0 7 3"), (1, "read after 7 3 7"), (2, "both"),
                            ("off", "another row")])  # fmt: skip
    column, cell, top = 0, 18.0, 70.0
    for order, primes in enumerate(PRIMES, start=2):
        for prime in primes:
            first, second = found[1][column], found[2][column]
            x = 16.0 + column * 190
            drawing.text(x, top - 22, f"{order} tokens", "head")
            drawing.text(x, top - 7, f"mod {prime}", "note")
            for row in range(prime):
                readers = [fill for fill, read in enumerate((first, second)) if read == row]
                kind = 2 if len(readers) == 2 else readers[0] if readers else "off"
                words = f"row {row}" if readers else ""
                drawing.rect(x, top + row * cell, 120, cell - 2, kind, words)
            column += 1
    return drawing


def memory_gates() -> Drawing:
    """Draw how far Engram's gate opens, over the cosine of a looked-up key and the stream."""
    drawing = Drawing(620, "Gate of a looked-up row, by how much its key resembles the stream")
    axes = Axes(drawing, 60.0, 62.0, 530.0, 250.0, (-1, 1), (0, 1))
    axes.frame((-1, -0.5, 0, 0.5, 1), (0, 0.25, 0.5, 0.75, 1),
               ("cosine of the key and the stream", "gate"))  # fmt: skip
    widths = {64: "s0", 1024: "s1"}
    drawing.legend(60, 12, [(kind, f"D = {width}") for width, kind in widths.items()])
    cosines = torch.linspace(-1, 1, 257, dtype=torch.float64)
    for width, kind in widths.items():
        x_D, other_D = torch.zeros(2, width, dtype=torch.float64)
        x_D[0::2], other_D[1::2] = 1.0, 1.0
        key_TD = cosines[:, None] * x_D + (1 - cosines**2).sqrt()[:, None] * other_D
        one_TD, weight_1D = torch.ones_like(key_TD), torch.ones(1, width, dtype=torch.float64)
        x_T1D = x_D.expand(len(cosines), 1, width)
        gates = memory_gate(key_TD[:, None], one_TD, x_T1D, weight_1D, weight_1D)[:, 0, 0]
        axes.line(zip(cosines.tolist(), gates.tolist(), strict=True), kind)
        at = int((cosines - width**-0.5).abs().argmin())
        axes.dot(float(cosines[at]), float(gates[at]), 0 if width == 64 else 1)
    drawing.text(
        60,
        368,
        "Squares: a cosine of 1 / sqrt(D), usual for a key that has nothing to do with the stream.",
        "note",
    )
    return drawing


def four_streams() -> Drawing:
    """Draw what the first two layers of a model read of four streams, and leave in them."""
    mhc = HyperConnectionConfig(streams=4)
    model = HybridLM(replace(small("AF"), mhc=mhc)).double()
    initialise(model, model.init_rules(), seed=0)
    drawing = Drawing(760, "What two layers read of four streams, and what they leave in them")
    layers = [part for part in model.modules() if isinstance(part, HyperConnection)]
    for number, layer in enumerate(layers[:2]):
        left, top = 16.0 + number * 376, 50.0
        u_D, post_n, res_nn = layer.read(torch.eye(4, layer.config.dim).double())
        drawing.text(left, 22, f"layer {number}", "head")
        drawing.text(left + 62, 40, "reads", "note")
        drawing.text(left + 196, 40, "writes, and mixes", "note")
        drawing.rect(left + 108, top, 70, 4 * 34 - 6, 8, "mixer")
        for i in range(4):
            y = top + i * 34
            drawing.rect(left, y, 56, 28, i, f"stream {i}")
            drawing.text(left + 64, y + 19, f"{u_D[i].item():.2f}")
            drawing.text(left + 186, y + 19, f"{post_n[i].item():.2f}")
            for j in range(4):
                share = res_nn[i, j].item()
                drawing.rect(left + 224 + j * 34, y, 32, 28, j if share > 0.5 else "off",
                             f"{share:.2f}" if share > 0.5 else "")  # fmt: skip
    return drawing


def ablation_intervals() -> Drawing:
    """Draw the change in bits per byte by each feature, with its 95 % interval."""
    record = read("ablation")
    lines = [line for line in lines_of(record) if line.variant != BASE]
    ends = [
        x for n in lines for x in (n.difference - (n.within or 0), n.difference + (n.within or 0))
    ]
    low, high = min(ends) - 0.005, max(ends) + 0.005
    drawing = Drawing(760, "Change in bits per byte by each feature, with a 95 % interval")
    axes = Axes(drawing, 110.0, 50.0, 500.0, 26.0 * len(lines), (low, high), (len(lines), 0))
    kinds = {"better": 3, "worse": 1, "within noise": 8}
    drawing.legend(110, 12, [(fill, name) for name, fill in kinds.items()])
    axes.line([(0, 0), (0, len(lines))], "line")
    for i, line in enumerate(lines):
        fill, within = kinds[line.verdict], line.within or 0
        x, y = axes.at(line.difference - within, i + 0.5)
        drawing.text(14, y + 4, line.variant, "head")
        drawing.rect(x, y - 4, axes.at(line.difference + within, 0)[0] - x, 8, fill)
        axes.dot(line.difference, i + 0.5, "edge", 6)
        drawing.text(624, y + 4, f"{line.difference:+.3f} ± {within:.3f}", "note")
    bottom = axes.top + axes.high
    drawing.text(axes.at(0, 0)[0] - 32, bottom + 18, "the base", "note")
    drawing.text(axes.left, bottom + 18, "fewer bits", "note")
    drawing.text(axes.left + axes.wide, bottom + 18, "more bits", "note", end=True)
    return drawing


def several_inputs() -> Drawing:
    """Draw the loss over a run of Mamba-3 with one input a token and with four."""
    record = read("mimo")
    lines = []
    for kind, run in zip(("s1", "s0"), record["runs"], strict=True):
        part = record["steps"] / len(run["losses"])
        lines.append((kind, [((i + 0.5) * part, loss) for i, loss in enumerate(run["losses"])]))
    drawing = Drawing(760, "Loss of two models of equal size, by tenths of a run")
    drawing.legend(LEFT, 12, [("s1", "base: one input"), ("s0", "mimo: four inputs")])
    draw(drawing, [Panel("mean loss of each tenth", lines, "steps", record["steps"])])
    return drawing
