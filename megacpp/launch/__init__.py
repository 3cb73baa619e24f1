"""The start of a run: ranks that agree before they compute, and the launcher of `megacpp train`.

Imports megacpp alone. Start reading at peers.py (train.py) or agent.py (`megacpp train`).
"""
