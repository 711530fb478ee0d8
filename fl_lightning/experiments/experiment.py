"""Experiments: the keys of an experiment's YAML, its variants, and the plan of its runs.

    runs = variants x seeds,  or with a grid  axis 1 x axis 2 x ... x seeds

Every variant is a difference to one common configuration, as a second ``--config`` file is to the first. Two
runs differ only in that difference and in the seed.

    fingerprint = SHA-256(configuration, seed, fingerprint of the run before)

A finished run is repeated only if its fingerprint has changed, because its configuration has. Each run gets a
TensorBoard logger in its folder, beside the configuration's loggers.
"""

# mypy: disable-error-code="type-arg"
from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, TypeAlias

import yaml
from jsonargparse.typing import Path_fr

from fl_lightning.core.errors import ConfigurationError

FIRST = "<first>"  # placeholder in a configuration for the path of the first run's checkpoint
BEFORE = "first"  # name of the first run, from whose checkpoint others start

BEST = " (best round)"  # end of a column's name in the results
# columns of the results with the bytes that all clients sent or received, and the metric that is summed over rounds
BYTES = {
    "bytes up": "round/total_bytes_up",
    "calibration bytes up": "calibration/total_bytes_up",
    "head bytes up": "head/total_bytes_up",
    "bytes down": "round/total_bytes_down",
}
_COLUMNS = {"variant", "seed", "round", "best round", "seconds", "virtual seconds", *BYTES}

# Not dict[str, Any]: with Any, the parser would add default options to the classes named inside.
Difference: TypeAlias = dict


@dataclass(frozen=True)
class Variant:
    """One of the configurations that an experiment compares; a row in its table of results.

    Attributes:
        name: name in the table.
        difference: differences to the common configuration, in the order in which they are applied.
        coordinates: value on each axis of the grid; empty without a grid.
    """

    name: str
    difference: tuple[Difference, ...]
    coordinates: Mapping[str, str] = field(default_factory=dict)

    @property
    def folder(self) -> str:
        """Name of the folder for this variant's runs: the variant's name, with ``_`` for special characters.

        Example:
            >>> Variant("sign flip / Krum", ()).folder
            'sign_flip_Krum'
        """
        return re.sub(r"[^\w.%=+-]+", "_", self.name).strip("_.") or "_"


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A comparison of variants of one configuration: the variants, their seeds, and the metrics to report.

    Args:
        configs: files of the configuration that all runs share, layered; paths are relative to the
            experiment's own file.
        base: options that all runs share, in the experiment's file; they override the files.
        first: difference to the common configuration of a run that comes before the others, for each
            seed. ``<first>`` in a configuration becomes the path of that run's checkpoint.
        variants: name to difference, for each variant to compare.
        grid: instead of variants: axis to name to difference; every combination is a variant.
        seeds: seeds of data split, partition, initial weights and all other draws, as [0, 1, 2] or
            0,1,2; every variant runs with each.
        report: names of the metrics to report, as the runs log them.
        monitor: metric that chooses the best round of a run, on validation data.
        mode: whether a high (max) or a low (min) value of the monitored metric is good.
        over: metric on the horizontal axis of the curves, e.g. round/total_virtual_seconds; rounds
            if None.

    Raises:
        ConfigurationError: if there is nothing to compare, or names or seeds repeat.

    Example:
        >>> fast, slow = {"model": {"lr": 0.1}}, {"model": {"lr": 0.01}}
        >>> experiment = Experiment(variants={"fast": fast, "slow": slow}, seeds="0,1")
        >>> [variant.name for variant in experiment.all_variants], experiment.all_seeds
        (['fast', 'slow'], [0, 1])
    """

    configs: list[Path_fr] = field(default_factory=list)
    base: Difference | None = None
    first: Difference | None = None
    variants: dict[str, Difference | None] | None = None
    grid: dict[str, dict[str, Difference | None]] | None = None
    seeds: list[int] | int | str = 0
    report: list[str] = field(default_factory=lambda: ["test/accuracy"])
    monitor: str = "val/accuracy"
    mode: Literal["max", "min"] = "max"
    over: str | None = None

    def __post_init__(self) -> None:
        issues = []
        if bool(self.variants) == bool(self.grid):
            issues.append("give either variants or grid: a mapping of names to differences")
        columns = {
            self.monitor,
            *self.report,
            *(f"{name}{BEST}" for name in self.report),
        } | _COLUMNS
        if taken := sorted(columns & self.axes.keys()):
            issues.append(
                f"axes of the grid must not have the names of columns of the results, got {', '.join(taken)}"
            )
        if not self.report:
            issues.append("report must name at least one metric, as the runs log it")
        try:
            _ = self.all_seeds
        except ConfigurationError as error:
            issues.append(str(error))
        folders = [variant.folder for variant in self.all_variants]
        if twice := {name for name in folders if folders.count(name) > 1 or name == BEFORE}:
            issues.append(
                f"variants must have names that differ as folders, and none named {BEFORE!r}, got "
                f"{', '.join(sorted(twice))}"
            )
        if issues:
            raise ConfigurationError("experiment: " + "; ".join(issues))

    @property
    def all_seeds(self) -> list[int]:
        """Seeds with which every variant of the experiment is run."""
        return read_seeds(self.seeds)

    @property
    def axes(self) -> dict[str, list[str]]:
        """Axes of the experiment's grid: name of the axis to names of its values; empty without a grid."""
        # YAML reads a name like 0.1 as a number
        return {axis: [str(name) for name in values] for axis, values in (self.grid or {}).items()}

    @property
    def all_variants(self) -> list[Variant]:
        """All variants to compare, in the order of the experiment's file; a grid's last axis varies fastest."""
        if self.variants:
            return [Variant(str(name), (diff or {},)) for name, diff in self.variants.items()]
        if not self.grid:
            return []
        combinations = product(*(values.items() for values in self.grid.values()))
        return [
            Variant(
                " / ".join(str(name) for name, _ in pairs),
                tuple(diff or {} for _, diff in pairs),
                {axis: str(name) for axis, (name, _) in zip(self.grid, pairs, strict=True)},
            )
            for pairs in combinations
        ]


_LARGEST_SEED = 2**32 - 1  # of seed_everything


def read_seeds(seeds: list[int] | int | str) -> list[int]:
    """Convert seeds, given as a list, a number, or numbers separated by commas, to a list of integers.

    Raises:
        ConfigurationError: if they are not at least one whole number ≥ 0, all different.

    Example:
        >>> read_seeds("0,1")
        [0, 1]
    """
    given = seeds.split(",") if isinstance(seeds, str) else seeds
    given = [*given] if isinstance(given, Iterable) else [given]
    # a truth value is no number, though Python counts it as one, and 1.5 is no seed 1
    texts = [str(seed).strip() if type(seed) is not bool else "" for seed in given]
    found = [int(text) for text in texts if text.isdecimal() and int(text) <= _LARGEST_SEED]
    if not found or len(set(found)) < len(given):
        raise ConfigurationError(
            f"seeds must be different whole numbers from 0 to {_LARGEST_SEED}, as [0, 1, 2] or 0,1,2, got {seeds}"
        )
    return found


# Function from the words of a fit's command line to the complete configuration, as YAML.
Resolve = Callable[[list[str]], str]


@dataclass(frozen=True)
class PlannedRun:
    """One run of an experiment: a variant with a seed.

    Attributes:
        variant: the variant.
        seed: seed of all draws.
        configuration: complete configuration as YAML, with ``<first>`` for the first run's checkpoint.
        folder: folder of the run's files.
        before: run from whose checkpoint this run starts; None if it starts anew.
    """

    variant: Variant
    seed: int
    configuration: str
    folder: Path
    before: PlannedRun | None = None

    @property
    def name(self) -> str:
        """Name of the run in messages: its variant and seed."""
        return f"{self.variant.name}, seed {self.seed}"

    @property
    def fingerprint(self) -> str:
        """SHA-256 of what the run depends on: its configuration, its seed, and the run whose checkpoint it starts from."""
        before = self.before.fingerprint if self.before else ""
        text = f"{self.configuration}\n{self.seed}\n{before}"
        return hashlib.sha256(text.encode()).hexdigest()


def plan_runs(
    experiment: Experiment, *, out: Path, options: Sequence[str], resolve: Resolve
) -> list[PlannedRun]:
    """Return an experiment's runs: those from whose checkpoints others start, then all variants, seed by seed.

    The ``options``, words of every run's command line, override the experiment's file.

    Raises:
        ConfigurationError: naming the variant whose configuration is invalid.
    """
    variants = experiment.all_variants
    texts = [_resolved(experiment, v.name, v.difference, options, resolve) for v in variants]
    firsts: dict[int, PlannedRun] = {}
    if experiment.first is not None:
        text = _resolved(experiment, BEFORE, [experiment.first], options, resolve)
        if FIRST in text:
            raise ConfigurationError(
                f"{BEFORE}: its configuration has {FIRST}, the path of its own checkpoint: move {FIRST} from "
                "the common configuration to the variants, or set that option to null in first"
            )
        for seed in experiment.all_seeds:
            firsts[seed] = PlannedRun(
                Variant(BEFORE, ()), seed, text, out / BEFORE / f"seed_{seed}"
            )
    elif wanting := [v.name for v, text in zip(variants, texts, strict=True) if FIRST in text]:
        raise ConfigurationError(
            f"variant {wanting[0]!r}: its configuration has {FIRST}, the checkpoint of a first run, but the "
            "experiment has no first run: add first, a difference to the common configuration"
        )
    return [*firsts.values()] + [
        PlannedRun(
            *(variant, seed, text, out / variant.folder / f"seed_{seed}"),
            before=firsts.get(seed) if FIRST in text else None,
        )
        for seed in experiment.all_seeds
        for variant, text in zip(variants, texts, strict=True)
    ]


def _resolved(
    experiment: Experiment,
    name: str,
    differences: Sequence[Mapping[str, Any]],
    options: Sequence[str],
    resolve: Resolve,
) -> str:
    layers = [experiment.base or {}, *differences]
    try:
        return resolved([path.absolute for path in experiment.configs], layers, options, resolve)
    except ConfigurationError as error:
        label = name if name == BEFORE else f"variant {name!r}"
        raise ConfigurationError(f"{label}: {error}") from error


def resolved(
    files: Sequence[str],
    layers: Sequence[Mapping[str, Any]],
    options: Sequence[str],
    resolve: Resolve,
) -> str:
    """Override configuration files by further layers of options, and return the complete configuration as YAML."""
    with TemporaryDirectory() as folder:
        paths = [*map(str, files)]
        for number, layer in enumerate(filter(None, layers)):
            path = Path(folder, f"{number}.yaml")
            path.write_text(as_text(layer))
            paths.append(str(path))
        return resolve([*(word for path in paths for word in ("--config", path)), *options])


def as_text(configuration: Mapping[str, Any]) -> str:
    """Return a configuration as YAML."""
    return yaml.safe_dump(configuration, sort_keys=False, allow_unicode=True)


_OWN = "lightning.pytorch.loggers.TensorBoardLogger"
_NAME = {"WandbLogger": "name", "MLFlowLogger": "run_name", "CometLogger": "name"}


def run_loggers(run: PlannedRun) -> list[dict[str, Any]]:
    """Return the configurations of a run's loggers, as mappings with ``class_path`` and ``init_args``.

    The first is a TensorBoard logger in the run's folder, which replaces the user's. The user's other
    loggers follow; those with options for a name or a folder get the run's.
    """
    place = {
        "save_dir": str(run.folder.parent.parent),
        "name": run.folder.parent.name,
        "version": run.folder.name,
    }
    own = {"class_path": _OWN, "init_args": {**place, "default_hp_metric": False}}
    given = yaml.safe_load(run.configuration)["trainer"].get("logger")
    listed = given if isinstance(given, list) else [given]
    others = [each for each in listed if isinstance(each, Mapping) and "class_path" in each]
    return [own, *(_placed(each, run, place) for each in others if _kind(each) != _kind(own))]


def _kind(logger: Mapping[str, Any]) -> str:
    return str(logger["class_path"]).rpartition(".")[-1]


def _placed(logger: Mapping[str, Any], run: PlannedRun, place: Mapping[str, str]) -> dict[str, Any]:
    """Return the configuration of a user's logger, with the name and folder of the given run."""
    kind, options = _kind(logger), dict(logger.get("init_args") or {})
    if kind == "CSVLogger":
        options |= place
    if kind == "WandbLogger":
        options["save_dir"] = str(run.folder)
    if kind in _NAME:
        options[_NAME[kind]] = f"{run.variant.folder}-seed_{run.seed}"
    return {**logger, "init_args": options}
