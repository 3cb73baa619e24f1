"""Pure-PyTorch, DTensor-native trainer for hybrid language models."""

__version__ = "0.1.0"
