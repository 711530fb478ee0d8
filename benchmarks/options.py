"""How the columns are run: the options that the command hands on to the process of each."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields

from benchmarks.workloads import WORKLOADS, Workload


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the measuring processes are told, besides the workload's name.

    Attributes:
        rounds: measured rounds, or turns of several where those are short, after one that warms up.
        length: rounds of the run whose first ones are measured: long runs repay a compiler.
        engine: `Federation`'s, if it has that option.
        precision: the Trainer's and the bare loop's.
        accelerator: ``cpu`` or ``gpu``, the Trainer's; the bare loop's data are there from the start.
        devices: the Trainer's; more than one need its strategy ``federated``.
        scale: factor on the numbers of clients and of each one's examples.
        pad: whether slots may pad batches, if that can be told: 1 or 0.
        seconds: after which a workload's measurement begins no further turn.
    """

    rounds: int = 3
    length: int = 2000
    engine: str = "auto"
    precision: str = "32-true"
    accelerator: str = "cpu"
    devices: int = 1
    scale: float = 1.0
    pad: int = 1
    seconds: float = 15.0

    def __post_init__(self) -> None:
        for name in ("rounds", "length", "devices", "scale"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")

    @property
    def device(self) -> str:
        """Where the bare loop trains."""
        return "cuda" if self.accelerator == "gpu" else "cpu"

    def workload(self, name: str) -> Workload:
        """Return a workload by name, at these options' scale."""
        return WORKLOADS[name].scaled(self.scale)

    def as_arguments(self) -> list[str]:
        """Return the words that `of_arguments` turns into the same options."""
        return [
            word
            for field in fields(self)
            for word in (f"--{field.name}", str(getattr(self, field.name)))
        ]

    @classmethod
    def of_arguments(cls, arguments: argparse.Namespace) -> Options:
        """Return what a parser with `add_options` has read."""
        return cls(**{field.name: getattr(arguments, field.name) for field in fields(cls)})


def add_options(parser: argparse.ArgumentParser) -> None:
    """Have a parser read the options."""
    default = Options()
    parser.add_argument(
        "--rounds",
        type=int,
        default=default.rounds,
        help="rounds to measure, or turns of short ones",
    )
    parser.add_argument(
        "--length",
        type=int,
        default=default.length,
        help="rounds of the run whose first ones are measured",
    )
    parser.add_argument(
        "--engine",
        choices=["auto", "sequential", "slots"],
        default=default.engine,
        help="how a federation trains a cohort, if this version can be told",
    )
    parser.add_argument("--precision", default=default.precision, help="e.g. bf16-mixed")
    parser.add_argument(
        "--accelerator",
        choices=["cpu", "gpu"],
        default=default.accelerator,
        help="what all but rivals train on",
    )
    parser.add_argument("--devices", type=int, default=default.devices, help="processes")
    parser.add_argument(
        "--scale", type=float, default=default.scale, help="factor on clients and examples"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=default.seconds,
        help="after which a workload's measurement begins no further turn",
    )
    parser.add_argument(
        "--pad", type=int, choices=[0, 1], default=default.pad, help="whether slots may pad batches"
    )
