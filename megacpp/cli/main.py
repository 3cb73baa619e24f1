"""The `megacpp` command: a table of subcommands; each imports what it needs when it is called."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import megacpp
from megacpp.arguments import parse_args
from megacpp.errors import ConfigError, MegacppError, did_you_mean


@dataclass(frozen=True)
class Command:
    """`module.function(argv)` runs a command; with `args`, a dataclass of the module, parsed."""

    module: str
    function: str
    help: str
    args: str = ""


COMMANDS: dict[str, Command] = {
    "presets": Command("show", "presets", "list the presets with parameter counts"),
    "show": Command("show", "show", "model table, parameters and resolved settings of a preset"),
    "validate": Command("validate", "validate", "check a configuration without starting anything"),
    "explain": Command("explain", "explain", "where every parameter lies on a mesh, what moves"),
    "dry-run": Command("dry_run", "dry_run", "a step of any mesh: bytes stored, bytes sent"),
    "activations": Command(
        "activations", "activations", "what the forward keeps for the backward, by block and tensor"
    ),
    "plan": Command("plan", "command", "mesh, batch and policy for a cluster, best first"),
    "doctor": Command("doctor", "doctor", "what this machine has, what is missing, why it matters"),
    "data prepare": Command(
        "data", "prepare", "make a corpus: deduplicate, split, tokenize, pack", "PrepareArgs"
    ),
    "data inspect": Command(
        "data", "inspect", "show rows, document boundaries and masks as text", "InspectArgs"
    ),
    "memory trace": Command(
        "memory", "trace", "most bytes of a step of any mesh: by component, moment and tensor"
    ),
    "memory diff": Command(
        "memory_diff", "memory_diff", "what grew between two snapshots of a run, and why"
    ),
    "report": Command("report", "report", "a page about a run: loss, memory, seconds, events"),
    "sample": Command("sample", "sample", "generate text from a finished run"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand; returns the exit code (0 ok, 2 configuration, 3 data, ...)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_help())
        return 0
    group = {name: c for name, c in COMMANDS.items() if name.startswith(f"{arguments[0]} ")}
    if group and (len(arguments) < 2 or arguments[1] in ("-h", "--help")):
        print("\n".join(_table(group)))  # `megacpp data`: what there is of it
        return 0
    if arguments[0] == "--version":
        print(megacpp.__version__)
        return 0
    try:
        command, rest = _find(arguments)
        module = importlib.import_module(f"megacpp.cli.{command.module}")
        if command.args:
            program = f"megacpp {' '.join(arguments[: len(arguments) - len(rest)])}"
            rest = parse_args(getattr(module, command.args), rest, program)
        return int(getattr(module, command.function)(rest) or 0)
    except MegacppError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        return 0
    except KeyboardInterrupt:
        return 130


def _find(arguments: list[str]) -> tuple[Command, list[str]]:
    for words in (2, 1):
        name = " ".join(arguments[:words])
        if name in COMMANDS:
            return COMMANDS[name], arguments[words:]
    if any(known.startswith(f"{arguments[0]} ") for known in COMMANDS):
        name = " ".join(arguments[:2])
    raise ConfigError(f"command={name}: no such command. Fix: {did_you_mean(name, COMMANDS)}.")


def _table(commands: Mapping[str, Command]) -> list[str]:
    return [f"  {name:14} {command.help}" for name, command in commands.items()]


def _help() -> str:
    return "\n".join(
        [
            "usage: megacpp COMMAND [options]      (megacpp COMMAND --help explains each)",
            "",
            *_table(COMMANDS),
            "",
            "Training itself: torchrun --standalone --nproc-per-node=N train.py PRESET [flags]",
        ]
    )
