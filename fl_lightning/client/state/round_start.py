"""What every client of a round starts from besides the weights: fresh optimizers and schedules.

The state of an optimizer (momentum, second moments) is empty whenever a client begins. Its options
are those of the round, as the learning-rate schedule left them: some optimizers write to them while
they step. A schedule that a client steps by itself goes on for it alone. Of optimizers that are not
torch's own, the same holds for the one that they hold and for numbers kept beside options and state.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from torch import Tensor
from torch.optim import Optimizer

from fl_lightning.client.wrapped_optimizers import and_inner, is_torchs
from fl_lightning.core.errors import ConfigurationError

# of every optimizer, of every group of its parameters, by name
Options = list[list[dict[str, Any]]]


class RateSchedule(Protocol):
    """A learning-rate schedule."""

    def state_dict(self) -> dict[str, Any]:
        """Return all but the optimizer."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there."""


class RoundStart:
    """Notes it once per round and puts it back before every client.

    Args:
        optimizers: the clients'.
        schedules: of their learning rates, which a training step may step.

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
        self, optimizers: Sequence[Optimizer], schedules: Sequence[RateSchedule] = ()
    ) -> None:
        self._optimizers = [each for optimizer in optimizers for each in and_inner(optimizer)]
        self._foreign = [each for each in self._optimizers if not is_torchs(each)]
        self._schedules = list(schedules)

    def note(self) -> None:
        """Note how things are."""
        self._options: Options = [
            [_copied(g) for g in each.param_groups] for each in self._optimizers
        ]
        self._numbers = [_numbers(each) for each in self._foreign]
        self._tensors = [_tensors(each) for each in self._foreign]
        self._positions = [_position(each) for each in self._schedules]
        self._states = [copy.deepcopy(each.state_dict()) for each in self._schedules]

    @property
    def options(self) -> Options:
        """The optimizers' options as they were noted, not to be changed."""
        return self._options

    @contextmanager
    def as_of(self, options: Options | None) -> Iterator[None]:
        """Have optimizers begin with the options of another round, inside the block.

        Args:
            options: of then; None for those of this round.
        """
        if options is None:
            yield
            return
        noted, self._options = self._options, options
        self.put_back()
        try:
            yield
        finally:
            self._options = noted
            self.put_back()

    def put_back(self) -> None:
        """Have optimizers be fresh, and schedules be where the round began.

        Raises:
            ConfigurationError: if an optimizer has changed a tensor that is not in its state.
        """
        for optimizer, tensors in zip(self._foreign, self._tensors, strict=True):
            _refuse_changed(optimizer, tensors)
        for optimizer, noted in zip(self._optimizers, self._options, strict=True):
            optimizer.state.clear()
            for group, options in zip(optimizer.param_groups, noted, strict=True):
                for added in group.keys() - options.keys() - {"params"}:
                    del group[added]
                group.update(_copied(options))
        for optimizer, numbers in zip(self._foreign, self._numbers, strict=True):
            vars(optimizer).update(numbers)
        triples = zip(self._schedules, self._positions, self._states, strict=True)
        for schedule, position, state in triples:
            if position is None or position != _position(schedule):
                schedule.load_state_dict(copy.deepcopy(state))


def _copied(options: dict[str, Any]) -> dict[str, Any]:
    # a learning rate may be a tensor, which an optimizer or a schedule changes in place
    values = ((k, v.clone() if isinstance(v, Tensor) else v) for k, v in options.items())
    return {key: value for key, value in values if key != "params"}


def _numbers(optimizer: Optimizer) -> dict[str, Any]:
    """Return what a foreign optimizer counts by itself."""
    return {k: v for k, v in vars(optimizer).items() if type(v) in (int, float, bool)}


def _tensors(optimizer: Optimizer) -> list[tuple[str, Tensor, int]]:
    """Return the tensors that a foreign optimizer keeps beside state and parameters, by attribute."""
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
                "which would go from client to client: keep it in optimizer.state, which is empty "
                "when a client begins"
            )


def _position(schedule: RateSchedule) -> int | None:
    """Return the number of a schedule's last step, which every step changes; None if unknown."""
    position = getattr(schedule, "last_epoch", None)
    return position if isinstance(position, int) else None
