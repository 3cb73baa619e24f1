"""Text on a terminal: width, wrapped lines, tables, progress with ETA.

May import: the standard library and rich.
Start reading: screen.py.
"""
