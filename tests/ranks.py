"""Functions on forked ranks: the tests' name of `megacpp.lessons.ranks`."""

from megacpp.lessons.ranks import *  # noqa: F403
