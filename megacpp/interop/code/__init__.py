"""Custom code of an exported folder: this package's own modules, joined into one file.

May import: as megacpp/interop; transformers in modeling.py and configuration.py, which nothing here
imports: bundle.py reads their text.
Start reading: modeling.py (the class), then bundle.py (how it gets everything that it needs).
"""
