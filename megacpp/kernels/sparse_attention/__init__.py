"""Attention to chosen keys, the indexer that chooses them, and the loss that trains it.

May import: as megacpp/kernels.
Start reading: reference.py, then indexer.py.
"""
