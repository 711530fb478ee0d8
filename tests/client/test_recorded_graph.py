"""A recorded graph gives what its function would, for another first argument of the same kind."""

import gc
import weakref
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch._inductor.output_code import CompiledFxGraph

from fl_lightning.engines.compiler.compiling import Compiled, HasChanged, _with_own_code
from fl_lightning.engines.compiler.recorded_graph import OtherArguments, Watch


class Pair(NamedTuple):
    one: torch.Tensor
    other: list[torch.Tensor]


class Layer:
    def __init__(self):
        self.weight = torch.full((4,), 2.0)

    def run(self, given):
        """Return parts of every kind, in an order of their own, and move the state."""
        state, pair, number = given
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
    """Return a function's result and its graph, with all arguments as a first one."""
    watch, packed = Watch(), _with_own_code(lambda given: function(*given))
    compiled = torch.compile(packed, fullgraph=True, dynamic=dynamic, backend=watch)
    compiled(args)
    return watch.record(compiled, [args])


def test_other_arguments_give_what_the_function_gives():
    layer = Layer()
    first, graph = recorded(layer.run, arguments(0))
    torch.testing.assert_close(first, layer.run(arguments(0)))
    for seed in (1, 2):
        args = arguments(seed)
        found, expected = graph([args]), layer.run(arguments(seed))
        torch.testing.assert_close(found, expected)
        assert type(found["pair"]) is Pair
        assert found["given"] is args[1].one
        assert found["pair"].other[0] is found["pair"].other[1]
        assert args[0]["count"] == 1


def test_what_python_holds_is_read_where_it_is():
    layer = Layer()
    _, graph = recorded(layer.run, arguments(0))
    layer.weight *= 3
    found, expected = graph([arguments(1)]), layer.run(arguments(1))
    torch.testing.assert_close(found["weighted"], expected["weighted"])


def test_arguments_after_the_first_are_those_of_the_recorded_call():
    """They are read where they were."""

    def moved(x, weights):
        weights["one"].add_(x)
        return weights["one"] * 2

    watch, weights, x = Watch(), {"one": torch.zeros(4)}, torch.ones(4)
    compiled = torch.compile(moved, fullgraph=True, dynamic=False, backend=watch)
    compiled(x, weights)
    _, graph = watch.record(compiled, [x, weights])
    weights["one"].fill_(5)
    assert torch.equal(graph(2 * x, weights), torch.full((4,), 14.0))
    assert torch.equal(weights["one"], torch.full((4,), 7.0))


def test_the_innermost_function_is_called():
    """What is around it takes longer than itself."""
    _, graph = recorded(Layer().run, arguments(0))
    assert isinstance(graph._run, CompiledFxGraph)


def test_views_of_what_is_given_are_its_own():
    """The graph returns what it took, and what is around it makes a view of that."""

    def function(batch, weight):
        row = batch.unsqueeze(0)
        return (row * weight).sum(), row.squeeze(0).detach()

    def batch(seed):
        return torch.randn(3, generator=torch.Generator().manual_seed(seed))

    _, graph = recorded(function, batch(0), torch.ones(3))
    for seed in (1, 2):
        x = batch(seed)
        total, same = graph([x, torch.full((3,), 2.0)])
        assert total == pytest.approx(2 * float(x.sum()), abs=1e-5)
        assert same.data_ptr() == x.data_ptr()
        assert torch.equal(same, x)


@pytest.mark.parametrize("number", [0, 1])
def test_views_of_one_memory_are_told_apart(number):
    """Two that are given lie in one place: which of them a result is a view of nobody can say."""

    def function(one, other):
        return one + other, (one, other)[number].view(-1).view(2)

    x, y = torch.ones(2), torch.zeros(2)
    _, graph = recorded(function, x, x.view(2))
    if graph is not None:
        _, same = graph([x, y])
        assert same.data_ptr() == (x, y)[number].data_ptr()


def test_what_is_written_behind_the_graph_is_written():
    """Of two views of one memory that are both changed, the graph takes the memory alone."""

    def function(given):
        one, other = given
        one.add_(1)
        other.mul_(2)
        return one - other

    def halves():
        whole = torch.arange(6.0)
        return whole, whole[:4], whole[2:]

    watch = Watch()
    compiled = torch.compile(function, fullgraph=True, dynamic=False, backend=watch)
    compiled(halves()[1:])
    _, graph = watch.record(compiled, [halves()[1:]])
    expected, found = halves(), halves()
    result = (graph or compiled)(found[1:])
    torch.testing.assert_close(result, function(expected[1:]))
    torch.testing.assert_close(found[0], expected[0])


def test_a_tensor_made_for_one_call_is_not_recorded():
    """An array's tensor is the graph's input, and there is another one at every call."""

    def scaled(x, array):
        return x * torch.as_tensor(array)

    x = torch.arange(4.0)
    result, graph = recorded(scaled, x, np.full(4, 2.0, np.float32))
    assert torch.equal(result, 2 * x)
    assert graph is None
    run = Compiled(scaled, is_alone=True)
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


def test_a_call_that_compiles_is_not_recorded():
    """What it is given may be held by the compiler alone."""
    watch = Watch()
    compiled = torch.compile(lambda x: 2 * x, fullgraph=True, dynamic=False, backend=watch)
    x = torch.ones(4)
    assert [watch.record(compiled, [x])[1] is None for _ in range(2)] == [True, False]


def test_one_tensor_given_twice_is_not_two():
    """As the start is that a pull goes back to: the graph then takes it once."""

    def function(a, b):
        return 2 * a - b

    x, y = torch.ones(4), torch.full((4,), 2.0)
    _, of_one = recorded(function, x, x)
    assert torch.equal(of_one([y, y]), y)
    with pytest.raises(OtherArguments):
        of_one([x, y])
    _, of_two = recorded(function, x, y)
    assert torch.equal(of_two([y, x]), 3 * x)
    with pytest.raises(OtherArguments):
        of_two([y, y])


@pytest.mark.parametrize(
    "batch",
    [
        {"x": torch.ones(4).double(), "y": torch.ones(4)},
        {"x": torch.ones(1), "y": torch.ones(4)},
        {"y": torch.ones(4), "x": torch.ones(4)},
        {"x": torch.ones(4), "z": torch.ones(4)},
        {"x": [torch.ones(4)], "y": torch.ones(4)},
        {"x": torch.ones(4), "y": None},
    ],
)
def test_arguments_of_another_kind_are_refused(batch):
    _, graph = recorded(lambda b: b["x"] - 2 * b["y"], {"x": torch.ones(4), "y": torch.ones(4)})
    with pytest.raises(OtherArguments):
        graph([batch])


class TestCalledStraight:
    def run(self):
        layer = Layer()
        run = Compiled(layer.run, is_alone=True)
        for seed in range(2):  # the second call is watched
            assert not run.is_recorded
            run(arguments(seed))
        assert run.is_recorded
        return layer, run

    def test_it_looks_at_nothing_until_it_is_to_be_checked(self):
        layer, run = self.run()
        before = layer.run(arguments(1))
        layer.weight = torch.zeros(4)
        torch.testing.assert_close(run(arguments(1)), before)
        run.recheck()
        assert not run.is_recorded
        torch.testing.assert_close(run(arguments(1)), layer.run(arguments(1)))

    def test_who_is_called_once_between_checks_is_not_recorded(self):
        """Nobody would call what was recorded."""
        layer, run = self.run()
        for is_recorded, num_calls in ((True, 1), (False, 1), (False, 2), (True, 1)):
            run.recheck()
            for seed in range(num_calls):
                layer.weight = torch.full((4,), float(seed))
                torch.testing.assert_close(run(arguments(seed)), layer.run(arguments(seed)))
                assert run.is_recorded == is_recorded

    def test_other_arguments_are_a_change(self):
        layer, run = self.run()
        state, pair, number = arguments(1)
        doubles = Pair(pair.one.double(), pair.other)
        with pytest.raises(HasChanged, match="another kind"):
            run([state, doubles, number])
        assert state["count"] == 0
        run.recheck()
        expected = layer.run([{"count": torch.zeros(())}, doubles, number])
        torch.testing.assert_close(run([state, doubles, number]), expected)

    def test_whose_steps_are_not_alone_never_does(self):
        """A hook may replace what a step reads, e.g. how examples are mixed."""
        layer = Layer()
        run = Compiled(layer.run)
        for factor in range(4):
            layer.weight = torch.full((4,), float(factor))
            torch.testing.assert_close(run(arguments(1)), layer.run(arguments(1)))
            assert not run.is_recorded

    def test_it_holds_no_calls_tensors(self):
        _, run = self.run()
        held = []
        for check in (True, False):  # a call that is watched, and one that is not
            args = arguments(2)
            if check:
                run.recheck()
            result = run(args)
            held += [weakref.ref(args[1].other[0]), weakref.ref(result["weighted"])]
            del args, result
        gc.collect()
        assert [reference() for reference in held] == [None] * 4


def test_a_call_alike_finds_the_graph_recorded_before():
    layer = Layer()
    watch, packed = Watch(), _with_own_code(lambda given: layer.run(given))
    compiled = torch.compile(packed, fullgraph=True, dynamic=False, backend=watch)
    compiled(arguments(0))
    _, first = watch.record(compiled, [arguments(0)])
    _, second = watch.record(compiled, [arguments(1)])
    assert second is first
    layer.weight = torch.full((4,), 5.0)  # another tensor: the first graph would read the old one
    _, third = watch.record(compiled, [arguments(1)])
    assert third is not first
    found, expected = third(arguments(2)), layer.run(arguments(2))
    torch.testing.assert_close(found, expected)
