"""Batches without a corpus: the tests' name of `megacpp.lessons.batches`."""

from megacpp.lessons.batches import *  # noqa: F403
