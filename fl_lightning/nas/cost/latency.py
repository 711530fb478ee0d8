"""Latency of a network on a device: a sum over its blocks, calibrated on whole networks.

    latency = a · (rest + Σ_blocks milliseconds of the block's kind) + b

Blocks are timed once for all networks of a space (`measure_latency`), a and b are fitted on a few whole
networks, and the error is measured on other, held-out networks.
Source: Cai et al. 2019, ProxylessNAS, section 3.3, for a table of latencies and the expectation over it.
Differs: blocks are timed inside whole networks; the sum of blocks timed alone was off by 79 %.

The file is JSON. It contains the space with its settings, the shape of the networks, the device and the error,
without which a latency means nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.federation import differences
from fl_lightning.nas.cost.blocks import CellBlocks, SizeBlocks, blocks_of
from fl_lightning.nas.cost.count import MEASURES
from fl_lightning.nas.spaces.cells import RowCosts
from fl_lightning.nas.spaces.named import described_space, description
from fl_lightning.nas.spaces.space import Architecture, Networks

FORMAT = "fl-lightning latency"
VERSION = 2  # 1 described spaces of sizes by other settings


@dataclass(frozen=True)
class Where:
    """Device and software on which latencies were measured.

    Attributes:
        device: name of the device.
        kind: kind of the device, e.g. ``"cpu"``.
        threads: number of threads on a CPU.
        torch: version of PyTorch.
        batch_size: number of images per batch.
    """

    device: str
    kind: str
    threads: int
    torch: str
    batch_size: int

    def __str__(self) -> str:
        threads = f", {self.threads} threads" if self.kind == "cpu" else ""
        return f"{self.device} ({self.kind}{threads}), torch {self.torch}, batch {self.batch_size}"


@dataclass(frozen=True)
class Accuracy:
    """Accuracy of a latency table: its error and rank correlation on held-out networks.

    Attributes:
        networks: number of held-out networks.
        mape: mean absolute percentage error as a fraction: mean of |predicted - measured| / measured.
        spearman: rank correlation of predicted and measured latencies.
    """

    networks: int
    mape: float
    spearman: float

    def __str__(self) -> str:
        return (
            f"error {self.mape:.1%}, rank correlation {self.spearman:.2f} "
            f"on {self.networks} held-out networks"
        )


@dataclass(frozen=True, eq=False)
class LatencyTable:
    """Latency predictor for the networks of one search space on one device: a time per kind of block.

    Attributes:
        networks: search space of the networks, with image size and number of classes.
        where: device and software of the measurement.
        blocks: milliseconds of every kind of block.
        rest: milliseconds of the layers outside of blocks.
        scale: factor a of the calibration.
        shift: constant b of the calibration, in milliseconds.
        accuracy: error on held-out networks.
    """

    networks: Networks
    where: Where
    blocks: Mapping[str, float]
    rest: float
    scale: float
    shift: float
    accuracy: Accuracy

    @cached_property
    def _blocks(self) -> CellBlocks | SizeBlocks:
        return blocks_of(self.networks)

    def uncalibrated(self, architecture: Architecture) -> float:
        """Return a network's milliseconds before calibration: the sum of its blocks' times and the rest."""
        return self.rest + sum(self.blocks[kind] for kind in self._blocks.of(architecture))

    def milliseconds(self, architecture: Architecture) -> float:
        """Return the predicted latency of an architecture, in milliseconds.

        Raises:
            ConfigurationError: if the architecture is of another space.
        """
        if architecture.space != self.networks.space:
            raise ConfigurationError(
                f"the latency file is of {self.networks.space.name}, and {architecture} is of another space or of "
                f"other settings ({architecture.space.name}): measure it with fl-lightning latency"
            )
        return self.scale * self.uncalibrated(architecture) + self.shift

    @property
    def rows(self) -> RowCosts:
        """Milliseconds of a cell space's networks as a cost table: a fixed part plus a term per edge and operation.

        Raises:
            ConfigurationError: if the space is not made of cells.
        """
        if not isinstance(self._blocks, CellBlocks):
            raise ConfigurationError(
                f"the latency file was measured for {self.networks.space.name}, which has no cells: give a file of a space "
                "with cells, such as DARTS"
            )
        of_rows = self.scale * self._blocks.table(self.blocks)
        return RowCosts(self.scale * self.rest + self.shift, of_rows)

    def check(self, networks: Networks) -> None:
        """Raise ConfigurationError if the table was measured on other networks than these."""
        measured, wanted = (
            {"space": description(one.space), "networks": {"side": one.side, **one.shape}}
            for one in (self.networks, networks)
        )
        found = differences(measured, wanted, measured)
        if found:
            raise ConfigurationError(
                f"the latency file was measured for other architectures: {found[0]}. Measure these by fl-lightning latency"
            )

    def __str__(self) -> str:
        return f"{self.where}: {self.accuracy}"

    def write(self, path: str | Path) -> None:
        """Write the table as a JSON file; raises ConfigurationError if it cannot be written."""
        content = {
            "format": FORMAT,
            "version": VERSION,
            "space": description(self.networks.space),
            "network": {"side": self.networks.side, **self.networks.shape},
            "where": asdict(self.where),
            "accuracy": asdict(self.accuracy),
            "calibration": {"scale": self.scale, "shift": self.shift},
            "milliseconds": {"rest": self.rest, "blocks": dict(self.blocks)},
        }
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(path).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")
        except OSError as error:
            raise ConfigurationError(
                f"latency file {path} cannot be written: {error.strerror}"
            ) from None

    @classmethod
    def read(cls, path: str | Path) -> LatencyTable:
        """Read a latency table from a JSON file that `write` wrote.

        Raises:
            ConfigurationError: if the file is missing, damaged, or of another format or version.
        """
        try:
            content = json.loads(Path(path).read_text())
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not JSON"
            raise ConfigurationError(f"latency file {path} cannot be read: {reason}") from None
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise ConfigurationError(
                f"{path} is no latency file: write one with fl-lightning latency --out"
            )
        if content.get("version") != VERSION:
            raise ConfigurationError(
                f"latency file {path} has version {content.get('version')}, and this release reads version {VERSION}: "
                f"measure again with fl-lightning latency --out {path} and the same space and image size"
            )
        try:
            table = cls._of(content)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ConfigurationError(
                f"latency file {path} is damaged: {type(error).__name__} {error}"
            ) from None
        table._check_numbers(path)
        return table

    def _check_numbers(self, path: str | Path) -> None:
        """Raise ConfigurationError if a number of the table is not finite, or impossible (a negative block time)."""
        numbers = {**self.blocks, "rest": self.rest, "scale": self.scale, "shift": self.shift}
        for name, number in numbers.items():
            least = -math.inf if name in ("rest", "shift") else 0
            is_finite = math.isfinite(number) and number >= least
            if not is_finite or (name == "scale" and number == 0):
                raise ConfigurationError(
                    f"latency file {path} is damaged: {name} is {number}. Numbers must be finite, times "
                    "of blocks at least 0, the scale above 0: measure again with fl-lightning latency"
                )

    @classmethod
    def _of(cls, content: Mapping[str, Any]) -> LatencyTable:
        network, times = dict(content["network"]), content["milliseconds"]
        table = cls(
            networks=Networks(described_space(content["space"]), int(network.pop("side")), network),
            where=Where(**content["where"]),
            blocks={str(kind): float(value) for kind, value in times["blocks"].items()},
            rest=float(times["rest"]),
            scale=float(content["calibration"]["scale"]),
            shift=float(content["calibration"]["shift"]),
            accuracy=Accuracy(**content["accuracy"]),
        )
        missing = set(table._blocks.kinds()) - set(table.blocks)
        if missing:
            raise KeyError(f"no time of {min(missing)!r}")
        return table


def latency_of_search(measure: str, networks: Networks) -> LatencyTable | None:
    """Return the latency table for the search's penalty; None if the penalty uses a counted cost such as FLOPs.

    Args:
        measure: name of a counted cost, or path of a latency file.
        networks: networks of the search.

    Raises:
        ConfigurationError: if `measure` is neither, or the file is for other networks.
    """
    if measure in MEASURES:
        return None
    if Path(measure).suffix != ".json":
        raise ConfigurationError(
            f"model.measure must be one of {', '.join(MEASURES)}, or a .json file of fl-lightning latency, got "
            f"{measure!r}"
        )
    table = LatencyTable.read(measure)
    table.check(networks)
    return table
