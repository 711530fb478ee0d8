"""Draw curves of runs from their event files: ``python -m benchmarks.plot_runs out.png run …``."""

from __future__ import annotations

import argparse
from pathlib import Path

from matplotlib.figure import Figure

from fl_lightning.experiments.results import curves


def main() -> None:
    """Write the figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="the PNG to write")
    parser.add_argument("runs", type=Path, nargs="+", help="folders with event files")
    parser.add_argument("--labels", nargs="+", help="names of the runs in the legend")
    options = parser.parse_args()
    labels = options.labels or [str(run) for run in options.runs]

    figure = Figure(figsize=(9, 3.4), layout="constrained")
    panels = figure.subplots(1, 2)
    for panel, metric in zip(panels, ("val/accuracy", "train/loss"), strict=True):
        for run, label in zip(options.runs, labels, strict=True):
            curve = curves(run)[metric]
            panel.plot(list(curve), list(curve.values()), marker=".", label=label)
        panel.set(xlabel="round", title=metric)
        panel.grid(alpha=0.3)
    panels[0].legend(frameon=False)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(options.out, dpi=130)


if __name__ == "__main__":
    main()
