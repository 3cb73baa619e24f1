"""Dense feed-forward (F).

May import: as megacpp/blocks.
Start reading: module.py.
"""
