"""Gated delta rule: a matrix state that decays, erases and writes.

May import: as megacpp/kernels.
Start reading: reference.py, then chunks.py, then segments.py.
"""
