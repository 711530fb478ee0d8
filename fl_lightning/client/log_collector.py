"""Collects the values that a module logs in local steps, and averages them per client.

Lightning's own bookkeeping of one logged value costs about 0.4 ms, more than the whole step of a
small model, and does not separate clients. While clients train, a `LogCollector` replaces the module's
``log``: it stores each value with its batch size, and reduces once per client.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.metrics import PER_EXAMPLE, pool

_MEANS = {"mean", "avg"}
_REDUCTIONS = {*_MEANS, "sum", "min", "max"}


@contextmanager
def shadowed(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Sets an attribute of an object inside the block, and restores the former value afterwards."""
    had, before = name in vars(owner), vars(owner).get(name)
    object.__setattr__(owner, name, value)
    try:
        yield
    finally:
        object.__delattr__(owner, name)
        if had:
            object.__setattr__(owner, name, before)


@dataclass(frozen=True)
class LoggedMetrics:
    """States of torchmetrics objects that the module logged, to be merged over processes and sites.

    Attributes:
        logged: (logged name, name per epoch, path in the module); one object may have several names.
        states: states of each object by name, by path in the module.
    """

    logged: list[tuple[str, str, str]]
    states: dict[str, dict[str, Any]]


class LogCollector:
    """Replacement of ``module.log`` that collects values while clients train.

    Attributes:
        batch_size: number of examples in the current batch, the default weight of its values.
        epoch_names: names in a client's metrics, by the name that the module logs.
        prog_bar: names of values for the progress bar.
        reductions: reductions of the clients' values (sum, min, max), by name; the mean for other names.

    Example:
        >>> collector = LogCollector()
        >>> for value, size in ((1.0, 2), (4.0, 1)):
        ...     collector.batch_size = size
        ...     collector.log("train/accuracy", value)
        >>> collector.collect()
        {'train/accuracy': tensor(2.)}
    """

    def __init__(self) -> None:
        self.epoch_names: dict[str, str] = {}
        self.prog_bar: set[str] = set()
        self._values: dict[str, list[tuple[Tensor | float, int]]] = {}  # with weights
        self._sizes: dict[str, int] = {}  # examples of the steps that logged a name
        self._reductions: dict[str, str] = {}
        self.reductions: dict[str, str] = {}  # of clients' values, by name, where not the mean
        self._metrics: dict[str, Metric] = {}
        self.batch_size = 1

    def listening_to(self, module: nn.Module) -> AbstractContextManager[None]:
        """Replace ``module.log`` by this collector inside the block; blocks may be nested."""
        return shadowed(module, "log", self.log)

    @contextmanager
    def not_listening_to(self, module: nn.Module) -> Iterator[None]:
        """Disable this collector inside the block, so that ``log`` is the module's own, e.g. for an evaluation."""
        before = module.__dict__.pop("log", None)
        try:
            yield
        finally:
            if before is not None:
                object.__setattr__(module, "log", before)

    @contextmanager
    def forgetting(self) -> Iterator[None]:
        """Discard the values logged inside the block, and restore the collector's state afterwards."""
        # in place: other objects refer to these dicts
        known: list[dict[str, Any]] = [self.epoch_names, self._reductions, self._metrics]
        before, in_bar = [dict(names) for names in known], set(self.prog_bar)
        try:
            yield
        finally:
            self.discard()
            for names, values in zip(known, before, strict=True):
                names.clear()
                names.update(values)
            self.prog_bar.clear()
            self.prog_bar |= in_bar

    def log(
        self,
        name: str,
        value: Tensor | float | Metric,
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: Any = "mean",
        enable_graph: bool = False,
        sync_dist: bool = False,
        sync_dist_group: Any = None,
        add_dataloader_idx: bool = True,
        batch_size: int | None = None,
        metric_attribute: str | None = None,
        rank_zero_only: bool = False,
    ) -> None:
        """Record one value; the arguments are those of `LightningModule.log`.

        Raises:
            ConfigurationError: for a ``reduce_fx`` other than mean, sum, min and max, and for a
                tensor with more than one element.
        """
        both = bool(on_step and on_epoch)
        if torch.compiler.is_compiling():  # each length of a list would be a graph of its own
            torch.compiler.disable(self._keep)(name, value, prog_bar, both, reduce_fx, batch_size)
        else:
            self._keep(name, value, prog_bar, both, reduce_fx, batch_size)

    def _keep(
        self,
        name: str,
        value: Tensor | float | Metric,
        prog_bar: bool,
        both: bool,
        reduce_fx: Any,
        batch_size: int | None,
    ) -> None:
        if name not in self._reductions:
            self._first_time(name, reduce_fx, prog_bar, both)
        if isinstance(value, Metric):
            self._metrics[name] = value
            return
        if isinstance(value, Tensor) and value.numel() != 1:
            raise ConfigurationError(
                f"self.log({name!r}, …) takes one number, got a tensor of shape "
                f"{tuple(value.shape)}: reduce it first"
            )
        number = value.detach().reshape(()) if isinstance(value, Tensor) else float(value)
        weight = self.batch_size if batch_size is None else batch_size
        if weight > 0 or self._reductions[name] not in _MEANS:  # a mean over no token, say, is none
            self._values.setdefault(name, []).append((number, weight))
        self._sizes[name] = self._sizes.get(name, 0) + self.batch_size

    def _first_time(self, name: str, reduce_fx: Any, prog_bar: bool, both: bool) -> None:
        if name.endswith(PER_EXAMPLE):
            raise ConfigurationError(
                f"self.log({name!r}, …): names of metrics must not end in {PER_EXAMPLE!r}, which marks "
                "the weight of another one: use per_example"
            )
        reduction = getattr(reduce_fx, "__name__", reduce_fx)
        if reduction not in _REDUCTIONS:
            raise ConfigurationError(
                f"self.log({name!r}, reduce_fx={reduce_fx!r}): in a client's training step "
                f"reduce_fx must be one of {sorted(_REDUCTIONS)}"
            )
        self._reductions[name] = reduction
        # Lightning's own name for the epoch's value of a metric that is also logged per step
        self.epoch_names[name] = f"{name}_epoch" if both else name
        if reduction in ("sum", "min", "max"):
            self.reductions[self.epoch_names[name]] = reduction
        if prog_bar:
            self.prog_bar.add(self.epoch_names[name])

    def collect(self) -> dict[str, Tensor]:
        """Return one scalar per name, reduced over the steps since the last call, and clear the values.

        A mean whose weight is not the number of examples comes with a second scalar, see `PER_EXAMPLE`.
        """
        values, self._values = self._values, {}
        sizes, self._sizes = self._sizes, {}
        found = {}
        for name, logged in values.items():
            found[self.epoch_names[name]] = _reduced(self._reductions[name], logged)
            weight = sum(weight for _, weight in logged)
            if weight != sizes[name] and self._reductions[name] in _MEANS:
                found[self.epoch_names[name] + PER_EXAMPLE] = torch.tensor(weight / sizes[name])
        return found

    def discard(self) -> None:
        """Discard the values logged since the last `collect`."""
        self._values.clear()
        self._sizes.clear()

    def forget(self) -> None:
        """Discard all logged values, and forget which torchmetrics objects were logged; their states are kept."""
        self.discard()
        self._metrics.clear()

    @property
    def metrics(self) -> dict[str, Metric]:
        """The torchmetrics objects logged since the last `collect_metrics`, by logged name."""
        return dict(self._metrics)

    def add_metric(self, name: str, epoch_name: str, metric: Metric) -> None:
        """Register a torchmetrics object that was logged in another process."""
        self.epoch_names[name] = epoch_name
        self._metrics[name] = metric

    def check_metrics(self, module: nn.Module) -> None:
        """Raise ConfigurationError for a logged torchmetrics object that is no part of the module.

        Examples of failed clients and of trials can be removed only from objects that are parts of it.
        """
        parts = set(map(id, module.modules()))
        for name, metric in self._metrics.items():
            if id(metric) not in parts:
                raise ConfigurationError(
                    f"self.log({name!r}, …) in training_step: the torchmetrics object must be a part of the "
                    "module: set it as an attribute in __init__, or put it into an nn.ModuleDict or nn.ModuleList"
                )

    def collect_metrics(self, module: nn.Module | None = None) -> dict[str, float]:
        """Return the values of logged torchmetrics objects and reset them.

        Each value is the metric of the pooled examples since the last call, not a mean over clients.

        Args:
            module: the module for `check_metrics`; None to skip this check.
        """
        values = {}
        if module is not None and self._metrics:
            self.check_metrics(module)
        for name, metric in self._metrics.items():
            values[self.epoch_names[name]] = float(metric.compute())
        for metric in self._metrics.values():  # one object may be logged under several names
            metric.reset()
        self._metrics.clear()
        return values

    def metric_states(self, module: nn.Module) -> LoggedMetrics:
        """Return the states of the logged torchmetrics objects that are submodules of ``module``."""
        paths = {id(child): path for path, child in module.named_modules()}
        inside = {n: metric for n, metric in self._metrics.items() if id(metric) in paths}
        logged = [(n, self.epoch_names[n], paths[id(metric)]) for n, metric in inside.items()]
        return LoggedMetrics(logged, {paths[id(m)]: dict(m.metric_state) for m in inside.values()})

    def pool_metrics(self, parts: Sequence[LoggedMetrics], module: nn.Module) -> None:
        """Merge states from `metric_states` into the module's torchmetrics objects, and register these as logged."""
        for name, epoch_name, place in sorted({entry for part in parts for entry in part.logged}):
            self.add_metric(name, epoch_name, module.get_submodule(place))  # type: ignore[arg-type]
        for place in sorted({place for part in parts for place in part.states}):
            states = [part.states[place] for part in parts if place in part.states]
            pool(module.get_submodule(place), states)  # type: ignore[arg-type]


def _reduced(reduction: str, logged: list[tuple[Tensor | float, int]]) -> Tensor:
    values, weights = zip(*logged, strict=True)
    reference = next((v for v in values if isinstance(v, Tensor)), torch.empty(()))
    tensors = [torch.as_tensor(value, device=reference.device) for value in values]
    if reduction in _MEANS:
        return weighted_mean(tensors, weights)
    reduced: Tensor = getattr(torch.stack(tensors).float(), reduction)()
    return reduced


def weighted_mean(values: Sequence[Tensor], weights: Sequence[int]) -> Tensor:
    """Return the weighted mean of scalars, a float32 scalar on their device.

    Example:
        >>> weighted_mean([torch.tensor(1.0), torch.tensor(4.0)], [1, 2])
        tensor(3.)
    """
    if len(values) == 1:
        return values[0].float()
    stacked = torch.stack(tuple(values)).float()
    shares = torch.tensor(weights, dtype=torch.float32, device=stacked.device)
    return torch.dot(stacked, shares) / sum(weights)
