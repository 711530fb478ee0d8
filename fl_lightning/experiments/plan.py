"""From an experiment to its runs, each with its whole configuration, before any of them starts.

    fingerprint = SHA-256(configuration, seed, fingerprint of the run before)

A finished run with the fingerprint of the plan need not run again; anything else would show
numbers of another configuration. Each run gets a TensorBoard logger in its folder, and keeps those of the
configuration.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.experiments.experiment import BEFORE, FIRST, Experiment, Variant

Resolve = Callable[[list[str]], str]


@dataclass(frozen=True)
class PlannedRun:
    """One training.

    Attributes:
        variant: what it is a run of.
        seed: of everything that is drawn.
        configuration: complete, as YAML, with ``<first>`` where a checkpoint's path belongs.
        folder: where everything of the run is kept.
        before: the run whose checkpoint it starts from, if there is one.
    """

    variant: Variant
    seed: int
    configuration: str
    folder: Path
    before: PlannedRun | None = None

    @property
    def name(self) -> str:
        """As messages show it."""
        return f"{self.variant.name}, seed {self.seed}"

    @property
    def fingerprint(self) -> str:
        """Hash of everything that the run depends on."""
        before = self.before.fingerprint if self.before else ""
        text = f"{self.configuration}\n{self.seed}\n{before}"
        return hashlib.sha256(text.encode()).hexdigest()


def plan_runs(
    experiment: Experiment, *, out: Path, options: Sequence[str], resolve: Resolve
) -> list[PlannedRun]:
    """Return every run, those before others first; then seed by seed.

    Args:
        experiment: what is compared.
        out: folder of the experiment.
        options: further words of every run's command line; they win over the file.
        resolve: from the words of a command line to the complete configuration as YAML.

    Raises:
        ConfigurationError: if a configuration is refused, with the variant's name.
    """
    variants = experiment.all_variants
    texts = [_resolved(experiment, v.name, v.difference, options, resolve) for v in variants]
    firsts: dict[int, PlannedRun] = {}
    if experiment.first is not None:
        text = _resolved(experiment, BEFORE, [experiment.first], options, resolve)
        if FIRST in text:
            raise ConfigurationError(
                f"{BEFORE}: its configuration says {FIRST}, the checkpoint of itself. Move that "
                "from the common configuration to the variants, or set it to null in first."
            )
        for seed in experiment.all_seeds:
            firsts[seed] = PlannedRun(
                Variant(BEFORE, ()), seed, text, out / BEFORE / f"seed_{seed}"
            )
    elif wanting := [v.name for v, text in zip(variants, texts, strict=True) if FIRST in text]:
        raise ConfigurationError(
            f"variant {wanting[0]!r}: its configuration says {FIRST}, but the experiment has no "
            "first run: add first, a difference to the common configuration"
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
    """Return the complete configuration of a command line with layers over its files, as YAML."""
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
    """Return the loggers of a run as its configuration would name them.

    First a TensorBoard logger in the run's folder, from which the comparison reads; in its place no other
    one. The user's others stay, with the run's name and folder where they have such options.
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
    """Return a logger of the user's as that of one run."""
    kind, options = _kind(logger), dict(logger.get("init_args") or {})
    if kind == "CSVLogger":
        options |= place
    if kind == "WandbLogger":
        options["save_dir"] = str(run.folder)
    if kind in _NAME:
        options[_NAME[kind]] = f"{run.variant.folder}-seed_{run.seed}"
    return {**logger, "init_args": options}
