"""A compiled step is a matter of speed: without a graph the same function runs as it is."""

import pytest
import torch

from fl_lightning.client.compiling import Compiled, HasChanged

X = torch.arange(4.0)


class Scaled:
    def __init__(self, factor):
        self.factor = factor

    def times(self, x):
        return x * self.factor

    def by_value(self, x):
        return x * self.factor if float(x.sum()) > 0 else x


@pytest.mark.slow
def test_engines_do_not_take_each_others_graphs():
    runs = [Compiled(Scaled(factor).times) for factor in range(10)]
    for factor, run in enumerate(runs):
        assert torch.equal(run(X), X * factor)
        assert not run.is_given_up


def test_a_function_that_cannot_be_one_graph_runs_as_it_is():
    run = Compiled(Scaled(3).by_value)
    with pytest.warns(UserWarning, match="not compiled from here on"):
        assert torch.equal(run(X), 3 * X)
    assert run.is_given_up
    assert torch.equal(run(X), 3 * X)


def test_a_changed_value_is_found_when_asked_for():
    scaled = Scaled(2)
    run = Compiled(scaled.times)
    assert torch.equal(run(X), 2 * X)
    assert torch.equal(run(X), 2 * X)
    scaled.factor = 5
    run.recheck()
    assert torch.equal(run(X), 5 * X)
    assert torch.equal(run(X), 5 * X)


def test_a_change_may_be_refused():
    """What depends on what Python reads besides the graph can then follow first."""
    scaled = Scaled(2)
    run = Compiled(scaled.times)
    run.recheck(refuse=True)
    for _ in range(2):
        with pytest.raises(HasChanged, match="no graph"):
            run(X)
    run.recheck()
    assert torch.equal(run(X), 2 * X)
    run.recheck(refuse=True)
    assert torch.equal(run(X), 2 * X)
    scaled.factor = 5
    run.recheck(refuse=True)
    for _ in range(2):
        with pytest.raises(HasChanged, match="factor"):
            run(X)
    run.recheck()
    assert torch.equal(run(X), 5 * X)
    assert not run.is_given_up


def test_a_value_that_changes_every_round_is_given_up_in_time():
    scaled = Scaled(0)
    run = Compiled(scaled.times)

    def rounds():
        for factor in range(12):
            scaled.factor = factor
            run.recheck()
            assert torch.equal(run(X), X * factor)

    with pytest.warns(UserWarning, match="not compiled from here on"):
        rounds()
    assert run.is_given_up
