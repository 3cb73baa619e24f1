"""Mamba-3 (M): a linear recurrence with a rotating state.

May import: as megacpp/blocks.
Start reading: module.py.
"""
