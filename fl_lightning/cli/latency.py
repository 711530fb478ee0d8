"""The command ``fl-lightning latency``: measures the latency of a search space's networks on this device.

The options that name the networks also serve ``search``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from jsonargparse import ArgumentParser
from jsonargparse.typing import PositiveInt

from fl_lightning.cli.checks import check_writable
from fl_lightning.core.errors import ConfigurationError
from fl_lightning.nas.cost.latency import LatencyTable
from fl_lightning.nas.cost.latency_measurement import TimingPlan, measure_latency
from fl_lightning.nas.spaces.cells import CellSpace
from fl_lightning.nas.spaces.named import NAMES, named_space
from fl_lightning.nas.spaces.space import Networks
from fl_lightning.reports.screen import StatusLines

# a table with a larger relative error, or a smaller rank correlation, is of little use for a constraint
_MOST_ERROR, _LEAST_RANK = 0.15, 0.9


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of ``fl-lightning latency`` to its parser."""
    add_networks(parser)
    parser.add_argument("--out", type=str, required=True, help="The JSON file to write.")
    parser.add_argument("--device", type=str, default="cpu", help="cpu, cuda or cuda:1.")
    parser.add_argument("--batch_size", type=PositiveInt, default=1, help="Images at a time.")
    parser.add_argument(
        "--rounds",
        type=PositiveInt,
        default=10,
        help="Number of times that every network is timed.",
    )
    parser.add_argument(
        "--calibration", type=PositiveInt, default=12, help="Whole networks that the fit uses."
    )
    parser.add_argument(
        "--held_out", type=PositiveInt, default=20, help="Other networks, to measure the error."
    )
    parser.add_argument("--seed", type=int, default=0, help="Seed of the choice of networks.")


def latency(given: Any) -> None:
    """Run ``fl-lightning latency``, which times networks on a device and writes a table of latencies."""
    networks = networks_of(given)
    out = Path(given.out)
    if not out.parent.is_dir():
        raise ConfigurationError(f"out: {out} cannot be written: there is no folder {out.parent}")
    check_writable("out", out)
    table = measure_latency(
        networks,
        device=_device(given.device),
        batch_size=given.batch_size,
        calibration=given.calibration,
        held_out=given.held_out,
        pace=TimingPlan(rounds=given.rounds),
        seed=given.seed,
        say=show_progress,
    )
    show_progress("done: all networks are timed")
    table.write(given.out)
    print("\n".join(_lines(table, given)))


def _lines(table: LatencyTable, given: Any) -> list[str]:
    accuracy = table.accuracy
    lines = [
        f"device:   {table.where}",
        f"blocks:   {len(table.blocks)} kinds; {table.rest:.3g} ms for the rest of a network",
        f"fit:      {table.scale:.3g} x sum {table.shift:+.3g} ms, on {given.calibration} networks",
        f"accuracy: {accuracy}",
        f"written:  {given.out}",
    ]
    if accuracy.mape > _MOST_ERROR or accuracy.spearman < _LEAST_RANK:
        lines.append(
            "note:     an error below 15% and a rank correlation above 0.9 are usual. Measure on\n"
            "          an idle device, with more --rounds, or a space whose networks differ more"
        )
    return lines


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigurationError(f"device must be cpu, cuda or cuda:1, got {name!r}") from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigurationError(f"device must be cpu or cuda for latencies, got {name!r}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigurationError(
            f"device: there is no {name!r} here; PyTorch sees {torch.cuda.device_count()} GPUs"
        )
    return device


_PROGRESS = StatusLines()


def show_progress(text: str) -> None:
    """Show a line of progress at the bottom of the terminal; the last line, which begins with ``done``, stays."""
    _PROGRESS.open()
    if text.startswith("done"):
        _PROGRESS.close(text)
    else:
        _PROGRESS.show(text)


def add_networks(parser: ArgumentParser, *, required: bool = True) -> None:
    """Add options that choose a search space, and its networks' sizes, to the parser of ``latency`` or ``search``.

    Args:
        parser: parser of the command.
        required: whether ``--space`` must be given; false if the command has another way to name networks.
    """
    parser.add_argument(
        "--space",
        type=str if required else str | None,
        **({"required": True} if required else {"default": None}),
        help=f"One of {', '.join(NAMES)}, a class of your own, or a YAML file with class_path and "
        "init_args.",
    )
    for name, default, what in (
        ("side", 32, "Pixels of an image's side."),
        ("in_channels", 3, "Channels of an image."),
        ("num_classes", 10, "Classes to tell apart."),
    ):
        parser.add_argument(f"--{name}", type=PositiveInt, default=default, help=what)
    for name, what in (("channels", "of the first cells"), ("cells", "how many, or each stage")):
        parser.add_argument(
            f"--{name}",
            type=PositiveInt | None,
            default=None,
            help=f"In spaces of cells: {what}. As the space has them if null.",
        )
    parser.add_argument(
        "--num_threads", type=PositiveInt | None, default=None, help="Threads on a CPU."
    )


def networks_of(given: Any) -> Networks:
    """Return the search space and its networks' sizes by parsed options; set PyTorch's number of threads.

    Raises:
        ConfigurationError: if there is no such space, or options of cells are set for a space without cells.
    """
    space = named_space(given.space)
    options = {name: int(given[name]) for name in ("in_channels", "num_classes")}
    for name in ("channels", "cells"):
        if given[name] is not None:
            if not isinstance(space, CellSpace):
                raise ConfigurationError(
                    f"{name}: {space.name} is not a space of cells: leave --{name} out, and set sizes in the "
                    "options of the space"
                )
            options[name] = int(given[name])
    if given.num_threads is not None:
        torch.set_num_threads(given.num_threads)
    return Networks(space, int(given.side), options)
