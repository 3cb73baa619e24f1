"""Folders of Hugging Face's format, read and written without transformers.

May import: config, blocks, model, state, data, report, terminal and errors of megacpp; transformers
inside a function, for `--check`.
Start reading: classes.py (which settings are which class), links.py (which rows are which tensor),
then export.py (out) and load.py (in).
"""
