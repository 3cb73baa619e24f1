"""Small models: the tests' name of `megacpp.lessons.models`."""

from megacpp.lessons.models import *  # noqa: F403
