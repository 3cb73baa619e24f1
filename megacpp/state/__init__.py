"""Saving, verifying, resuming and exporting the training state."""
