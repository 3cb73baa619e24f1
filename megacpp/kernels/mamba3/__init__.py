"""Mamba-3 scan: a state per head that decays, rotates and is written by every token.

May import: as megacpp/kernels.
Start reading: reference.py, then chunks.py.
"""
