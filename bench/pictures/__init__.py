"""Pictures of the book, drawn from the program's own data: `python -m bench.pictures --write`."""
