"""Expert parallelism: rows of tokens to the ranks of their experts, and back.

May import: as parallel.
Start reading: parallel.py, then exchange.py.
"""
