"""Reading and mixing of residual streams, and doubly stochastic matrices.

May import: as megacpp/kernels.
Start reading: reference.py.
"""
