"""The model: pattern, blocks, heads and initialisation; single-device code, no rank in sight."""
