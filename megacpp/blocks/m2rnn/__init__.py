"""M2RNN (R): a recurrence over matrix states.

May import: as megacpp/blocks.
Start reading: module.py.
"""
