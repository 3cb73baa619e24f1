"""HTML page about one run, or about several runs compared.

May import: config, data, launch, memory, model, run, speed; no file here imports torch.
Start reading: data.py (what is read of a run folder), then page.py and compare.py (HTML).
"""
