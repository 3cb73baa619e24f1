"""Launch of a run: launcher, memory gate, auto-fit, trial steps, header, launch record.

May import: megacpp/ below cli/.
Start reading: start.py, then gate.py.
"""
