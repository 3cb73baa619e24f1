"""Ranks without peers: fake groups and tensors, dry runs, collective logs, and what is drawn of them.

May import: as parallel.
Start reading: fake.py, then dry_run.py.
"""
