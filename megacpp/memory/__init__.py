"""Bytes of a training step before it runs: estimate, planner, calibration, snapshots.

May import: megacpp/ without torch.
Start reading: estimate.py, then compose.py.
"""
