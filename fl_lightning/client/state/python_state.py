"""Everything that Python holds and a training step may write, at one moment.

Weights and buffers are not all that a step can change: a counter on the module, a list that it appends
to, a tensor that it keeps, a mode, a generator of random numbers. `PythonState` remembers what they
were, says what has changed and puts it back.

Not part of it: the numbers of parameters and buffers (`LocalTrainer` restores them), the states of
torchmetrics objects (`MetricStates`), torch's global generators, which are seeded for every client,
hooks, and iterators that are not Python's own, such as a data loader's.
"""

from __future__ import annotations

import random
from collections.abc import Collection
from typing import Any

import numpy as np
from torch import nn

from fl_lightning.client.state.python_names import trained_flags
from fl_lightning.client.state.python_places import Entries, Items, Place
from fl_lightning.client.state.python_values import GeneratorState
from fl_lightning.client.state.python_walk import Walk

# What lists got, by the number of their place.
Growth = list[tuple[int, Any]]


class PythonState:
    """What Python holds at the moment when this is made.

    Args:
        module: whose training step may write.
        ignore: names of attributes of the module, and of parts of its kind, that are no concern of
            the user's, e.g. Lightning's ``_trainer``.
        global_generators: whether those of Python and NumPy are part of it.
        requires_grad: whether this flag of the module's parameters is.

    Example:
        >>> module = nn.Linear(1, 1)
        >>> module.n, module.outputs = 0, []
        >>> state = PythonState(module)
        >>> module.n += 1
        >>> module.outputs.append(random.random())
        >>> state.changes()
        ['self.n (0 -> 1)', 'self.outputs (0 -> 1 items)', "Python's random"]
        >>> state.put_back()
        >>> module.n, module.outputs, state.changes()
        (0, [], [])
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        ignore: Collection[str] = (),
        global_generators: bool = True,
        requires_grad: bool = True,
    ) -> None:
        self._places: list[Place] = Walk(module, ignore).places
        if requires_grad:
            params = dict(module.named_parameters())
            paths = [f"self.{name}" for name in params]
            self._places.append(trained_flags(paths, [*params.values()]))
        if global_generators:
            self._places += _global_generators()
        lists = [(i, p) for i, p in enumerate(self._places) if isinstance(p, (Items, Entries))]
        self._growing = {index: place for index, place in lists if place.may_grow}

    def is_same(self) -> bool:
        """Return whether everything is the very same, not only equal."""
        return all(place.is_same() for place in self._places)

    def changes(self) -> list[str]:
        """Return where something differs now, in words; [] if nothing does."""
        changed = [place for place in self._places if not place.is_same()]
        return [difference for place in changed for difference in place.differences()]

    def put_back(self) -> None:
        """Have everything as it was, in place where possible: lists and tensors stay the same ones.

        Raises:
            ConfigurationError: if a generator was advanced, which cannot be wound back.
        """
        changed = [place for place in self._places if not place.is_same()]
        for place in reversed(changed):  # what is inside first
            place.put_back()

    def growth(self) -> Growth:
        """Return what was appended to lists that begin as they did, and lists under new keys."""
        changed = ((i, place) for i, place in self._growing.items() if not place.is_same())
        grown = ((i, place.growth()) for i, place in changed)
        return [(i, growth) for i, growth in grown if growth]

    def grow(self, growth: Growth) -> None:
        """Append to lists what `growth` returned, perhaps several times."""
        for index, added in growth:
            self._growing[index].grow(added)


def _global_generators() -> list[Place]:
    return [
        GeneratorState("Python's random", random.getstate, random.setstate),
        GeneratorState(
            "NumPy's random", lambda: np.random.get_state(legacy=False), np.random.set_state
        ),
    ]
