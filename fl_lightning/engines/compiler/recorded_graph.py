"""A compiled graph called straight, as a watched call of its function has shown.

    f(a, b) = result(g(x_1, …, x_m)),     x_i a tensor in a, or one that Python holds elsewhere, as in b

`torch.compile` finds the x_i and builds the result in Python at every call, after a look at all that the
function reads: 0.4 ms, as long as a small step takes. What it calls then looks after what is written and
what is a view; where there is nothing to look after, g is what that calls.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import is_, itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._dynamo import lookup_backend
from torch._inductor.output_code import CompiledFxGraph

# Takes a list, which it may empty
_Run = Callable[[list[Any]], Sequence[Any]]
# Builds a part of a result from what the graph returned and what it was given
_Maker = Callable[[Sequence[Any]], Any]


class OtherArguments(TypeError):  # noqa: N818 - a finding, not a fault
    """The first argument is not of the kind that a graph was recorded with."""


class _Call(NamedTuple):
    run: _Run
    inputs: Sequence[Any]
    outputs: Sequence[Any]


class Watch:
    """A backend of `torch.compile`: the usual one, whose graphs can be watched as they run."""

    def __init__(self) -> None:
        self.__name__ = "inductor"  # for error messages
        self._is_on = self._has_compiled = False
        self._calls: list[_Call] = []
        self._last: RecordedGraph | None = None

    def __call__(self, module: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        """Compile a graph."""
        self._has_compiled = True
        run = lookup_backend("inductor")(module, inputs)

        def watched(*inputs: Any) -> Sequence[Any]:
            outputs: Sequence[Any] = run(*inputs)
            if self._is_on:
                self._calls.append(_Call(lambda given: run(*given), inputs, outputs))
            return outputs

        return watched

    def record(
        self, function: Callable[..., Any], args: Sequence[Any]
    ) -> tuple[Any, RecordedGraph | None]:
        """Call a function that is compiled with this backend.

        Args:
            function: whose graph is one.
            args: its arguments, the first of tensors in tuples, lists and dicts.

        Returns:
            Its result, and what gives that of another first argument of the same kind, as long as the
            other ones and what else the function reads stay. None where that is not sure: after a call
            that has compiled the graph, or that has more to do than to run it. The same object as the
            last time if it would be alike.
        """
        self._is_on, self._has_compiled = True, False
        try:
            with _watched_inside() as inside:
                result = function(*args)
            calls, self._calls = self._calls, []
        finally:
            self._is_on = False
            self._calls.clear()
        if self._has_compiled or len(calls) != 1:
            return result, None
        if len(inside) == 1 and _is_all(inside[0], calls[0]):
            calls += inside
        given = _Given(args[0])
        if self._last is None or not any(self._last.is_what(call, given) for call in calls):
            graphs = [_Graph.of(call, given) for call in reversed(calls)]
            calls.clear()
            inside.clear()  # and with them what was made for this call
            found = (graph.recorded(given, result) for graph in graphs if graph is not None)
            self._last = next((graph for graph in found if graph is not None), None)
        return result, self._last


@contextmanager
def _watched_inside() -> Iterator[list[_Call]]:
    """Note calls of what inductor has made."""
    usual, calls = CompiledFxGraph.__call__, list[_Call]()

    def watched(graph: CompiledFxGraph, inputs: Sequence[Any]) -> Any:
        given = list(inputs)
        outputs = usual(graph, inputs)
        calls.append(_Call(graph, given, outputs))
        return outputs

    CompiledFxGraph.__call__ = watched  # type: ignore[method-assign, assignment]
    try:
        yield calls
    finally:
        CompiledFxGraph.__call__ = usual  # type: ignore[method-assign]


def _is_all(inside: _Call, whole: _Call) -> bool:
    """Return whether a call within another one does all that this one does, but make views."""
    # what is written afterwards would be among its outputs, and memory behind views among its inputs
    own_inputs = {id(x) for x in inside.inputs} <= {id(x) for x in whole.inputs}
    return own_inputs and len(inside.outputs) == len(whole.outputs)


class _Graph(NamedTuple):
    """A graph as a call of it has shown it.

    Attributes:
        run: it.
        sources: what it took: the number of a given tensor, or one that may be held elsewhere.
        outputs: what it returned.
    """

    run: _Run
    sources: list[int | weakref.ref[Tensor]]
    outputs: Sequence[Any]

    @classmethod
    def of(cls, call: _Call, given: _Given) -> _Graph | None:
        """Return it; None if it took something else than tensors, as a size."""
        if not all(isinstance(x, Tensor) for x in call.inputs):
            return None
        number_of = {id(tensor): i for i, tensor in enumerate(given.tensors)}
        sources = [number_of.get(id(x), weakref.ref(x)) for x in call.inputs]
        return cls(call.run, sources, call.outputs)

    def recorded(self, given: _Given, result: Any) -> RecordedGraph | None:
        """Return what gives results like this one; None if not all in it has a place."""
        held = [source if isinstance(source, int) else source() for source in self.sources]
        known = [tensor for tensor in held if tensor is not None]
        make = _maker(result, _Places([*self.outputs, *given.tensors]))
        # what nobody holds was made for this call
        if make is None or len(known) < len(held):
            return None
        return RecordedGraph(self.run, known, make, given.kinds)


class RecordedGraph:
    """A graph with the places of what it takes and gives.

    Args:
        run: the graph.
        inputs: of the graph: a tensor, or its number among the first argument's tensors.
        make: the result from what the graph returns and the first argument's tensors behind it.
        kinds: of the first argument.
    """

    def __init__(
        self, run: _Run, inputs: Sequence[int | Tensor], make: _Maker, kinds: Sequence[Any]
    ) -> None:
        self._run, self._inputs, self._make, self._kinds = run, inputs, make, kinds

    def is_what(self, call: _Call, given: _Given) -> bool:
        """Return whether a call ran this graph, on a first argument of its kind and what it knows."""
        if call.run is not self._run or given.kinds != self._kinds:
            return False
        known = [given.tensors[x] if isinstance(x, int) else x for x in self._inputs]
        return len(known) == len(call.inputs) and all(map(is_, known, call.inputs))

    def __call__(self, first: Any, *_: Any) -> Any:
        """Return what the function would.

        Raises:
            OtherArguments: if tensors in the first argument are of other types or shapes, or in another
                order, or others of them are one and the same.
        """
        given = _Given(first)
        if given.kinds != self._kinds:
            raise OtherArguments("its first argument is of another kind than before")
        inputs = [given.tensors[x] if isinstance(x, int) else x for x in self._inputs]
        return self._make([*self._run(inputs), *given.tensors])


class _Given:
    """The tensors in tuples, lists and dicts, and what tells whether others are of their kind."""

    def __init__(self, value: Any) -> None:
        self.tensors: list[Tensor] = []
        self.kinds: list[Any] = []
        self._number_of: dict[int, int] = {}  # by identity: one tensor may be given twice
        self._note(value)

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


class _Places:
    """Where tensors are in a list."""

    def __init__(self, tensors: Sequence[Any]) -> None:
        self._by_identity: dict[int, int] = {}
        self._by_memory: dict[Any, int | None] = {}  # None if there are several
        for place, tensor in enumerate(tensors):
            if not isinstance(tensor, Tensor) or id(tensor) in self._by_identity:
                continue
            self._by_identity[id(tensor)] = place
            where = _memory(tensor)
            self._by_memory[where] = None if where in self._by_memory else place

    def of(self, tensor: Tensor) -> int | None:
        """Return the place of a tensor, or of the only one with the same numbers in its memory."""
        place = self._by_identity.get(id(tensor))
        return self._by_memory.get(_memory(tensor)) if place is None else place


def _memory(tensor: Tensor) -> Any:
    return tensor.data_ptr(), tensor.device, tensor.dtype, tensor.shape, tensor.stride()


def _maker(value: Any, places: _Places) -> _Maker | None:
    """Return what builds a value like this; None if something in it has no place."""
    if isinstance(value, Tensor):
        place = places.of(value)
        return None if place is None else itemgetter(place)
    if isinstance(value, dict):
        of_values = _maker(list(value.values()), places)
        keys = list(value)
        return of_values and (lambda pool: dict(zip(keys, of_values(pool), strict=True)))
    if isinstance(value, (tuple, list)):
        makers = [_maker(part, places) for part in value]
        known = [maker for maker in makers if maker is not None]
        make = getattr(type(value), "_make", type(value))  # of named tuples
        is_known = len(known) == len(makers)
        return (lambda pool: make([maker(pool) for maker in known])) if is_known else None
    is_plain = value is None or isinstance(value, (bool, int, float, str))
    return (lambda pool: value) if is_plain else None
