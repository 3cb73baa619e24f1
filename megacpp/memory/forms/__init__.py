"""Bytes of a step: stored, saved for the backward, needed while a part runs, and moved.

Parts of the model are traced (traced.py). What is stored, gathered and updated is in closed form:
it follows from shapes alone, and a trace of all of a model's units would cost seconds a candidate.

May import: as megacpp/memory.
Start reading: traced.py, then units.py.
"""
