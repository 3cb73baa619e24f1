"""Causal attention over packed documents.

May import: as megacpp/kernels.
Start reading: reference.py.
"""
