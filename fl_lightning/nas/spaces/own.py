"""Spaces of your own, defined by a module whose constructor makes choices.

    class Net(nn.Module):
        def __init__(self, num_classes, in_channels):
            width = ValueChoice([16, 32], label="width")
            self.stem = ElasticConv2d(in_channels, width, 3, padding=1)
            self.body = LayerChoice({"conv": …, "pool": …}, label="body")
            …

The constructor runs for the supernet with all options, for a `Supernet` with mixed layers, and for a single network
with the options of its architecture. Candidates are functions, so that only needed layers are made.

    LayerSpace     choices of layers and inputs, weighed by a rule of relaxation     for `Supernet`
    ModuleSpace    all choices; one option runs at a time                            for `OneShot`

Source of the kinds of choices: Microsoft NNI 2.x, "retiarii".
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn
from typing_extensions import override

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.nas.spaces.cells import CellNetwork, MakeEdge, Row, RowSpace
from fl_lightning.nas.spaces.choices import Building, ValueChoice, building, now
from fl_lightning.nas.spaces.sizes import SizedNetwork, SizeSpace
from fl_lightning.nas.spaces.space import Decision


class LayerChoice(nn.Module):
    """Placeholder in a module of yours for one layer, chosen by the search among several candidates.

    Args:
        candidates: constructors of the layers by name, at least two; all outputs have the same shape.
        label: name of the decision; choices with the same label are one decision.

    Raises:
        ConfigurationError: if there are fewer than two candidates.

    Example:
        >>> layer = LayerChoice({"skip": nn.Identity, "conv": lambda: nn.Conv2d(4, 4, 1)}, label="body")
        >>> layer(torch.zeros(1, 4, 2, 2)).shape
        torch.Size([1, 4, 2, 2])
    """

    def __init__(self, candidates: Mapping[str, Callable[[], nn.Module]], label: str) -> None:
        super().__init__()
        if len(candidates) < 2:
            raise ConfigurationError(
                f"LayerChoice {label}: give at least two layers to choose from, got {len(candidates)}"
            )
        current = building()
        self.edge: nn.Module | None = None
        if current is not None and current.make_edge is not None:
            self.edge = current.make_edge(label, candidates)
            return
        self._number = ValueChoice(range(1, len(candidates) + 1), label, tuple(candidates))
        makes = list(candidates.values())
        self.operations = nn.ModuleDict(
            {str(number): makes[int(number) - 1]() for number in self._number.options}
        )

    def forward(self, x: Any) -> Any:
        """Return the output of the chosen layer; in a `Supernet`, of the mixture of candidates."""
        layer = self.operations[str(now(self._number))] if self.edge is None else self.edge
        return layer(x)


class _Input(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self._number = number

    def forward(self, inputs: Sequence[Tensor]) -> Tensor:
        return inputs[self._number]


@final
class InputChoice(LayerChoice):
    """Placeholder for one of several tensors of equal shape; ``forward`` takes them as a list.

    Args:
        num_inputs: number of inputs, at least two.
        label: name of the decision; choices with the same label are one decision.
    """

    def __init__(self, num_inputs: int, label: str) -> None:
        inputs = {f"input {n}": lambda n=n: _Input(n) for n in range(num_inputs)}
        super().__init__(inputs, label)


def _made(module: str | type[nn.Module], shape: Mapping[str, Any]) -> nn.Module:
    """Construct a module with the given arguments, without those that its constructor does not accept."""
    kind: Any = module
    if isinstance(module, str):
        folder, _, name = module.rpartition(".")
        try:
            kind = getattr(import_module(folder), name)
        except (ImportError, AttributeError, ValueError):
            raise ConfigurationError(f"module: there is no class {module!r}") from None
    taken = inspect.signature(kind).parameters
    if not {"num_classes", "in_channels"} <= taken.keys():
        raise ConfigurationError(
            f"module: the constructor of {kind.__name__} must have the arguments num_classes and in_channels"
        )
    made: nn.Module = kind(**{name: value for name, value in shape.items() if name in taken})
    return made


_SOME_SHAPE = {"num_classes": 10, "in_channels": 3, "channels": 16, "cells": 5}


class _OwnNetwork(CellNetwork):
    get_classifier: Any = None  # the module may have one


@final
@dataclass(frozen=True)
class LayerSpace(RowSpace):
    """Search space of a module of yours, for a `Supernet`: its `LayerChoice` and `InputChoice` layers.

    Attributes:
        module: class of the module, or import path of the class. The constructor takes ``num_classes`` and
            ``in_channels``, and may take ``channels`` and ``cells``; ``forward`` returns logits
            (B, num_classes).
    """

    name: ClassVar[str] = "layers"
    none: ClassVar[int] = -1
    has_shapes: ClassVar[bool] = False

    module: str | type[nn.Module]

    @cached_property
    def _candidates(self) -> dict[str, tuple[str, ...]]:
        """Names of the candidate layers, by label of the choice."""
        found: dict[str, tuple[str, ...]] = {}

        def note(label: str, candidates: Mapping[str, Any]) -> nn.Module:
            if found.setdefault(label, tuple(candidates)) != tuple(candidates):
                raise ConfigurationError(
                    f"choices with the same label must have the same candidates, and {label} has "
                    f"{', '.join(candidates)} and {', '.join(found[label])}: give one another label"
                )
            return nn.Identity()

        with torch.device("meta"), Building(make_edge=note):
            _made(self.module, _SOME_SHAPE)
        if not found:
            raise ConfigurationError(
                "module: its constructor makes no LayerChoice and no InputChoice, so that there is nothing to search"
            )
        return found

    @property
    def operations(self) -> tuple[str, ...]:  # type: ignore[override]
        """Names of the candidate layers if all choices have the same ones, otherwise numbers."""
        names = max(self._candidates.values(), key=len)
        is_one = set(self._candidates.values()) == {names}
        return names if is_one else tuple(map(str, range(1, len(names) + 1)))

    @property
    def rows(self) -> tuple[Row, ...]:
        """One edge (row of α) per label of a choice."""
        return tuple(Row("network", row, row + 1) for row in range(len(self._candidates)))

    @cached_property
    def decisions(self) -> tuple[Decision, ...]:
        """Decisions of the space: one per label of a choice."""
        return tuple(Decision(*pair) for pair in self._candidates.items())

    @override
    def masked(self, alpha: Tensor) -> Tensor:
        counts = torch.tensor([len(names) for names in self._candidates.values()])
        absent = torch.arange(alpha.shape[1]) >= counts[:, None]
        return alpha.masked_fill(absent.to(alpha.device), -1e9)

    @override
    def node_names(self, cell: str) -> tuple[str, ...]:
        return ("input", *map(str, range(1, self.num_rows)), "output")

    @override
    def name_of(self, row: int, operation: int) -> str:
        return self.decisions[row].options[operation]

    @override
    def network(
        self,
        make_edge: MakeEdge,
        *,
        num_classes: int,
        in_channels: int = 3,
        channels: int = 16,
        cells: int = 5,
        affine: bool = True,  # norms are yours
    ) -> nn.Module:
        labels = list(self._candidates)

        def layer(label: str, candidates: Mapping[str, Callable[[], nn.Module]]) -> nn.Module:
            makes = [lambda *_, make=make: make() for make in candidates.values()]
            edge = make_edge(labels.index(label), makes, 1, 1, 1)
            assert edge is not None, "no layer can be left out"
            return edge

        sizes = {"channels": channels, "cells": cells}
        with Building(make_edge=layer):
            shape = {"num_classes": num_classes, "in_channels": in_channels, **sizes}
            return _OwnNetwork({"module": _made(self.module, shape)})


class _OwnSizedNetwork(SizedNetwork):
    get_classifier: Any = None  # the module may have one


@final
@dataclass(frozen=True)
class ModuleSpace(SizeSpace):
    """Search space of all choices in a module of yours, for a `OneShot` and ``fl-lightning search``.

    Attributes:
        module: class of the module, or import path of the class. The constructor takes ``num_classes`` and
            ``in_channels``; ``forward`` returns logits (B, num_classes).
    """

    name: ClassVar[str] = "module"

    module: str | type[nn.Module]

    @override
    def network(self, **shape: int) -> SizedNetwork:
        return _OwnSizedNetwork(self, shape, {"module": _made(self.module, shape)})
