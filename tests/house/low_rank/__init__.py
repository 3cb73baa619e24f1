"""Low-rank feed-forward (Z), a kind that a test adds to a copy of the repository.

May import: as megacpp/blocks. Start reading: module.py.
"""
