"""Mixture of experts (E): router, routed experts, shared experts.

May import: as megacpp/blocks.
Start reading: module.py, then router.py.
"""
