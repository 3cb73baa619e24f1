"""Small models, batches, ranks on one machine and comparisons, for the book's code and the tests.

A chapter of docs/ imports these by name, from any folder.

May import: all packages, as train.py does; nothing imports it.
Start reading: ranks.py, then runs.py.
"""
