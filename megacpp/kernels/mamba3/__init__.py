"""The Mamba-3 scan.

May import: as megacpp/kernels.
Start reading: reference.py, then chunks.py.
"""
