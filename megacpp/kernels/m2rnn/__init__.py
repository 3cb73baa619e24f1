"""The M2RNN recurrence.

May import: as megacpp/kernels.
Start reading: reference.py, then chunks.py.
"""
