"""Benchmarks; each file is a program, `python bench/NAME.py --help`."""
