"""Attacks on running processes: what `make torture` runs, and short forms of it for the suite."""
