import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--golden-dir", default=None, help="folder of golden .safetensors files")
    parser.addoption(
        "--update-docs", action="store_true", help="rewrite the printed figures of the chapters"
    )
