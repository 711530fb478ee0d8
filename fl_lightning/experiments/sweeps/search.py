"""The keys of a search's YAML: what is varied, what is good, how much is tried."""

# mypy: disable-error-code="type-arg"
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from jsonargparse.typing import NonNegativeInt, Path_fr, PositiveInt

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.experiments.experiment import Difference, read_seeds
from fl_lightning.experiments.sweeps.parameters import Parameter, read_parameters


@dataclass(frozen=True, kw_only=True)
class Search:
    """A search for values of a configuration's options.

    Args:
        space: what is searched: the path of an option in the configuration to a range, {low, high,
            log, step, points}, to a list of values, or to {choices: {name: value}}. The keys
            init_args in a path may be left out.
        configs: files of the configuration, layered; paths are relative to the search's own file.
            Those of --config follow.
        base: a difference to the configuration, in the search's file, e.g. fewer rounds.
        metric: that says how good a trial is, as the runs log it.
        mode: whether a high or a low value of it is good.
        value: of a trial: the metric after its last round, or in its best one.
        seeds: a trial is one run of each, its value their mean: [0, 1, 2] or 0,1,2. The
            configuration's own seed if null.
        trials: how many there are in all, over all machines. A grid has its own size if null, other
            samplers 20.
        sampler: what proposes values: tpe (learns from the trials so far), random, or grid.
        startup_trials: random trials before tpe learns, and whole ones before median prunes.
        pruner: what stops a trial early: none; median, when it is worse than half of the others
            were in that round; or hyperband, which lets the best third go on at growing intervals.
        min_rounds: before a trial may be stopped.
        first_as_configured: whether the first trial has the configuration's own values.
        sampler_seed: of what is proposed.

    Raises:
        ConfigurationError: if there is nothing to search, or the space is not understood.

    Example:
        >>> search = Search(space={"model.lr": {"low": 0.001, "high": 1.0, "log": True}}, trials=10)
        >>> list(search.parameters), search.num_trials
        (['model.lr'], 10)
    """

    space: dict = field(default_factory=dict)
    configs: list[Path_fr] = field(default_factory=list)
    base: Difference | None = None
    metric: str = "val/accuracy"
    mode: Literal["max", "min"] = "max"
    value: Literal["last", "best"] = "last"
    seeds: list[int] | int | str | None = None
    trials: PositiveInt | None = None
    sampler: Literal["tpe", "random", "grid"] = "tpe"
    startup_trials: NonNegativeInt = 5
    pruner: Literal["none", "median", "hyperband"] = "median"
    min_rounds: PositiveInt = 3
    first_as_configured: bool = True
    sampler_seed: NonNegativeInt = 0

    def __post_init__(self) -> None:
        parameters = self.parameters
        if self.sampler == "grid":
            for path, parameter in parameters.items():
                parameter.grid(path)
        seeds = None if self.seeds is None else read_seeds(self.seeds, "search")
        if seeds is not None and (not seeds or min(seeds) < 0 or len(set(seeds)) < len(seeds)):
            raise ConfigurationError(
                f"search: seeds must be different whole numbers >= 0, got {self.seeds}"
            )

    @property
    def parameters(self) -> dict[str, Parameter]:
        """Searched parameters, by path."""
        return read_parameters(self.space)

    @property
    def num_trials(self) -> int:
        """How many trials there are in all."""
        if self.sampler != "grid":
            return self.trials or 20
        size = 1
        for path, parameter in self.parameters.items():
            size *= len(parameter.grid(path))
        return min(size, self.trials or size)
