"""Model card of an exported folder: figures of the run that are on disk, and how to use it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megacpp.config.model import ModelConfig
from megacpp.data.tokenizer import CorpusTokenizer
from megacpp.interop.hf_class import HFClass
from megacpp.interop.places import WeightsFolder
from megacpp.model.count import count_parameters, short
from megacpp.report.files import EVALUATION, LAUNCH, STEP, STEPS, read_launch, read_rows

USE = """## Use

```python
from transformers import pipeline

generate = pipeline("text-generation", model="FOLDER"{trust})
print(generate("The", max_new_tokens=50)[0]["generated_text"])
```

{opening} {more}
"""
BEGINS = """\
The tokenizer puts the start of a document in front of a text; `add_special_tokens=False` leaves it
out."""
GGUF = (
    "llama.cpp doesn't know vocabularies that megacpp learned: before it converts this folder, its "
    "`get_vocab_base_pre` needs the hash of this one, and a splitting rule to go with it."
)
CODE = """\
The model's code is in this folder (`modeling_megacpp.py`); it needs torch and transformers alone.
`trust_remote_code=True` runs it: read it first. Servers that know models by class don't run it."""


def model_card(
    place: WeightsFolder,
    model: ModelConfig,
    one: HFClass,
    step: int,
    dtype: str,
    tokenizer: CorpusTokenizer,
    left_out: Sequence[str] = (),
) -> str:
    """Return the text of README.md.

    Args:
        place: folder of the weights.
        model: settings.
        one: class of transformers.
        step: number of steps that made the weights.
        dtype: of the exported weights.
        tokenizer: of the folder.
        left_out: what the folder lacks, a line each.
    """
    count = count_parameters(model)
    rows = {
        "class": f"`{one.name}`",
        "parameters": f"{short(count.total)}, {short(count.active)} active for a token",
        "blocks": f"`{model.pattern}` to depth {model.depth}, width {model.dim}",
        "dtype": dtype,
        "steps": f"{step:,}",
        **(_figures(place.run, step) if place.run else {}),
    }
    front = "---\nlibrary_name: transformers\npipeline_tag: text-generation\n---\n"
    table = "\n".join(f"| {key} | {value} |" for key, value in rows.items())
    less = "".join(f"- Left out: {line}.\n" for line in left_out)
    title = place.run.name if place.run else place.folder.name
    trust = ", trust_remote_code=True" if one.own else ""
    start = tokenizer.inner.id_to_token(tokenizer.specials.bos)
    opening = f"In training each document began with `{start}`; the tokenizer puts nothing there."
    words = {
        "{trust}": trust,
        "{opening}": BEGINS if tokenizer.opening else opening,
        "{more}": CODE if one.own else vocabulary_note(one, tokenizer),
    }
    use = USE
    for name, text in words.items():
        use = use.replace(name, text)
    return (
        f"{front}\n# {title}\n\nTrained with megacpp.\n\n| | |\n|---|---|\n{table}\n\n{less}{use}"
    )


def vocabulary_note(one: HFClass, tokenizer: CorpusTokenizer) -> str:
    """Return what llama.cpp lacks for a folder's vocabulary; empty for a vocabulary that it has.

    Args:
        one: class of transformers; llama.cpp has none of the models that leave with code.
        tokenizer: of the folder.
    """
    return GGUF if tokenizer.learned and not one.own else ""


def _figures(run: Path, step: int) -> dict[str, str]:
    """Return what a run's records say about its first `step` steps."""
    found: dict[str, str] = {}
    steps = [row for row in read_rows(run / STEPS, STEP) if row["step"] < step]
    if steps:
        found["tokens"] = f"{sum(row.get('tokens', 0) for row in steps):,}"
        if steps[-1].get("loss") is not None:
            found["loss of the last step"] = f"{steps[-1]['loss']:.4f}"
    measured = read_rows(run / "evaluations.jsonl", EVALUATION)
    last = next((row for row in reversed(measured) if row["step"] == step - 1), None)
    if last is not None and last.get("bits_per_byte") is not None:
        text = f"{last['bits_per_byte']:.4f} bits per byte"
        bars = [
            f"{bar} {last[key]:.4f}"
            for bar in ("gzip", "xz")
            if last.get(key := f"{bar}_bits_per_byte") is not None
        ]
        found["held-out text"] = f"{text} ({', '.join(bars)})" if bars else text
    launch = read_launch(run / LAUNCH)
    config = launch.get("config") or {}
    if "data" in config:
        found["corpus"] = f"`{Path(config['data']['path']).name}`"
    if launch.get("git_commit"):
        found["code"] = f"`{launch['git_commit']}`"
    return found
