"""Start of a client: optimizers, learning-rate schedules and the fp16 scale, reset for every client of a round.

Every client starts with empty optimizer state (momentum, second moments) and with the round's options
(learning rate, momentum, …). Changes that a step makes to options or schedules affect the current client
only. For optimizers that are not torch's, inner optimizers and numbers in attributes are reset as well.

A schedule that counts local steps has taken N r steps when round r begins, where N is the planned number of
local steps in a round. Step k of every client uses the options after N r + k steps of the schedule, computed
once per round.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from fl_lightning.client.optimizers import and_inner, is_torchs
from fl_lightning.core.errors import ConfigurationError

# For each optimizer and each of its parameter groups, the options by name.
Options = list[list[dict[str, Any]]]
# Key, among the options of a group, of those that change from local step to local step: lists by name.
BY_STEP = "by_step"
# Schedules that count local steps: the planned steps of a round, N ≥ 1, and a function that advances the
# schedules after the n-th local step of the run, n ≥ 1.
LocalSchedules = tuple[int, Callable[[int], None]]


class RoundStart:
    """Records optimizer options and schedules at the start of a round, and restores them before every client.

    Args:
        optimizers: the clients' optimizers.
        schedules: learning-rate schedules, which a training step may step.
        by_step: schedules that count local steps, or None.
        scaler: gradient scaler of fp16, or None.

    Attributes:
        counts_steps: whether options change from local step to local step.
        scaler: as given.

    Example:
        >>> import torch
        >>> weight = torch.nn.Parameter(torch.ones(1))
        >>> optimizer = torch.optim.SGD([weight], lr=0.1)
        >>> start = RoundStart([optimizer])
        >>> start.note()
        >>> optimizer.param_groups[0]["lr"] = 5.0
        >>> start.put_back()
        >>> optimizer.param_groups[0]["lr"]
        0.1
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        schedules: Sequence[LRScheduler] = (),
        by_step: LocalSchedules | None = None,
        scaler: GradScaler | None = None,
    ) -> None:
        self._by_step, self._is_planned, self.scaler = by_step, True, scaler
        self.counts_steps = by_step is not None
        self._optimizers = [each for optimizer in optimizers for each in and_inner(optimizer)]
        self._foreign = [each for each in self._optimizers if not is_torchs(each)]
        self._schedules = list(schedules)

    def note(self, number: int = 0) -> None:
        """Record optimizer options, schedules and the fp16 loss scale at the start of round ``number``."""
        self._number, self._is_planned = number, self._by_step is None
        self._options: Options = [
            [copied_options(g) for g in each.param_groups] for each in self._optimizers
        ]
        groups = [group for of_one in self._options for group in of_one]
        self._has_tensors = any(isinstance(v, Tensor) for group in groups for v in group.values())
        self._numbers = [  # e.g. counters that a foreign optimizer keeps as attributes
            {k: v for k, v in vars(each).items() if type(v) in (int, float, bool)}
            for each in self._foreign
        ]
        self._tensors = [_tensors(each) for each in self._foreign]
        # every step of a schedule changes it
        self._positions = [getattr(each, "last_epoch", None) for each in self._schedules]
        self._states = [copy.deepcopy(each.state_dict()) for each in self._schedules]
        self._scale = None if self.scaler is None else self.scaler.state_dict()

    @property
    def options(self) -> Options:
        """Options of all optimizers' parameter groups at the start of the round; read-only."""
        self._plan()
        return self._options

    @property
    def by_step(self) -> list[dict[str, list[Any]]]:
        """Options that change within a round, per parameter group: lists with a value per local step; else empty."""
        groups = [group.get(BY_STEP, {}) for of_one in self.options for group in of_one]
        return groups if any(groups) else []

    def set_by_step(self, by_step: Sequence[Mapping[str, Sequence[Any]]]) -> None:
        """Set the options for each local step, which the server has computed."""
        self.counts_steps = self._by_step is not None or bool(by_step)
        groups = [group for of_one in self._options for group in of_one]
        for group, values in zip(groups, by_step, strict=True) if by_step else ():
            group[BY_STEP] = {name: list(values[name]) for name in values if name in group}

    def _plan(self) -> None:
        """Run the schedules through the round's local steps, and record the optimizer options in each step."""
        if self._is_planned or self._by_step is None:
            return
        self.put_back()
        seen = []
        for step in self._steps_of_round():
            seen.append([copied_options(g) for each in self._optimizers for g in each.param_groups])
            self._by_step[1](step)
        self._is_planned = True
        groups = [group for of_one in self._options for group in of_one]
        for group, options in zip(groups, zip(*seen, strict=True), strict=True):
            lists = {name: [each[name] for each in options] for name in group}
            changing = (n for n, values in lists.items() if any(v != values[0] for v in values))
            group[BY_STEP] = {name: list(map(_plain, lists[name])) for name in {"lr", *changing}}
        self.put_back()

    def _steps_of_round(self) -> range:
        """Return the numbers of the round's local steps, counted from 1 at the start of the run."""
        count = 0 if self._by_step is None else self._by_step[0]
        return range(self._number * count + 1, (self._number + 1) * count + 1)

    def begin_step(self, step: int) -> None:
        """Set the optimizer options for local step ``step``; steps beyond the planned ones use the last options."""
        for optimizer, noted in zip(self._optimizers, self._options, strict=True):
            for group, options in zip(optimizer.param_groups, noted, strict=True):
                for name, values in options.get(BY_STEP, {}).items():
                    value = values[min(step, len(values) - 1)]
                    if isinstance(group[name], Tensor):
                        group[name].fill_(value)
                    else:
                        group[name] = tuple(value) if isinstance(value, list) else value
        if self._by_step is not None:
            self._update_last_rates()

    def _update_last_rates(self) -> None:
        """Make the schedules' ``get_last_lr`` return the optimizers' current learning rates."""
        for schedule in self._schedules:
            if hasattr(schedule, "_last_lr") and hasattr(schedule, "optimizer"):
                schedule._last_lr = [group["lr"] for group in schedule.optimizer.param_groups]

    def end(self) -> None:
        """End the round: advance schedules that count local steps by one round."""
        if self._by_step is not None:
            for step in self._steps_of_round():
                self._by_step[1](step)

    @contextmanager
    def as_of(self, options: Options | None) -> Iterator[None]:
        """Context in which the optimizers use the options recorded in another round.

        Args:
            options: options of the other round; None for this round's options.
        """
        if options is None:
            yield
            return
        noted, has_tensors = self.options, self._has_tensors
        self._options, self._has_tensors = options, True
        self.put_back()
        try:
            yield
        finally:
            self._options, self._has_tensors = noted, has_tensors
            self.put_back()

    def put_back(self) -> None:
        """Reset optimizers, schedules and fp16 loss scale to their values at the start of the round.

        Raises:
            ConfigurationError: if an optimizer has changed a tensor that is not in ``optimizer.state``.
        """
        for optimizer, tensors, numbers in zip(
            self._foreign, self._tensors, self._numbers, strict=True
        ):
            _refuse_changed(optimizer, tensors)
            vars(optimizer).update(numbers)
        must_copy = self.counts_steps or self._has_tensors
        for optimizer, noted in zip(self._optimizers, self._options, strict=True):
            optimizer.state.clear()
            for group, options in zip(optimizer.param_groups, noted, strict=True):
                for added in group.keys() - options.keys() - {"params"}:
                    del group[added]
                group.update(copied_options(options) if must_copy else options)
        triples = zip(self._schedules, self._positions, self._states, strict=True)
        for schedule, position, state in triples:
            if position is None or position != schedule.last_epoch:
                schedule.load_state_dict(copy.deepcopy(state))
        if self._by_step is not None:
            self._update_last_rates()
        self.set_scale(self._scale)

    def scale(self) -> dict[str, Any] | None:
        """Return the state of the fp16 gradient scaler; None without a scaler."""
        return None if self.scaler is None else self.scaler.state_dict()

    def set_scale(self, state: dict[str, Any] | None) -> None:
        """Set the state of the fp16 gradient scaler, between clients or rounds."""
        if self.scaler is None or state is None:
            return
        self.scaler.load_state_dict(state)
        # A step that raised left gradients marked as unscaled; before the first step there
        # is nothing to forget, which `update` takes for misuse
        with suppress(AssertionError):
            self.scaler.update(state["scale"])
            self.scaler.load_state_dict(state)


def copied_options(options: dict[str, Any]) -> dict[str, Any]:
    """Copy a parameter group's options, except the parameters and the lists of values per local step."""
    # a learning rate may be a tensor, which optimizers and schedules change in place
    return {
        key: value.clone() if isinstance(value, Tensor) else value
        for key, value in options.items()
        if key not in ("params", BY_STEP)
    }


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def _tensors(optimizer: Optimizer) -> list[tuple[str, Tensor, int]]:
    """Return (attribute, tensor, version) of tensors that a third-party optimizer keeps outside its ``state``."""
    params = {id(p) for group in optimizer.param_groups for p in group["params"]}
    found = []
    for name, value in vars(optimizer).items():
        parts = list(value.values()) if isinstance(value, dict) else value
        parts = parts if isinstance(parts, (list, tuple)) else [parts]
        kept = (p for p in parts if isinstance(p, Tensor) and id(p) not in params)
        found += [(name, tensor, tensor._version) for tensor in kept]
    return found


def _refuse_changed(optimizer: Optimizer, tensors: list[tuple[str, Tensor, int]]) -> None:
    for name, tensor, version in tensors:
        if tensor._version != version:
            raise ConfigurationError(
                f"the optimizer {type(optimizer).__name__} changes a tensor in its attribute {name}, "
                "with which the next client would start: keep it in optimizer.state, which is empty when "
                "a client starts"
            )
