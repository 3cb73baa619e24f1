"""Benchmarks; each file is a program, `python -m bench.NAME --help`."""

import argparse
from collections.abc import Sequence


def parser_of(words: str | None) -> argparse.ArgumentParser:
    """Return a parser whose help begins with a program's docstring as it stands."""
    return argparse.ArgumentParser(description=words, formatter_class=argparse.RawTextHelpFormatter)


def asked(words: str | None, names: Sequence[str] = ()) -> tuple[list[str], bool]:
    """Return the chosen names, all if none is given, and whether to write what is made of them.

    Args:
        words: the program's docstring.
        names: what it can make.
    """
    parser = parser_of(words)
    if names:
        parser.add_argument(
            "name", nargs="*", help=f"what to make, all by default: {', '.join(names)}"
        )
    parser.add_argument("--write", action="store_true", help="write the files of docs/")
    given = parser.parse_args()
    chosen = vars(given).get("name") or list(names)
    if wrong := [name for name in chosen if name not in names]:
        parser.error(f"no such name: {', '.join(wrong)}")
    return chosen, given.write
