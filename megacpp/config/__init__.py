"""Configuration of a run: schema, presets, command line, files, and checks.

May import: megacpp/ without torch.
Start reading: schema.py, then presets.py.
"""
