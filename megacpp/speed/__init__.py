"""Seconds of a training step before it runs: hardware, operators, collectives, streams, pipelines.

May import: megacpp/ without torch (config, errors, model, blocks, memory).
Start reading: step.py, then operators.py and streams.py.
"""
