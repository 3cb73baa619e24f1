"""Activation memory: what a forward keeps for its backward, and what it does instead.

May import: megacpp/ and checkpointing/.
Start reading: apply.py, then rebuild.py.
"""
