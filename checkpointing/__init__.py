"""Activation memory: tensors that a forward saves for its backward, and the alternatives.

May import: megacpp/ and checkpointing/.
Start reading: apply.py, then recompute.py.
"""
