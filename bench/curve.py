"""Loss curve of a run as an image.

python bench/curve.py runs/tiny docs/tiny-loss.svg
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path


def main() -> None:
    """Run the program from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("run", type=Path, help="run folder")
    parser.add_argument("image", type=Path, help="file to write (.svg, .png)")
    options = parser.parse_args()
    draw(options.run, options.image)


def draw(run: Path, image: Path) -> None:
    """Draw bits per byte of each training step, their running mean, held-out text, gzip and xz."""
    import matplotlib

    matplotlib.use("agg")
    matplotlib.rcParams["svg.hashsalt"] = "megacpp"  # the same run gives the same file
    from matplotlib import pyplot

    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    held_out = [json.loads(line) for line in (run / "evaluations.jsonl").read_text().splitlines()]
    x = [s["step"] + 1 for s in steps]
    y = [s["bits_per_byte"] for s in steps]
    smooth = [sum(y[max(0, i - 9) : i + 1]) / len(y[max(0, i - 9) : i + 1]) for i in range(len(y))]
    figure, axes = pyplot.subplots(figsize=(7, 3.2), layout="constrained")
    axes.plot(x, y, color="0.8", linewidth=0.8, label="a step")
    axes.plot(x, smooth, color="tab:blue", label="mean of ten steps")
    last = held_out[-1]
    axes.plot(last["step"] + 1, last["bits_per_byte"], "o", color="tab:red", label="held out")
    bars = (("gzip", "-9, each document alone", "--"), ("xz", "-9, one stream", ":"))
    for program, how, style in bars:
        if bar := last.get(f"{program}_bits_per_byte"):
            axes.axhline(bar, color="tab:green", linestyle=style, label=f"{program} {how}")
    axes.set(xlabel="optimizer step", ylabel="bits per byte", ylim=(0, None))
    axes.legend(frameon=False)
    figure.savefig(image, metadata={"Date": None} if image.suffix == ".svg" else None)


if __name__ == "__main__":
    main()
