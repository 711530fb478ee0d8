"""Latency of a network on a device: a sum over its blocks, calibrated on whole networks.

    latency = a · (rest + Σ_blocks milliseconds of its kind) + b

Blocks are timed once for all networks of a space (`measure_latency`), a and b fitted on a few whole
networks, and the error found on others: networks whose latency was measured and never used.
Source: Cai et al. 2019, ProxylessNAS, section 3.3, for a table of latencies and its expectation.
Differs: blocks are timed inside whole networks. Timed alone, they are off by 79 % when added up.

The file is JSON. It names the space with its settings, the network's shape and the device: a latency
means nothing without them, nor without its error.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.nas.cost.blocks import Blocks, CellBlocks, blocks_of
from fl_lightning.nas.cost.cost import MEASURES, Measure
from fl_lightning.nas.spaces.named import described_space, description
from fl_lightning.nas.spaces.space import Architecture, SearchSpace

FORMAT = "fl-lightning latency"
VERSION = 1


@dataclass(frozen=True)
class Where:
    """Device and software on which a latency was measured.

    Attributes:
        device: its name.
        kind: of device, e.g. ``"cpu"``.
        threads: of a CPU computation.
        torch: version of PyTorch.
        batch_size: images at a time.
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
    """Error of the predicted latencies of held-out networks.

    Attributes:
        networks: how many.
        mape: mean of |predicted - measured| / measured.
        spearman: rank correlation of predicted and measured.
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
    """Latencies of one space's networks of one shape, on one device.

    Attributes:
        space: of the networks.
        side: of the images, in pixels.
        options: of the space's `build`: ``num_classes``, ``in_channels``, ….
        where: it was measured.
        blocks: milliseconds of every kind of block.
        rest: milliseconds of what is in every network.
        scale: a.
        shift: b, in milliseconds.
        accuracy: on held-out networks.
    """

    space: SearchSpace
    side: int
    options: Mapping[str, Any]
    where: Where
    blocks: Mapping[str, float]
    rest: float
    scale: float
    shift: float
    accuracy: Accuracy

    @cached_property
    def _blocks(self) -> Blocks:
        return blocks_of(self.space, self.options)

    def uncalibrated(self, architecture: Architecture) -> float:
        """Return the sum over a network's blocks and the rest, in milliseconds."""
        return self.rest + sum(self.blocks[kind] for kind in self._blocks.of(architecture))

    def milliseconds(self, architecture: Architecture) -> float:
        """Return the latency of a network.

        Raises:
            ConfigurationError: if it is of another space.
        """
        if architecture.space != self.space:
            raise ConfigurationError(
                f"latencies of {self.space.name} say nothing of {architecture.space.name}"
            )
        return self.scale * self.uncalibrated(architecture) + self.shift

    @cached_property
    def rows(self) -> Tensor:
        """Milliseconds of each operation on each row, calibrated, (num_rows, num_operations).

        Raises:
            ConfigurationError: if the space has no rows.
        """
        if not isinstance(self._blocks, CellBlocks):
            raise ConfigurationError(
                f"{self.space.name} has no operations to weigh: use `milliseconds`"
            )
        return self.scale * self._blocks.table(self.blocks)

    @property
    def fixed(self) -> float:
        """Milliseconds of a network without any block."""
        return self.scale * self.rest + self.shift

    def expected(self, probabilities: Tensor) -> Tensor:
        """Return the expected latency when rows draw their operations by themselves.

        Args:
            probabilities: (num_rows, num_operations); gradients flow.
        """
        expectation: Tensor = self.fixed + (probabilities * self.rows.to(probabilities)).sum()
        return expectation

    def check(self, space: SearchSpace, side: int, options: Mapping[str, Any]) -> None:
        """Check that a table was measured for these networks.

        Args:
            space: of the networks.
            side: of their images.
            options: of the space's `build`.

        Raises:
            ConfigurationError: which says what differs.
        """
        own, other = description(self.space), description(space)
        if own["class_path"] != other["class_path"]:
            _differs("the space", self.space.name, space.name)
        for name, value in own["init_args"].items():
            if other["init_args"][name] != value:
                _differs(f"{name} of {space.name}", value, other["init_args"][name])
        measured, wanted = {"side": self.side, **self.options}, {"side": side, **options}
        for name in dict.fromkeys([*measured, *wanted]):
            if measured.get(name) != wanted.get(name):
                _differs(name, measured.get(name), wanted.get(name))

    def __str__(self) -> str:
        return f"{self.where}: {self.accuracy}"

    def write(self, path: str | Path) -> None:
        """Write the file.

        Raises:
            ConfigurationError: if it cannot be written.
        """
        content = {
            "format": FORMAT,
            "version": VERSION,
            "space": description(self.space),
            "network": {"side": self.side, **self.options},
            "where": asdict(self.where),
            "accuracy": asdict(self.accuracy),
            "calibration": {"scale": self.scale, "shift": self.shift},
            "milliseconds": {"rest": self.rest, "blocks": dict(self.blocks)},
        }
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(path).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")
        except OSError as error:
            raise ConfigurationError(f"{path} cannot be written: {error.strerror}") from None

    @classmethod
    def read(cls, path: str | Path) -> LatencyTable:
        """Read a file that `write` wrote.

        Raises:
            ConfigurationError: if there is none, it is of another format or version, or damaged,
                as by numbers that are not finite.
        """
        try:
            content = json.loads(Path(path).read_text())
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is no JSON"
            raise ConfigurationError(f"latency file {path} cannot be read: {reason}") from None
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise ConfigurationError(
                f"{path} is no latency file: fl-lightning latency writes one (--out)"
            )
        if content.get("version") != VERSION:
            raise ConfigurationError(
                f"latency file {path} is of version {content.get('version')}, and version {VERSION} "
                "is read: measure again"
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
        """Raise ConfigurationError for NaN, which would meet every constraint, and for impossible times."""
        holds = {
            **{name: 0 <= time < math.inf for name, time in self.blocks.items()},
            "rest": math.isfinite(self.rest),
            "scale": 0 < self.scale < math.inf,
            "shift": math.isfinite(self.shift),
        }
        broken = [name for name, is_a_number in holds.items() if not is_a_number]
        if broken:
            numbers = {**self.blocks, "rest": self.rest, "scale": self.scale, "shift": self.shift}
            raise ConfigurationError(
                f"latency file {path} is damaged: {broken[0]} is {numbers[broken[0]]}. Numbers must be "
                "finite, times of blocks at least 0, the scale above 0: measure again with "
                "fl-lightning latency"
            )

    @classmethod
    def _of(cls, content: Mapping[str, Any]) -> LatencyTable:
        network, times = dict(content["network"]), content["milliseconds"]
        table = cls(
            space=described_space(content["space"]),
            side=int(network.pop("side")),
            options=network,
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


def expected_measure(
    measure: str, space: SearchSpace, side: int, options: Mapping[str, Any]
) -> Measure | LatencyTable:
    """Return the cost that a search expects: a measure by name, or a latency file that is read.

    Args:
        measure: a name, or the path of a file.
        space: of the search.
        side: of its images, in pixels.
        options: of the space's `build`.

    Raises:
        ConfigurationError: if it is neither, or the file is of other networks.
    """
    for name in MEASURES:
        if measure == name:
            return name
    if Path(measure).suffix != ".json":
        raise ConfigurationError(
            f"measure must be {', '.join(MEASURES)}, or a .json file that fl-lightning latency wrote, "
            f"got {measure!r}"
        )
    table = LatencyTable.read(measure)
    table.check(space, side, options)
    return table


def _differs(what: str, measured: Any, wanted: Any) -> None:
    shown = [
        value if isinstance(value, int | float | str) else str(value)
        for value in (measured, wanted)
    ]
    raise ConfigurationError(
        f"the latency file is of other networks: {what} is {shown[0]} there and {shown[1]} here. "
        "Measure these with fl-lightning latency"
    )
