"""Gated DeltaNet (G): short convolution, gated delta rule, gated norm.

May import: as megacpp/blocks.
Start reading: module.py.
"""
