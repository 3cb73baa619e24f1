"""Loss curve of a run: the values that docs/pictures/tiny-loss.svg shows.

    python -m bench.curve runs/tiny docs/tiny-loss.json

`python -m bench.pictures --write tiny-loss` then draws it.
"""

from __future__ import annotations

import json
from pathlib import Path

from bench import parser_of


def main() -> None:
    """Run the program from the command line."""
    parser = parser_of(__doc__)
    parser.add_argument("run", type=Path, help="run folder")
    parser.add_argument("values", type=Path, help="JSON to write")
    options = parser.parse_args()
    options.values.write_text(json.dumps(curve(options.run)) + "\n")


def curve(run: Path) -> dict[str, float | list[float]]:
    """Return bits per byte: of each training step, of held-out text, of gzip and of xz."""
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    last = json.loads((run / "evaluations.jsonl").read_text().splitlines()[-1])
    return {
        "bits_per_byte": [round(step["bits_per_byte"], 4) for step in steps],
        "held_out": round(last["bits_per_byte"], 4),
        **{name: round(last[f"{name}_bits_per_byte"], 4) for name in ("gzip", "xz")},
    }


if __name__ == "__main__":
    main()
