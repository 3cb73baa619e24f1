"""Graders of docs/assignments: `make assignment N=3` grades an answer, one line per check."""
