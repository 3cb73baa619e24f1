"""Command `megacpp`: its subcommands, which import inside functions, so that --help is instant.

May import: everything.
Start reading: main.py.
"""
