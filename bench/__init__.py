"""Benchmarks; each file is a program, `python bench/NAME.py --help`."""

import argparse


def parser_of(words: str | None) -> argparse.ArgumentParser:
    """Return a parser whose help begins with a program's docstring as it stands."""
    return argparse.ArgumentParser(description=words, formatter_class=argparse.RawTextHelpFormatter)
