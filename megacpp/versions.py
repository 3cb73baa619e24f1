"""Supported versions of Python and torch, and those that the test suite ran on.

`python megacpp/versions.py [TORCH]` prints the constraints of one torch, for the Makefile. It runs
before anything is installed, perhaps on an older Python: it imports only `sys`.
"""

import sys

PYTHON = ((3, 11), (3, 14))  # oldest and newest

# torch -> Triton, as torch's CUDA builds require it (tests/install/requirements.json).
TRITON = {
    "2.11.0": "3.6.0",
    "2.12.1": "3.7.1",
    "2.13.0": "3.7.1",
    "2.14.1": "3.8.0",
    "2.15.0": "3.9.0",
}
TORCH = "2.13.0"  # `make` without TORCH=

# The whole test suite ran with these, on these versions of Python; docs/install.md has the rest.
TESTED_TORCH = ("2.11.0", "2.13.0", "2.15.0")
TESTED_PYTHON = ("3.11", "3.12", "3.13")


def constraints(torch, python=sys.version_info):
    """Return lines of a constraints file that fix torch and its Triton, for a Python version tuple.

    Raises:
        ValueError: an unsupported Python or torch, one line with the fix.
    """
    oldest, newest = PYTHON
    if not oldest <= tuple(python[:2]) <= newest:
        here, first, last = (".".join(map(str, v[:2])) for v in (python, oldest, newest))
        raise ValueError(
            f"PYTHON={sys.executable}: must be Python {first} to {last} (it is {here}). "
            f"Fix: use PYTHON=python{TESTED_PYTHON[0]}."
        )
    if torch not in TRITON:
        raise ValueError(
            f"TORCH={torch}: must be one of {', '.join(TRITON)}. Fix: use TORCH={TORCH}."
        )
    return [f"torch=={torch}", f"triton=={TRITON[torch]}"]


def minor(version):
    """Return the first two numbers of a version: (2, 13) for `2.13.0+cpu`."""
    return tuple(int(part) for part in version.split("+")[0].split(".")[:2])


def remark(torch):
    """Return supported and tested torch versions, after a warning about an unsupported one."""
    first, *_, last = TRITON
    words = f"supported: {first} to {last}; tested: {', '.join(TESTED_TORCH)}"
    if minor(torch) < minor(first):
        return "too old; " + words
    if minor(torch) > minor(last):
        return "newer than supported; " + words
    return words


if __name__ == "__main__":
    try:
        print("\n".join(constraints(sys.argv[1] if len(sys.argv) > 1 else TORCH)))
    except ValueError as error:
        sys.exit(f"error: {error}")
