"""Short forms of the flips that `python -m tests.torture --only SDC` makes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks import run_ranks
from tests.torture.flips import flipped


@pytest.mark.parametrize("kind", ["moments", "activations"])
def test_no_flip_is_named_wrongly(kind: str, tmp_path: Path) -> None:
    """Flips of a seed are found alike each time; some activations change no gradient."""
    of_first, of_second = run_ranks(flipped, 2, kind, 4, tmp_path)
    assert of_first == of_second
    assert of_first["WRONG"] == 0 and of_first["found"] >= 2
