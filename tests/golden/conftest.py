from pathlib import Path

import pytest

DEFAULT = Path(__file__).parent / "data"


def golden_files(config: pytest.Config) -> list[Path]:
    """Every safetensors file of --golden-dir."""
    folder = Path(config.getoption("--golden-dir") or DEFAULT)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise pytest.UsageError(f"--golden-dir {folder}: holds no .safetensors file")
    return files
