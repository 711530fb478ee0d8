"""Which entries matter, and heads in closed form: sums over examples, whoever holds these."""

import pytest
import torch
from families import made, of, vector
from torch import nn

pytestmark = pytest.mark.usefixtures("global_generators_stay")


def batches():
    random = torch.Generator().manual_seed(6)
    for _ in range(3):
        yield torch.randn(5, 4, generator=random), torch.arange(5) % 3


def network():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


@of("sensitivity")
def test_a_sensitivity_adds_up_over_examples_and_leaves_the_model_alone(cls):
    model, before = network(), network().state_dict()
    whole, again, other = (made(cls)(model, batches(), seed=seed) for seed in (0, 0, 1))
    names = [name for name, _ in model.named_parameters()]
    assert list(whole.sums) == names
    assert whole.num_examples == 15
    for name, total in whole.sums.items():
        assert bool((total >= 0).all())
        assert torch.equal(total, again.sums[name])
    draws_nothing = all(torch.equal(whole.sums[name], other.sums[name]) for name in names)
    if draws_nothing:
        first, *others = ([batch] for batch in batches())
        parts = made(cls)(model, first)
        for batch in others:
            parts = parts + made(cls)(model, batch)
        torch.testing.assert_close(dict(parts.sums), dict(whole.sums))
        assert parts.num_examples == 15
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())


@of("order of entries")
def test_an_order_of_entries_is_a_pure_function(cls):
    rule = made(cls)
    parameters = {"weight": vector(6).view(2, 3), "bias": vector(3, seed=1)}
    scores = {name: value.abs() + 1 for name, value in parameters.items()}
    one = rule.order_by(parameters, scores, seed=4)
    again = made(cls).order_by(parameters, scores if rule.needs_scores else {}, seed=4)
    assert {name: value.shape for name, value in one.items()} == {
        name: value.shape for name, value in parameters.items()
    }
    assert all(torch.equal(one[name], again[name]) for name in parameters)
    assert torch.equal(parameters["weight"], vector(6).view(2, 3))


@of("fit of a head")
def test_a_head_does_not_depend_on_whose_examples_are_whose(cls):
    features, labels = vector(80).view(20, 4), torch.arange(20) % 3
    alone = made(cls).fit([(features, labels)], 4, 3)
    owners = [(features[rows], labels[rows]) for rows in (slice(0, 3), slice(3, 15), slice(15, 20))]
    shared = made(cls).fit(owners, 4, 3)
    torch.testing.assert_close(shared.weight, alone.weight, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(shared.bias, alone.bias, rtol=1e-5, atol=1e-6)
