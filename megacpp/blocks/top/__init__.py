"""Token order prediction: a second unembedding that learns which tokens come sooner.

May import: as megacpp/blocks.
Start reading: module.py.
"""
