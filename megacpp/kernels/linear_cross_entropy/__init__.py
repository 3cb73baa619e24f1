"""Cross entropy of a linear head, chunk by chunk; the full logits are never materialised.

May import: as megacpp/kernels.
Start reading: chunked.py.
"""
