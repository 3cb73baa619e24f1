"""Records of a step's allocations, by operator and component, in a run or without values.

May import: as checkpointing.
Start reading: meter.py, then recorder.py.
"""
