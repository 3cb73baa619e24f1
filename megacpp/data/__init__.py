"""Corpora: sources, tokenizer, packing, shards, batches.

May import: megacpp/ below cli/.
Start reading: prepare.py, then shards.py.
"""
