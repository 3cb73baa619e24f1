"""Tasks of lm-eval made of texts of the default corpus, headers of torch that no test trains on."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

LINES = [
    line
    for header in sorted((Path(torch.__file__).parent / "include/c10/util").glob("*.h"))[:4]
    for line in header.read_text().split("\n")
    if line.strip()
][:150]


def last_words(words: int, most: int) -> list[dict[str, Any]]:
    """Return the lines of so many words or more, the last one apart if it has few characters."""
    some = [line.rstrip().rsplit(" ", 1) for line in LINES if line.strip().count(" ") >= words]
    return [{"start": start, "end": end} for start, end in some if len(end) <= most]


TASKS: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "lines": (  # which line comes next
        """output_type: multiple_choice
doc_to_text: "{{before}}"
doc_to_target: "{{right}}"
doc_to_choice: "{{lines}}"
target_delimiter: ""
metric_list: [{metric: acc}, {metric: acc_norm}]""",
        [
            {
                "before": "\n".join(LINES[n : n + 2]) + "\n",
                "lines": [LINES[n + 2 + k] for k in (9, 0, 5, 7)],
                "right": 1,
            }
            for n in range(0, 40, 3)
        ],
    ),
    "cloze": (  # the last word of a line
        """output_type: loglikelihood
doc_to_text: "{{start}}"
doc_to_target: "{{end}}"
target_delimiter: " "
metric_list: [{metric: perplexity, higher_is_better: false}, {metric: acc}]""",
        last_words(2, 4),
    ),
    "answers": (
        """output_type: generate_until
doc_to_text: "{{start}}"
doc_to_target: "{{end}}"
generation_kwargs: {until: ["\\n", "e"], max_gen_toks: 12}
metric_list: [{metric: exact_match}]""",
        last_words(4, 80),
    ),
    "texts": (
        """output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: bits_per_byte}]""",
        [{"text": "\n".join(LINES[n : n + 12])} for n in range(0, 48, 12)],
    ),
}


def write_tasks(folder: Path, names: Iterable[str] = TASKS) -> None:
    """Write the YAML file of each task, and its documents."""
    folder.mkdir()
    for name in names:
        settings, rows = TASKS[name]
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / f"{name}.yaml").write_text(
            f"task: {name}\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {data}}}}}\n"
            f"test_split: test\n{settings}\nmetadata: {{version: 1.0}}\n"
        )


def printed_alike(a: float, b: float) -> bool:
    """Return whether lm-eval prints the same for two figures: four decimals."""
    return f"{a:.4f}" == f"{b:.4f}"
