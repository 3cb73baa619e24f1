"""Multi-token prediction behind the trunk.

May import: as megacpp/blocks.
Start reading: module.py.
"""
