"""Bytes of a training step in closed form, without torch."""
