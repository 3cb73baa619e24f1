"""Trainer for hybrid language models in plain PyTorch.

May import: this file nothing; of each package its own `__init__.py` says it.
Start reading: ../train.py, then docs/architecture.md.
"""

__version__ = "0.1.0"
