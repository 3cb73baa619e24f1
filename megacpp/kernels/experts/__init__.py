"""Rows of experts: sorting, grouped products, the feed-forward, FP8.

May import: as megacpp/kernels.
Start reading: rows.py, then mlp.py.
"""
