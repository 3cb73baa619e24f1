"""Attention (A): grouped-query, multi-head latent, and sparse with an indexer.

May import: as megacpp/blocks.
Start reading: gqa.py.
"""
