"""Parameter groups, Muon, AdamW, schedules, clipping.

May import: megacpp/ and optim/.
Start reading: groups.py, then muon_adamw.py.
"""
