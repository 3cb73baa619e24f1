"""Context parallelism: rows in parts, and what each kind of mixer exchanges.

May import: as parallel.
Start reading: layout.py, then heads.py.
"""
