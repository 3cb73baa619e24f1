"""Bytes of a step: stored, kept, needed while a part runs, moved.

Blocks are traced (traced.py); what lies around them is in closed form.
"""
