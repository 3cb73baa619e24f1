"""Training state: saving, verifying, resuming, exporting.

May import: megacpp/ below cli/.
Start reading: checkpoint.py.
"""
