"""Metrics, launch record, evaluation and sampling of a run."""
