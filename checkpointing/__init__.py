"""Activation memory: what the forward keeps for the backward, and what it does instead."""
