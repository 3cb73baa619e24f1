"""Allocations of a step, recorded: by operator, by component, of a run or without values.

May import: as checkpointing.
Start reading: meter.py, then recorder.py.
"""
