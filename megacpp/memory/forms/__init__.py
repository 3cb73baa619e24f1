"""Bytes of a step: stored, saved for the backward, needed while a part runs, and moved.

Parts of the model are traced (traced.py); what is stored, gathered and updated is in closed form.
"""
