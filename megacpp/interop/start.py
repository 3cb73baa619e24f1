"""First weights of a run (`checkpoint.init`): checked before ranks meet, read when they have."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from megacpp.config.mix import corpus_folders
from megacpp.config.schema import Config
from megacpp.data.shards import TOKENIZER
from megacpp.data.tokenizer import CorpusTokenizer
from megacpp.interop.load import load_weights, open_source
from megacpp.interop.places import WeightsFolder, locate, read_model, resumed_from, saved_step
from megacpp.model.hybrid import HybridLM
from megacpp.model.init import Slice
from megacpp.state.local_copy import shown


def check_start(config: Config, is_first: bool) -> None:
    """Compare the tensors of the folder with the model's, unless a checkpoint is resumed.

    With `checkpoint.init_check` the first rank compares logits with transformers' too.

    Raises:
        ConfigError: no weights are there, or a key of config.json has no setting of ours.
        CheckpointError: a tensor is missing, left over or of another shape.
    """
    if config.checkpoint.init and not resumed_from(config):
        place = locate(config.checkpoint.init, "checkpoint.init")
        open_source(place, config.model).stored.close()
        if config.checkpoint.init_check and is_first:
            from megacpp.interop.compare import compared  # seldom wanted

            print(compared(place.folder, "checkpoint.init", "checkpoint.init_check"), flush=True)


def start_from(model: HybridLM, config: Config, part: Callable[[Tensor], Slice]) -> list[str]:
    """Fill a model with the first weights; return lines for the header. Every rank calls it.

    Args:
        model: model on any mesh.
        config: configuration of the run.
        part: what this process stores of a tensor.

    Raises:
        CheckpointError: the folder is damaged.
    """
    place = locate(config.checkpoint.init, "checkpoint.init")
    source = open_source(place, config.model)
    load_weights(model, source, part, config.run.seed)
    step = saved_step(place)
    after = f" after {step:,} steps" if step else ""
    origin = shown(place.folder, config.checkpoint.init, place.run or place.folder)
    lines = [f"weights of {origin}{after}; the optimizer starts anew"]
    if source.grown:
        new = config.model.vocab_size - read_model(place).vocab_size
        lines.append(f"{new:,} rows of the vocabulary are new: the mean of the others, and noise")
    if source.unused:
        lines.append(f"not read: {source.unused[0]} and {len(source.unused) - 1} further tensors")
    return lines + other_words(place, config)


def other_words(place: WeightsFolder, config: Config) -> list[str]:
    """Return a warning if ids of the corpus mean other words than those of the weights.

    Args:
        place: folder of the weights, perhaps with a tokenizer.
        config: configuration of the run.
    """
    theirs, ours = place.folder / TOKENIZER, corpus_folders(config.data)[0] / TOKENIZER
    if not theirs.is_file() or not ours.is_file():
        return []
    found, wanted = (CorpusTokenizer.load(path).inner.get_vocab() for path in (theirs, ours))
    known = set(found.values())  # ids beyond them are new rows
    other = sum(found.get(word) != i for word, i in wanted.items() if i in known)
    if not other:
        return []
    return [f"{other:,} of {len(wanted):,} ids of the corpus are other words in {theirs}"]
