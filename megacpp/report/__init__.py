"""The page about one run, or about several side by side.

`data.py` reads a run folder, `page.py` and `compare.py` make HTML of it. No torch import here.
"""
