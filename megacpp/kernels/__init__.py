"""Hot operations, one folder or file each: the reference, fast torch, Triton, libraries, support.

May import: torch, megacpp/config; optional packages inside functions.
Start reading: selection.py, then attention/causal.py.
"""
