"""Manifold-constrained hyper-connections: several residual streams around every block.

May import: as megacpp/blocks.
Start reading: module.py.
"""
