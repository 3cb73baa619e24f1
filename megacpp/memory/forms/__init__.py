"""Closed forms of a step's bytes: what is stored, kept, needed while a part runs, moved.

Blocks of the kinds in traced.py have no form: their bytes are those of a trace.
"""
