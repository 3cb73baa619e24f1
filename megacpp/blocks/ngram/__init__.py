"""Hashed n-grams added to the token embedding.

May import: as megacpp/blocks.
Start reading: module.py.
"""
