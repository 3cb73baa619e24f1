"""Faults planted one at a time in the core, and the tests that find them: `make mutants`.

`faults.toml` lists faults, `generate.py` makes more by seed, `choose.py` picks the tests that
could find one, `judge.py` plants it in a copy of the checkout and runs them.
"""
