"""M2RNN recurrence: a matrix state per head, updated through a tanh.

May import: as megacpp/kernels.
Start reading: reference.py, then chunks.py.
"""
