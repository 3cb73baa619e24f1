"""Command `megacpp export`: weights of a run in another program's format."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megacpp.cli.weights import find_weights, run_folder, tokenizer_path
from megacpp.config.settings import setting
from megacpp.errors import config_error
from megacpp.terminal.screen import wrapped


@dataclass(frozen=True)
class ExportArgs:
    """Weights, format, dtype and folder of an export."""

    run: str = setting(
        words="Folder or URL of the run, its final/ or one of its checkpoints.", positional=True
    )
    out: str = setting(words="Folder to write; it must not exist, or be empty.")
    to: Literal["hf", "hf-code"] = setting(
        "hf", "Format: Hugging Face's; hf-code brings the model's own code whatever its settings."
    )
    dtype: Literal["bf16", "fp32"] = setting("bf16", "Dtype of the weights.")
    checkpoint: str = setting(
        "", "Weights of a run: final, latest or a step (empty: final, or latest without it)."
    )
    dropless: bool = setting(
        False, "Accept that the exported model drops no token although training did."
    )
    file_gb: float = setting(4.0, "Most of one weights file.", "GB", above=0)
    check: bool = setting(False, "Compare the folder with transformers, which must be installed.")


def export(args: ExportArgs) -> int:
    """Write weights as a folder that transformers, vLLM and others load.

    The class of the model follows from its settings and is printed with the reason; Mamba-3 and
    M2RNN leave with their code. Other settings that no class expresses are refused, or leave with
    code too by --to hf-code.
    """
    from megacpp.interop.classes import as_exported, class_of, dropped
    from megacpp.interop.places import check_target, locate, read_model

    check_target(Path(args.out))
    place = locate(_chosen(args), "run")
    if place.kind == "hf":
        raise config_error("run", args.run, "is such a folder already", "give the folder of a run")
    model = read_model(place)
    one, reason = class_of(model, args.dropless, args.to == "hf-code")
    print("\n".join(wrapped(f"class {one.name}: {reason}")))
    less = dropped(model)
    for text in less:
        print("\n".join(wrapped(f"left out: {text}")))
    from megacpp.data.tokenizer import CorpusTokenizer
    from megacpp.interop.card import vocabulary_note
    from megacpp.interop.export import DTYPES, HFTarget, lines_of, verify_place, write_hf_folder

    tokenizer = CorpusTokenizer.load(_tokenizer(place.folder, place.run))
    verify_place(place)
    target = HFTarget(Path(args.out), one, DTYPES[args.dtype], int(args.file_gb * 1e9), tuple(less))
    sizes = write_hf_folder(place, as_exported(model, one.own), tokenizer, target)
    print("\n".join([f"{args.out}:", *lines_of(sizes)]))
    if note := vocabulary_note(one, tokenizer):
        print("\n".join(wrapped(note)))
    if args.check:
        from megacpp.interop.compare import compared

        print("\n".join(wrapped(compared(Path(args.out), "out"))))
    return 0


def _chosen(args: ExportArgs) -> str:
    """Return the folder of the requested weights."""
    if not args.checkpoint:
        return args.run
    return str(find_weights(run_folder(args.run, args.checkpoint), args.checkpoint))


def _tokenizer(folder: Path, run: Path | None) -> Path:
    """Return the tokenizer beside the weights, or that of the run."""
    beside = folder / "tokenizer.json"
    if beside.is_file():
        return beside
    if run is None:
        raise config_error("run", folder, "has no tokenizer.json", "keep it in its run's folder")
    return tokenizer_path(run)
