"""The end of a run: final weights with their tokenizer, and a sample of what was learned."""

from __future__ import annotations

import shutil
from pathlib import Path

from megacpp.config import Config
from megacpp.data.batches import Corpus
