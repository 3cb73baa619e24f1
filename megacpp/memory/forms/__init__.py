"""Closed forms of a step's bytes: what is stored, kept, needed while a part runs, moved."""
