"""Differences between tensors: the tests' name of `megacpp.lessons.differences`."""

from megacpp.lessons.differences import *  # noqa: F403
