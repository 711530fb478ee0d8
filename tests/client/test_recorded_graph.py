"""A recorded graph gives what its function would, for other arguments of the same kind."""

import gc
import weakref
from typing import NamedTuple

import numpy as np
import pytest
import torch

from fl_lightning.client.compiling import Compiled
from fl_lightning.client.recorded_graph import Watch


class Pair(NamedTuple):
    one: torch.Tensor
    other: list[torch.Tensor]


class Layer:
    def __init__(self):
        self.weight = torch.full((4,), 2.0)

    def run(self, state, pair, number):
        """Return parts of every kind, in an order of their own, and move the state."""
        total = pair.one + sum(pair.other)
        state["count"].add_(1)
        return {
            "weighted": total * self.weight,
            "given": pair.one,  # as it came in
            "pair": Pair(total - 1, [total, total]),
            "plain": (None, number),
        }


def arguments(seed):
    draws = torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))
    return {"count": torch.zeros(())}, Pair(draws[0].clone(), list(draws[1:].clone())), 7


def recorded(function, *args, dynamic=False):
    watch = Watch()
    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend=watch)
    return watch.record(compiled, args)


def test_other_arguments_give_what_the_function_gives():
    layer = Layer()
    first, graph = recorded(layer.run, *arguments(0))
    torch.testing.assert_close(first, layer.run(*arguments(0)))
    for seed in (1, 2):
        args = arguments(seed)
        found, expected = graph(*args), layer.run(*arguments(seed))
        torch.testing.assert_close(found, expected)
        assert type(found["pair"]) is Pair
        assert found["given"] is args[1].one
        assert found["pair"].other[0] is found["pair"].other[1]
        assert args[0]["count"] == 1


def test_what_python_holds_is_read_where_it_is():
    layer = Layer()
    _, graph = recorded(layer.run, *arguments(0))
    layer.weight *= 3
    args = arguments(1)
    torch.testing.assert_close(graph(*args)["weighted"], layer.run(*arguments(1))["weighted"])


def test_a_tensor_made_for_one_call_is_not_recorded():
    """An array's tensor is the graph's input, and there is another one at every call."""

    def scaled(x, array):
        return x * torch.as_tensor(array)

    x = torch.arange(4.0)
    result, graph = recorded(scaled, x, np.full(4, 2.0, np.float32))
    assert torch.equal(result, 2 * x)
    assert graph is None
    run = Compiled(scaled)
    for factor in (2.0, 3.0, 5.0):
        assert torch.equal(run(x, np.full(4, factor, np.float32)), factor * x)
    assert not run.is_recorded


def test_a_result_that_is_neither_the_graphs_nor_given_is_not_recorded():
    layer = Layer()

    def doubled(x):
        return 2 * x, layer.weight

    (_, weight), graph = recorded(doubled, torch.ones(4))
    assert weight is layer.weight
    assert graph is None


def test_a_graph_of_any_shape_is_not_recorded():
    result, graph = recorded(lambda x: 2 * x, torch.arange(4.0), dynamic=True)
    assert torch.equal(result, 2 * torch.arange(4.0))
    assert graph is None


def test_calls_between_checks_look_at_nothing():
    layer = Layer()
    run = Compiled(layer.run)
    run(*arguments(0))
    assert run.is_recorded
    before = layer.run(*arguments(1))
    layer.weight = torch.zeros(4)
    torch.testing.assert_close(run(*arguments(1)), before)
    run.recheck()
    assert not run.is_recorded
    torch.testing.assert_close(run(*arguments(1)), layer.run(*arguments(1)))


def test_one_graph_is_recorded_once_a_second_call_has_found_it_unchanged():
    run = Compiled(Layer().run, otherwise=lambda *args: None)
    for times in (False, True, True):
        run(*arguments(0))
        assert run.is_recorded == times


@pytest.mark.parametrize("kept", [True, False])
def test_nothing_holds_a_calls_tensors(kept):
    run = Compiled(Layer().run)
    held = []
    for seed in range(2):  # the call that is watched, and one that is not
        args = arguments(seed)
        result = run(*args)
        held += [weakref.ref(args[1].other[0]), weakref.ref(result["weighted"])]
        del args, result
    if not kept:
        del run
    gc.collect()
    assert [reference() for reference in held] == [None] * 4
