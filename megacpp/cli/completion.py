"""Command `megacpp completion`: words for a shell, from the tables of commands and settings.

The scripts call `megacpp completion words` at every TAB, so they include new flags. No torch
import.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from megacpp.cli import main
from megacpp.config.help import SHORT, headline
from megacpp.config.presets import PRESETS
from megacpp.config.schema import Config
from megacpp.config.settings import Setting, setting, settings_of

Word = tuple[str, str]  # word and its sentence

BASH = """_megacpp() {
    local IFS=$'\\n' line="${COMP_LINE:0:COMP_POINT}"
    COMPREPLY=($(megacpp completion words --line "$line" 2>/dev/null | cut -f1))
    [[ ${COMPREPLY-} == *= ]] && compopt -o nospace
    return 0
}
complete -o default -F _megacpp megacpp torchrun train.py ./train.py"""

ZSH = """#compdef megacpp torchrun train.py
_megacpp() {
    local -a found described
    found=(${(f)"$(megacpp completion words --line "${(j: :)words[1,CURRENT]}" 2>/dev/null)"})
    described=(${${found//:/\\\\:}/$'\\t'/:})
    (( $#described )) && _describe 'megacpp' described || _files
}
compdef _megacpp megacpp torchrun train.py"""

FISH = """function __megacpp
    megacpp completion words --line (commandline -cp) 2>/dev/null
end
for program in megacpp torchrun train.py
    complete -c $program -a '(__megacpp)'
end"""

SCRIPTS = {"bash": BASH, "zsh": ZSH, "fish": FISH}


@dataclass(frozen=True)
class CompletionArgs:
    """Shell, or the line that a shell completes."""

    shell: Literal["bash", "zsh", "fish", "words"] = setting(
        words="Shell whose script is printed; words: what the script asks.", positional=True
    )
    line: str = setting("", "The command line up to the cursor, for `words`.")


def completion(args: CompletionArgs) -> int:
    """Print a script that completes commands, presets and flags, also for `torchrun train.py`.

    bash: eval "$(megacpp completion bash)"           in ~/.bashrc
    zsh:  eval "$(megacpp completion zsh)"            in ~/.zshrc, behind compinit
    fish: megacpp completion fish | source            in ~/.config/fish/config.fish
    """
    if args.shell != "words":
        print(SCRIPTS[args.shell])
        return 0
    words = args.line.split(" ")
    sys.stdout.writelines(f"{word}\t{sentence}\n" for word, sentence in candidates(words))
    return 0


def candidates(words: Sequence[str]) -> Iterator[Word]:
    """Yield completions of the last word, with a sentence for each.

    Args:
        words: a command line, program first; the last word is the one at the cursor.
    """
    before, current = [word for word in words[:-1] if word], words[-1]
    yield from (word for word in _all(before, current) if word[0].startswith(current))


def _all(before: list[str], current: str) -> Iterator[Word]:
    """Yield every word that is legal after others."""
    scripts = [i for i, word in enumerate(before) if word.endswith("train.py")]
    if scripts:
        yield from _behind(before[scripts[0] + 1 :], current, {}, runs=True)
        return
    if not before or before[0].rpartition("/")[2] != "megacpp":
        return  # another program: the shell completes files
    typed = before[1:]
    for size in (2, 1):
        name = " ".join(typed[:size])
        if name in main.COMMANDS:
            command = main.COMMANDS[name]
            yield from _behind(typed[size:], current, command.settings(), command.runs)
            return
    depth = len(typed)
    for name, command in main.COMMANDS.items():
        parts = name.split()
        if parts[:depth] == typed:
            yield parts[depth], command.help


def _behind(typed: list[str], current: str, own: dict[str, Setting], runs: bool) -> Iterator[Word]:
    """Yield words that are legal after a command or a script."""
    settings = {one.flag: one for one in own.values()}
    settings |= {one.flag: one for one in settings_of(Config).values()} if runs else {}
    flag, equals, _ = current.partition("=")
    if equals and flag in settings:
        yield from ((f"{flag}={value}", words) for value, words in _values(settings[flag]))
        return
    if typed and typed[-1] in settings and settings[typed[-1]].kind is not bool:
        yield from _values(settings[typed[-1]])
        return
    if typed and typed[-1] == "--config":
        return
    if not current.startswith("-"):
        if runs and not typed:
            yield from ((name, headline(name)) for name in PRESETS)
        for one in own.values():
            if one.positional:
                yield from _values(one)
        return
    yield from SHORT.items() if runs else ()
    yield "--help", "Print all flags and leave."
    for flag, one in settings.items():
        if not one.positional:
            yield flag, one.words
            if one.kind is bool and one.default:
                yield one.negative, one.words


def _values(one: Setting) -> Iterator[Word]:
    yield from ((choice, one.words) for choice in one.choices)
