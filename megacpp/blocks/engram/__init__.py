"""Engram: gated memories of hashed n-grams in front of some A blocks.

May import: as megacpp/blocks.
Start reading: module.py.
"""
