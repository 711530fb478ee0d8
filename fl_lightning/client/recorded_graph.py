"""A compiled graph called straight, as a watched call of its function has shown.

    f(a, b) = result(g(x_1, …, x_m)),     x_i a tensor in a or b, or one that Python holds elsewhere

`torch.compile` finds the x_i and builds the result in Python at every call, after a look at all that the
function reads: 0.4 ms, as long as a small step takes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch._dynamo import lookup_backend

_Graph = Callable[..., Sequence[Any]]
# Builds a part of a result from what the graph returned and what it was given
_Maker = Callable[[Sequence[Any]], Any]


class OtherArguments(TypeError):  # noqa: N818 - a finding, not a fault
    """Arguments are not of the kind that a graph was recorded with."""


class Watch:
    """A backend of `torch.compile`: the usual one, whose graphs can be watched as they run."""

    def __init__(self) -> None:
        self.__name__ = "inductor"  # for error messages
        self._is_on = self._has_compiled = False
        self._calls: list[tuple[_Graph, tuple[Any, ...], Sequence[Any]]] = []

    def __call__(self, module: torch.fx.GraphModule, inputs: list[Any]) -> _Graph:
        """Compile a graph."""
        self._has_compiled = True
        run = lookup_backend("inductor")(module, inputs)

        def watched(*inputs: Any) -> Sequence[Any]:
            outputs: Sequence[Any] = run(*inputs)
            if self._is_on:
                self._calls.append((run, inputs, outputs))
            return outputs

        return watched

    def record(
        self, function: Callable[..., Any], args: Sequence[Any]
    ) -> tuple[Any, RecordedGraph | None]:
        """Call a function that is compiled with this backend.

        Args:
            function: whose graph is one.
            args: its arguments: tensors in tuples, lists and dicts, and what is always the same.

        Returns:
            Its result, and what gives that of other arguments of the same kind, as long as what else
            the function reads stays. None where that is not sure: after a call that has compiled the
            graph, or that has more to do than to run it.
        """
        self._is_on, self._has_compiled = True, False
        try:
            result = function(*args)
            calls, self._calls = self._calls, []
        finally:
            self._is_on = False
            self._calls.clear()
        if self._has_compiled or len(calls) != 1:
            return result, None
        run, inputs, outputs = calls.pop()
        if not all(isinstance(x, Tensor) for x in inputs):  # a size among them
            return result, None
        given = _Given(args)
        number_of = {id(tensor): i for i, tensor in enumerate(given.tensors)}
        sources = [number_of.get(id(tensor), weakref.ref(tensor)) for tensor in inputs]
        del inputs
        held = [source if isinstance(source, int) else source() for source in sources]
        known = [tensor for tensor in held if tensor is not None]
        place_of = {tensor: len(outputs) + i for tensor, i in number_of.items()}
        place_of.update({id(output): i for i, output in enumerate(outputs)})
        make = _maker(result, place_of)
        # what nobody holds was made for this call
        if make is None or len(known) < len(held):
            return result, None
        return result, RecordedGraph(run, known, make, given.kinds)


class RecordedGraph:
    """A graph with the places of what it takes and gives.

    Args:
        run: the graph.
        inputs: of the graph: a tensor, or its number among the arguments' tensors.
        make: the result from what the graph returns and the arguments' tensors behind it.
        kinds: of the arguments.
    """

    def __init__(
        self, run: _Graph, inputs: Sequence[int | Tensor], make: _Maker, kinds: Sequence[Any]
    ) -> None:
        self._run, self._inputs, self._make, self._kinds = run, inputs, make, kinds

    def __call__(self, *args: Any) -> Any:
        """Return what the function would.

        Raises:
            OtherArguments: if they are of other types or shapes, or in another order, or others of them
                are one and the same tensor.
        """
        given = _Given(args)
        if given.kinds != self._kinds:
            raise OtherArguments("its arguments are of another kind than before")
        inputs = [given.tensors[x] if isinstance(x, int) else x for x in self._inputs]
        return self._make([*self._run(*inputs), *given.tensors])


class _Given:
    """The tensors in tuples, lists and dicts, and what tells whether others are of their kind."""

    def __init__(self, args: Sequence[Any]) -> None:
        self.tensors: list[Tensor] = []
        self.kinds: list[Any] = []
        self._number_of: dict[int, int] = {}  # by identity: one tensor may be given twice
        self._note(args)

    def _note(self, value: Any) -> None:
        if isinstance(value, Tensor):
            self.tensors.append(value)
            number = self._number_of.setdefault(id(value), len(self._number_of))
            self.kinds.append((value.dtype, value.shape, number))
        elif isinstance(value, dict):
            self.kinds.append(tuple(value))
            for part in value.values():
                self._note(part)
        elif isinstance(value, (tuple, list)):
            self.kinds.append(len(value))
            for part in value:
                self._note(part)
        else:
            self.kinds.append(type(value))


def _maker(value: Any, place_of: dict[int, int]) -> _Maker | None:
    """Return what builds a value like this; None if something in it has no place."""
    if isinstance(value, Tensor):
        place = place_of.get(id(value))
        return None if place is None else itemgetter(place)
    if isinstance(value, dict):
        of_values = _maker(list(value.values()), place_of)
        keys = list(value)
        return of_values and (lambda pool: dict(zip(keys, of_values(pool), strict=True)))
    if isinstance(value, (tuple, list)):
        makers = [_maker(part, place_of) for part in value]
        known = [maker for maker in makers if maker is not None]
        make = getattr(type(value), "_make", type(value))  # of named tuples
        is_known = len(known) == len(makers)
        return (lambda pool: make([maker(pool) for maker in known])) if is_known else None
    is_plain = value is None or isinstance(value, (bool, int, float, str))
    return (lambda pool: value) if is_plain else None
