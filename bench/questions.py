"""Tuning of the preset `tiny` to answer questions about its own corpus: right answers by step.

    python -m bench.questions            train what is missing, ask, and write docs/questions.json
    python -m bench.questions --show     the figures again, from that file

The questions are made from torch's headers (`megacpp.lessons.questions`), those that are asked from
documents that the default corpus holds out: neither run has read them. `runs/tiny` is the default
run of `train.py tiny`; it is trained if it isn't there. A run that was stopped goes on.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench import parser_of
from bench.variant_runs import ROOT, made_with, words
from megacpp.data.corpus import Corpus
from megacpp.data.prepare import ensure_corpus
from megacpp.data.sources import torch_headers
from megacpp.data.spec import CorpusSpec
from megacpp.lessons.questions import Question, questions_of

RECORD = ROOT / "docs/questions.json"
BASE, TUNED = ROOT / "runs/tiny", ROOT / "runs/tiny-chat"
HEADERS, TALKS = ROOT / "data/torch-headers", ROOT / "data/questions"
STEPS, EVERY, LONGEST = 60, 15, 40  # steps, steps between checkpoints, tokens of an answer
SETTINGS: dict[str, Any] = {  # of the preset tiny_chat
    "checkpoint.init": BASE,
    "data.path": TALKS,
    "run.dir": TUNED,
    "checkpoint.every": EVERY,
    "checkpoint.keep": 0,
    "run.sample_tokens": 0,
}


def questions() -> tuple[list[Question], list[Question]]:
    """Return questions to learn, and those that are asked."""
    held_out = set(Corpus(HEADERS, seq_len=1).validation_documents())
    files = sorted((torch_headers() / "ATen/ops").glob("*.h"))
    learned = questions_of(text for text in map(Path.read_text, files) if text not in held_out)
    known = {one["prompt"] for one in learned}
    return learned, [one for one in questions_of(sorted(held_out)) if one["prompt"] not in known]


def train() -> None:
    """Train the base if it is missing, then tune it, from its newest checkpoint on."""
    ensure_corpus(CorpusSpec(), HEADERS)
    if not (BASE / "final").is_dir():
        _run("tiny", "--run.dir", str(BASE))
    learned, _ = questions()
    TALKS.mkdir(parents=True, exist_ok=True)
    file = TALKS.with_suffix(".jsonl")
    file.write_text("".join(f"{json.dumps(one)}\n" for one in learned))
    if not (TALKS / "index.json").exists():
        TALKS.rmdir()
    ensure_corpus(CorpusSpec(str(file), tokenizer=str(HEADERS), validation_fraction=0.05), TALKS)
    if not (TUNED / "final").is_dir():
        _run("tiny_chat", *words(SETTINGS))


def _run(preset: str, *flags: str) -> None:
    subprocess.run([sys.executable, "train.py", preset, *flags], cwd=ROOT, check=True)


def answers(run: Path, checkpoint: str, asked: Sequence[Question]) -> list[str]:
    """Return the answers of a run's weights."""
    from megacpp.cli.weights import load_model
    from megacpp.data.conversations import ChatTemplate
    from megacpp.run.sample import generate

    tokenizer = Corpus(HEADERS, seq_len=1).tokenizer
    template = ChatTemplate(tokenizer)
    prompts = [template.prompt_ids([{"role": "user", "content": q["prompt"]}]) for q in asked]
    model = load_model(run, checkpoint, "cpu")
    made = generate(model, prompts, LONGEST, stop_id=template.end)
    return [tokenizer.decode(ids) for ids in made]


def measure() -> dict[str, Any]:
    """Return the figures: right answers before tuning and at each checkpoint."""
    learned, asked = questions()
    record: dict[str, Any] = {
        **made_with(),
        "base_loss": json.loads((BASE / "evaluations.jsonl").read_text().splitlines()[-1])["loss"],
        "learned": len(learned),
        "asked": len(asked),
        "most_frequent": Counter(one["completion"] for one in asked).most_common(1)[0],
        "right": {},
        "kinds_right": {},
    }
    for step in range(0, STEPS + 1, EVERY):
        run, checkpoint = (TUNED, str(step)) if step else (BASE, "final")
        found = answers(run, checkpoint, asked)
        right = [one for one, text in zip(asked, found, strict=True) if one["completion"] == text]
        record["right"][step] = len(right)
        record["kinds_right"][step] = len({one["completion"] for one in right})
        print(f"step {step}: {len(right)} of {len(asked)} right", flush=True)
    record["example"] = {**asked[-1], "answer": found[-1]}
    return record


def main() -> None:
    """Run the benchmark from the command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--show", action="store_true", help="the figures of the file, no runs")
    parser.add_argument("--record", type=Path, default=RECORD, help="file of the figures")
    options = parser.parse_args()
    if not options.show:
        train()
        options.record.write_text(json.dumps(measure(), indent=1) + "\n")
    record = json.loads(options.record.read_text())
    for step, right in record["right"].items():
        print(f"after {step:>2} steps: {right} of {record['asked']} right")


if __name__ == "__main__":
    main()
