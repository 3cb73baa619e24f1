"""Bytes of a step: stored, saved for the backward, needed while a part runs, and moved.

Blocks are traced (traced.py); the parts around them are in closed form.
"""
