"""Hybrid language model on one device: pattern, blocks in a row, documents, head, losses.

May import: torch, megacpp/config, megacpp/blocks, megacpp/kernels; nothing of ranks.
Start reading: hybrid.py, then block.py.
"""
