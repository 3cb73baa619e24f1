"""Ranks without peers: fake groups and tensors, dry runs, collective logs, drawings.

May import: as parallel.
Start reading: fake.py, then dry_run.py.
"""
