"""Print one line for each contract: `pytest tests/contracts -v`."""

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Count `-v` against the project's `-q`, which would take it back."""
    if config.option.verbose == 0:
        config.option.verbose = 1
