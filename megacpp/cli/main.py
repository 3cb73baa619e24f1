"""Command `megacpp`: a table of subcommands; each imports its module when it is called."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, get_type_hints

import megacpp
from megacpp.config.arguments import parse_args, split_args
from megacpp.config.help import command_help, exit_code_lines
from megacpp.config.settings import Setting, settings_of
from megacpp.config.values import utf8_words
from megacpp.errors import ConfigError, MegacppError, config_error, did_you_mean, path_error
from megacpp.home import put_first
from megacpp.terminal.screen import (
    INTERRUPTED,
    NOBODY_READS,
    labelled,
    nobody_reads,
    show_any_text,
    wrapped,
)


@dataclass(frozen=True)
class Command:
    """Subcommand: `module.function` of this package, called with the dataclass of its flags.

    A function with a second parameter gets the words of preset and settings of a run, too.
    """

    place: str
    help: str

    @property
    def function(self) -> Callable[..., int | None]:
        """Function that runs the command."""
        module, _, name = self.place.partition(".")
        return getattr(importlib.import_module(f"megacpp.cli.{module}"), name)

    @property
    def args(self) -> Any:
        """Dataclass of the command's own flags."""
        return get_type_hints(self.function)["args"]

    @property
    def runs(self) -> bool:
        """Whether it also takes preset and settings of a run."""
        return len(inspect.signature(self.function).parameters) > 1

    def settings(self) -> dict[str, Setting]:
        """Return the command's own flags."""
        return settings_of(self.args, top=True)


COMMANDS: dict[str, Command] = {
    "presets": Command("show.presets", "list the presets with parameter counts"),
    "show": Command("show.show", "model table and resolved settings of a preset"),
    "validate": Command("validate.validate", "check a configuration without starting it"),
    "train": Command("train.train", "train a preset: checked first, then on N ranks"),
    "explain": Command("explain.explain", "where every parameter lies on a mesh, what moves"),
    "dry-run": Command("dry_run.dry_run", "a step of any mesh: bytes stored, bytes sent"),
    "activations": Command(
        "activations.activations", "what the forward keeps for the backward, by block and tensor"
    ),
    "plan": Command("plan.command", "mesh, batch and policy for a cluster, best first"),
    "speed": Command("speed.speed", "predicted time of a step on GPUs, by part"),
    "hardware": Command("speed.hardware", "figures of GPUs, nodes and networks, with sources"),
    "doctor": Command("doctor.doctor", "what this machine has, what is missing, why it matters"),
    "data prepare": Command("data.prepare", "make a corpus: deduplicate, split, tokenize, pack"),
    "data inspect": Command("data.inspect", "show rows, document boundaries and masks as text"),
    "memory trace": Command(
        "memory.trace", "most bytes of a step of any mesh: by component, moment and tensor"
    ),
    "memory generate": Command(
        "memory_generate.generate", "bytes of weights, caches and work of generation or evaluation"
    ),
    "memory diff": Command(
        "memory_diff.memory_diff", "what grew between two snapshots of a run, and why"
    ),
    "replay": Command("replay.replay", "recorded steps again, compared bit for bit"),
    "watch": Command("watch.watch", "runs live in the terminal, from their files"),
    "report": Command("report.report", "a page about a run, or several compared"),
    "sample": Command("sample.sample", "generate text from a finished run"),
    "chat": Command("chat.chat", "talk with a run tuned on conversations"),
    "eval": Command("eval.evaluate", "tasks of lm-eval on a run's weights"),
    "export": Command("export.export", "write a run's weights as a Hugging Face folder"),
    "completion": Command("completion.completion", "a script that completes words in your shell"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; return the exit code (0 ok, 2 configuration, 3 data, ...)."""
    show_any_text()
    try:
        put_first()  # import `parallel`, `optim` and `checkpointing` from this checkout
        code = _said(utf8_words(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
        return code
    except MegacppError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except (BrokenPipeError, SystemExit) as error:
        if not nobody_reads(error):
            raise
        return NOBODY_READS
    except OSError as error:  # an invalid path: too long, or a loop of links
        print(f"error: {path_error(error)}", file=sys.stderr)
        return ConfigError.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED


def _said(arguments: list[str]) -> int:
    """Print help or version, or run a command."""
    if arguments[:1] == ["help"]:  # as git has it
        arguments = [*arguments[1:], "--help"]
    if not arguments or arguments[0] in ("-h", "--help"):
        print("\n".join(_help()))
        return 0
    group = {name: c for name, c in COMMANDS.items() if name.startswith(f"{arguments[0]} ")}
    if group and (len(arguments) < 2 or arguments[1] in ("-h", "--help")):
        print("\n".join(_table(group)))  # `megacpp data`: list its subcommands
        return 0
    if arguments[0] == "--version":
        print(megacpp.__version__)
        return 0
    return _run(*find(arguments))


def _run(name: str, rest: list[str]) -> int:
    command = COMMANDS[name]
    if "--help" in rest or "-h" in rest:
        words = inspect.cleandoc(command.function.__doc__ or "")
        print(command_help(f"megacpp {name}", words, command.settings(), command.runs))
        return 0
    if command.runs:
        return int(command.function(*split_args(command.args, rest)) or 0)
    return int(command.function(parse_args(command.args, rest)) or 0)


def find(arguments: Sequence[str]) -> tuple[str, list[str]]:
    """Return the name of the command that the words start with, and the remaining words.

    Raises:
        ConfigError: there is no command of that name.
    """
    for words in (2, 1):
        name = " ".join(arguments[:words])
        if name in COMMANDS:
            return name, list(arguments[words:])
    both = " ".join(arguments[:2])
    pairs = [known for known in COMMANDS if " " in known]
    first = f"{arguments[0]} "
    if any(pair.startswith(first) for pair in pairs) or get_close_matches(both, pairs, 1, 0.8):
        name = both
    raise config_error("command", name, "no such command", did_you_mean(name, COMMANDS))


def _table(commands: Mapping[str, Command]) -> list[str]:
    return [
        line
        for name, command in commands.items()
        for line in labelled(f"  {name}", command.help, 18)
    ]


def _help() -> list[str]:
    return [
        *wrapped("usage: megacpp COMMAND [options]   (megacpp COMMAND --help explains each)"),
        "",
        *_table(COMMANDS),
        "",
        *wrapped("Training: torchrun --standalone --nproc-per-node=N train.py PRESET [flags]"),
        *wrapped("or megacpp train PRESET --nproc N [flags]; several machines: docs/launch"),
        "",
        *exit_code_lines(),
    ]


if __name__ == "__main__":
    raise SystemExit(main())
