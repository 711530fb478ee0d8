"""Estimators: published vectors, brute force, vmap against the loop, and what they leave alone."""

import pytest
import torch
from networks import examples, tiny_vit, two_layers
from torch import nn

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.models import LeNet
from fl_lightning.sparsity import (
    EmpiricalFisher,
    ExactFisher,
    SampledFisher,
    Scores,
    Scoring,
    SquaredMeanGradient,
    raw_logits,
)

ALL = [SampledFisher, ExactFisher, EmpiricalFisher, SquaredMeanGradient]


def largest_difference(one, other):
    """Of two scores, relative to each tensor's largest."""
    return max(
        float((one.sums[name] - other.sums[name]).abs().max() / other.sums[name].abs().max())
        for name in other.sums
    )


@pytest.mark.parametrize("limit", [None, 1])
def test_four_estimators_of_the_3_by_2_example(limit):
    """W (3, 2), four examples, logits X Wᵀ: four different scores, four different rankings."""
    module = nn.Linear(2, 3, bias=False)
    with torch.no_grad():
        module.weight.copy_(torch.tensor([[0.2, -0.1], [0, 0.3], [-0.4, 0.1]]))
    x = torch.tensor([[1.0, 2], [0.5, -1], [-1, 0.3], [2, 0]])
    batches = [(x, torch.tensor([0, 2, 1, 0]))]
    plain = Scoring(memory_limit=limit)
    expected = {
        ExactFisher(plain): [
            [0.3597662, 0.2651510],
            [0.3536793, 0.3046294],
            [0.2472868, 0.2296100],
        ],
        EmpiricalFisher(scoring=plain): [
            [0.4005644, 0.5783715],
            [0.2987247, 0.2796670],
            [0.1192523, 0.1868423],
        ],
        ExactFisher(Scoring(quantity=raw_logits, memory_limit=limit)): [
            [0.6621099, 0.3928449],
            [0.5620925, 0.5761684],
            [0.3382977, 0.3034866],
        ],
        SquaredMeanGradient(): [
            [0.1842286, 0.2099853],
            [0.2495322, 0.0170743],
            [0.0049440, 0.1073039],
        ],
    }
    for estimator, scores in expected.items():
        found = estimator(module, batches).mean()["weight"]
        torch.testing.assert_close(found, torch.tensor(scores), atol=1e-6, rtol=0)


def brute_force(module, x):
    """Σ_i Σ_y p(y | x_i) (∂ log p(y | x_i))², an example and a class at a time."""
    sums = {name: torch.zeros_like(p) for name, p in module.named_parameters()}
    for example in x:
        for log_p in module(example).log_softmax(0):
            gradients = torch.autograd.grad(log_p, module.parameters(), retain_graph=True)
            for total, gradient in zip(sums.values(), gradients, strict=True):
                total += log_p.detach().exp() * gradient**2
    return Scores(sums, len(x))


def test_exact_fisher_is_brute_force_and_the_sampled_one_converges_to_it():
    module, (x, _) = two_layers(), examples(6, 3)
    exact = ExactFisher()(module, [x[:4], x[4:]])
    assert largest_difference(exact, brute_force(module, x)) < 1e-5
    few = SampledFisher(4)(module, [x.repeat(10, 1)], seed=1)
    many = SampledFisher(4)(module, [x.repeat(1000, 1)], seed=1)
    errors = [
        largest_difference(Scores(sampled.mean(), 1), Scores(exact.mean(), 1))
        for sampled in (few, many)
    ]
    assert errors[1] < min(0.05, errors[0] / 3)  # expected: a tenth


@pytest.mark.parametrize("estimator", [SampledFisher, ExactFisher, EmpiricalFisher])
@pytest.mark.parametrize(
    ("network", "shape"),
    [(tiny_vit, (5, 1, 16, 16)), (lambda: LeNet(4, 1, 16), (5, 1, 16, 16))],
    ids=["vit", "lenet"],
)
def test_many_at_once_is_one_by_one(estimator, network, shape):
    module, batch = network(), examples(*shape)
    at_once = estimator(scoring=Scoring(memory_limit=2**30))(module, [batch], seed=3)
    one_by_one = estimator(scoring=Scoring(memory_limit=1))(module, [batch], seed=3)
    assert largest_difference(at_once, one_by_one) < 1e-5


def test_neither_batches_nor_chunks_nor_other_parameters_change_the_labels_drawn():
    module, (x, y) = two_layers(), examples(11, 3)
    estimator = SampledFisher(2)
    whole = estimator(module, [(x, y)], seed=5)
    parts = estimator(module, [(x[:3], y[:3]), (x[3:8], y[3:8]), (x[8:], y[8:])], seed=5)
    limit = 3 * 8 * sum(p.numel() for p in module.parameters())
    chunked = SampledFisher(2, Scoring(memory_limit=limit))(module, [(x, y)], seed=5)
    bias = {"2.bias": module[2].bias}
    head = estimator(module, [x], parameters=bias, seed=5)
    assert largest_difference(parts, whole) < 1e-5
    assert largest_difference(chunked, whole) < 1e-5
    torch.testing.assert_close(head.sums["2.bias"], whole.sums["2.bias"])
    assert largest_difference(estimator(module, [x], seed=6), whole) > 0.01


@pytest.mark.parametrize("estimator", ALL)
def test_scores_of_parts_add_up_and_a_limit_takes_the_first_examples(estimator):
    module, (x, y) = two_layers(), examples(7, 3)
    first = estimator(scoring=Scoring(max_examples=4))(module, [(x[:3], y[:3]), (x[3:], y[3:])])
    assert first.num_examples == 4
    expected = estimator()(module, [(x[:3], y[:3]), (x[3:4], y[3:4])])
    assert largest_difference(first, expected) < 1e-6
    together = first + expected
    assert together.num_examples == 8
    assert largest_difference(Scores(together.mean(), 1), Scores(first.mean(), 1)) < 1e-6


@pytest.mark.parametrize("estimator", ALL)
@pytest.mark.parametrize("limit", [None, 1])
def test_the_module_stays_as_it_is(estimator, limit):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 4))
    module[2].eval()
    module[3].bias.requires_grad_(False)
    module[0].weight.grad = torch.ones(6, 3)
    state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    generator = torch.get_rng_state()
    values = {n: p * 0.5 for n, p in module.named_parameters()}
    with torch.no_grad():
        scoring = Scoring(memory_limit=limit)
        scores = estimator(scoring=scoring)(module, [examples(5, 3)], parameters=values)
        all_that_train = estimator(scoring=scoring)(module, [examples(5, 3)])
    assert scores.sums.keys() == values.keys()
    assert all_that_train.sums.keys() == values.keys() - {"3.bias"}
    assert all((total >= 0).all() and total.any() for total in scores.sums.values())
    assert all(torch.equal(state[name], tensor) for name, tensor in module.state_dict().items())
    assert torch.equal(generator, torch.get_rng_state())
    assert [child.training for child in module] == [True, True, False, True]
    assert module[0].weight.grad.eq(1).all()
    assert module[1].weight.grad is None
    assert not module[3].bias.requires_grad
    assert all(p.is_leaf for p in module.parameters())


@pytest.mark.parametrize("limit", [None, 1])
def test_half_precision_is_summed_in_float32(limit):
    module, batch = tiny_vit(), examples(5, 1, 16, 16)
    estimator = EmpiricalFisher(scoring=Scoring(memory_limit=limit))
    full = estimator(module, [batch])
    with torch.autocast("cpu", torch.bfloat16):
        mixed = estimator(module, [batch])
    true = estimator(module.bfloat16(), [(batch[0].bfloat16(), batch[1])])
    for scores in (mixed, true):
        assert {total.dtype for total in scores.sums.values()} == {torch.float32}
        assert largest_difference(scores, full) < 0.1
    double = estimator(module.double(), [(batch[0].double(), batch[1])])
    assert {total.dtype for total in double.sums.values()} == {torch.float64}


class ByValue(nn.Module):
    """Branches on its input: vmap cannot, a loop can."""

    def __init__(self):
        super().__init__()
        self.net = two_layers()

    def forward(self, x):
        return self.net(x) if float(x.sum()) > 0 else self.net(-x)


class Clamp(torch.autograd.Function):
    """Without setup_context: nothing of torch.func can differentiate it."""

    @staticmethod
    def forward(ctx, x):
        return x.clamp(-1, 1)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class OldFunction(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = two_layers()

    def forward(self, x):
        return Clamp.apply(self.net(x))


@pytest.mark.parametrize("network", [ByValue, OldFunction])
def test_what_vmap_cannot_run_is_scored_one_by_one_and_said_once(network):
    module, batch = network(), examples(7, 3)
    with pytest.warns(
        UserWarning, match="example by example, which is slow, because vmap"
    ) as caught:
        scores = ExactFisher()(module, [batch, batch])
    assert len(caught) == 1
    expected = ExactFisher(Scoring(memory_limit=1))(module, [batch, batch])
    assert largest_difference(scores, expected) < 1e-6


def test_a_fault_of_the_module_is_no_reason_for_a_loop():
    with pytest.raises(RuntimeError, match="shapes"):
        ExactFisher()(two_layers(), [examples(4, 7)])


def test_batches_of_any_form():
    module, (x, y) = two_layers(), examples(4, 3)

    def logits(module, batch):
        return module(batch["inputs"]["x"])

    scoring = Scoring(logits=logits)
    batch = {"inputs": {"x": x}, "target": y}
    scores = EmpiricalFisher(lambda batch: batch["target"], scoring)(module, [batch])
    assert largest_difference(scores, EmpiricalFisher()(module, [(x, y)])) == 0

    class Inputs(dict):
        pass

    class Batch(list):
        pass

    own = Batch([Inputs(x=x), y])
    form = Scoring(logits=lambda module, batch: module(batch[0]["x"]), memory_limit=1)
    scores = EmpiricalFisher(lambda batch: batch[1], form)(module, [own])
    assert largest_difference(scores, EmpiricalFisher()(module, [(x, y)])) < 1e-6
    tied = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    tied[1].weight = tied[0].weight
    shared = ExactFisher()(tied, [x])
    assert shared.sums.keys() == {"0.weight", "0.bias", "1.bias"}
    assert largest_difference(shared, brute_force(tied, x)) < 1e-5


@pytest.mark.parametrize(
    ("estimator", "batches", "message"),
    [
        (ExactFisher(), [], "no examples"),
        (EmpiricalFisher(), [torch.ones(2, 3)], "needs labels"),
        (ExactFisher(), [(torch.ones(2, 3), "cat")], "one contains a str"),
        (ExactFisher(), [(torch.ones(2, 3), torch.ones(3))], r"lengths are \[2, 3\]"),
        (ExactFisher(), [torch.full((2, 3), torch.nan)], r"scores of 0\.weight, .* are not finite"),
        (ExactFisher(Scoring(logits=lambda m, b: m(b[0]).sum(1))), [examples(2, 3)], "logits must"),
    ],
)
def test_bad_batches_are_refused(estimator, batches, message):
    with pytest.raises(ConfigurationError, match=message):
        estimator(two_layers(), batches)


def test_bad_options_are_refused():
    with pytest.raises(ConfigurationError, match="num_samples must be at least 1"):
        SampledFisher(0)
    with pytest.raises(ConfigurationError, match="max_examples"):
        Scoring(max_examples=0)
    with pytest.raises(ConfigurationError, match="memory_limit"):
        Scoring(memory_limit=0)
    parameters = {"0.weight": torch.ones(1), "other": torch.ones(2)}
    with pytest.raises(ConfigurationError, match=r"no parameters 0\.weight, other of the"):
        ExactFisher()(two_layers(), [torch.ones(2, 3)], parameters=parameters)
    with pytest.raises(ConfigurationError, match="differ in a"):
        Scores({}, 1) + Scores({"a": torch.ones(1)}, 1)
