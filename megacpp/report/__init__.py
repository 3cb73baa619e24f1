"""HTML page about one run, or about several runs compared.

`data.py` reads a run folder, `page.py` and `compare.py` write HTML. No file here imports torch.
"""
