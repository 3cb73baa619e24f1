"""Run in progress: metrics, evaluation, sampling, health, goodput, failure, preemption.

May import: megacpp/ below cli/.
Start reading: records.py, then metrics.py.
"""
