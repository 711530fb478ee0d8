"""The gradient of α through a step of the weights: closed forms, differences against derivatives."""

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.nas.alpha_gradients import WeightStep, architecture_gradient, gradients_of, leaves
from fl_lightning.nas.collapse import has_grown, largest_eigenvalue
from fl_lightning.nas.relaxation import SearchStep, Softmax

DOUBLE = {"dtype": torch.float64}


def number(value):
    return torch.tensor(value, **DOUBLE)


def pulled(w, a):
    return (w["w"] - a["a"]) ** 2 / 2


def to_one(w, a):
    return (w["w"] - 1) ** 2 / 2


def curved(w, a):
    return (w["w"] ** 2 - a["a"]) ** 2 * (1 + a["a"]) / 4


def curved_validation(w, a):
    return (w["w"] - 1) ** 2 / 2 + 0.1 * a["a"] * w["w"]


def gradient(train, validation, w, step, order, **options):
    tensors = {"w": number(w)}, {"a": number(0.5)}
    return float(
        architecture_gradient(train, validation, *tensors, step, order=order, **options)["a"]
    )


@pytest.mark.parametrize(
    ("order", "expected"), [("first", 0), ("finite", -0.095), ("exact", -0.095)]
)
def test_a_quadratic(order, expected):
    step = WeightStep(lr=0.1)
    assert gradient(pulled, to_one, 0.0, step, order) == pytest.approx(expected, abs=1e-6)
    ahead = step.taken({"w": number(0.0)}, {"w": number(-0.5)})
    assert float(ahead["w"]) == pytest.approx(0.05)


@pytest.mark.parametrize(
    ("order", "expected"),
    [("first", 0.07), ("finite", 0.043792728), ("exact", 0.043790985)],
)
def test_a_loss_with_a_third_derivative(order, expected):
    actual = gradient(curved, curved_validation, 0.7, WeightStep(lr=0.1), order)
    assert actual == pytest.approx(expected, abs=1e-9)


def test_the_first_order_at_the_weights_ahead():
    w, a = leaves({"w": number(0.7)}), leaves({"a": number(0.5)})
    ahead = WeightStep(lr=0.1).taken(w, gradients_of(curved(w, a), w))
    assert float(ahead["w"].detach()) == pytest.approx(0.70105, abs=1e-6)
    at_ahead = architecture_gradient(curved, curved_validation, ahead, a, order="first")
    assert float(at_ahead["a"]) == pytest.approx(0.070105, abs=1e-6)


@pytest.mark.parametrize("order", ["finite", "exact"])
def test_momentum_and_weight_decay(order):
    step = WeightStep(lr=0.1, momentum=0.9, weight_decay=0.01)
    velocities = {"w": number(0.2)}
    actual = gradient(pulled, to_one, 0.0, step, order, velocities=velocities)
    assert actual == pytest.approx(-0.0968, abs=1e-6)
    ahead = step.taken({"w": number(0.0)}, {"w": number(-0.5)}, velocities)
    assert float(ahead["w"]) == pytest.approx(0.032)


def test_the_weights_ahead_are_where_sgd_goes():
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.randn(5, **DOUBLE))
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9, weight_decay=0.01)
    for _ in range(3):
        before = {"w": parameter.detach().clone()}
        buffers = optimizer.state.get(parameter, {}).get("momentum_buffer")
        velocities = {} if buffers is None else {"w": buffers.clone()}
        parameter.grad = torch.randn(5, **DOUBLE)
        expected = WeightStep.of(optimizer).taken(before, {"w": parameter.grad}, velocities)
        optimizer.step()
        torch.testing.assert_close(parameter.detach(), expected["w"])


class Net(nn.Module):
    """Two mixed edges and a classifier."""

    def __init__(self):
        super().__init__()
        candidates = [
            lambda i, o, s: nn.Linear(i, o),
            lambda *_: nn.Identity(),
            lambda *_: nn.Tanh(),
        ]
        self.edges = nn.ModuleList(Softmax().edge(row, candidates, 4, 4, 1) for row in (0, 1))
        self.norm = nn.BatchNorm1d(4, affine=False)
        self.classifier = nn.Linear(4, 3)
        self.alpha = nn.Parameter(0.3 * torch.randn(2, 3))

    def forward(self, x):
        weights = Softmax().weights(self.alpha, SearchStep())
        for edge in self.edges:
            x = self.norm(edge(x, weights))
        return self.classifier(x)


@pytest.fixture
def problem():
    torch.manual_seed(0)
    net = Net().double()
    x, y = torch.randn(2, 16, 4, **DOUBLE), torch.randint(3, (2, 16))

    def loss(half):
        def of(w, a):
            buffers = {name: buffer.clone() for name, buffer in net.named_buffers()}
            logits = functional_call(net, {**w, **a, **buffers}, x[half])
            return nn.functional.cross_entropy(logits, y[half])

        return of

    parameters = dict(net.named_parameters())
    alphas = {"alpha": parameters.pop("alpha")}
    return net, loss(0), loss(1), parameters, alphas


def test_differences_against_double_backward_in_a_network(problem):
    _, train, validation, w, a = problem
    velocities = {name: 0.1 * torch.randn_like(weight) for name, weight in w.items()}
    step = WeightStep(lr=0.2, momentum=0.9, weight_decay=0.01)
    first, finite, exact = (
        architecture_gradient(train, validation, w, a, step, velocities=velocities, order=order)[
            "alpha"
        ]
        for order in ("first", "finite", "exact")
    )
    torch.testing.assert_close(finite, exact, rtol=1e-3, atol=1e-6)
    assert (first - exact).abs().max() > 10 * (finite - exact).abs().max()


def test_the_exact_gradient_is_the_slope_of_the_loss_after_the_step(problem):
    _, train, validation, w, a = problem
    step = WeightStep(lr=0.2, weight_decay=0.01)
    exact = architecture_gradient(train, validation, w, a, step, order="exact")["alpha"]

    def after(alpha):
        weights, alphas = leaves(w), {"alpha": alpha}
        ahead = step.taken(weights, gradients_of(train(weights, alphas), weights))
        return float(validation(ahead, alphas).detach())

    alpha = a["alpha"].detach()
    for entry in ((0, 1), (1, 2)):
        moved = torch.zeros_like(alpha)
        moved[entry] = 1e-5
        slope = (after(alpha + moved) - after(alpha - moved)) / 2e-5
        assert float(exact[entry]) == pytest.approx(slope, abs=1e-8)


@pytest.mark.parametrize("order", ["finite", "exact"])
def test_without_a_step_it_is_the_first_order(problem, order):
    _, train, validation, w, a = problem
    first = architecture_gradient(train, validation, w, a, order="first")
    second = architecture_gradient(train, validation, w, a, WeightStep(lr=0.0), order=order)
    torch.testing.assert_close(first["alpha"], second["alpha"])


@pytest.mark.parametrize("order", ["first", "finite", "exact"])
def test_nothing_that_is_handed_over_changes(problem, order):
    net, train, validation, w, a = problem
    before = copy.deepcopy(net.state_dict())
    architecture_gradient(train, validation, w, a, WeightStep(lr=0.2), order=order)
    assert all(torch.equal(before[name], tensor) for name, tensor in net.state_dict().items())
    assert all(parameter.grad is None for parameter in net.parameters())


def test_a_flat_validation_loss_gives_no_division_by_zero():
    tensors = {"w": number(1.0)}, {"a": number(1.0)}
    result = architecture_gradient(pulled, to_one, *tensors, WeightStep(lr=0.1), order="finite")
    assert result["a"] == 0


def test_alpha_without_influence_has_no_gradient():
    for order in ("finite", "exact"):
        assert gradient(to_one, to_one, 0.3, WeightStep(lr=0.1), order) == 0


def test_a_shorter_difference_is_closer_to_the_derivative():
    options = {"w": 0.7, "step": WeightStep(lr=0.1), "order": "finite", "step_length": 1e-4}
    actual = gradient(curved, curved_validation, **options)
    assert actual == pytest.approx(0.043790985, abs=1e-9)


def test_bad_settings_are_refused():
    with pytest.raises(ConfigurationError, match="step_length"):
        gradient(pulled, to_one, 0.0, WeightStep(lr=0.1), "finite", step_length=0.0)
    with pytest.raises(ConfigurationError, match="first, finite or exact"):
        gradient(pulled, to_one, 0.0, None, "second")
    with pytest.raises(ValueError, match="give the step"):
        gradient(pulled, to_one, 0.0, None, "exact")


def quadratic(matrix):
    return lambda a: (
        torch.cat([a["x"], a["y"].flatten()]) @ matrix @ torch.cat([a["x"], a["y"].flatten()]) / 2
    )


def spectrum(eigenvalues, seed=0):
    generator = torch.Generator().manual_seed(seed)
    n = len(eigenvalues)
    q = torch.linalg.qr(torch.randn(n, n, generator=generator, **DOUBLE)).Q
    return q @ torch.diag(torch.tensor(eigenvalues, **DOUBLE)) @ q.T


@pytest.mark.parametrize(
    "eigenvalues",
    [
        [3.0, 1.0, 0.5, 0.1],
        [2.0, -7.0, 1.0, 0.0],  # the largest size is not the largest
        [5.0, -5.0, 5.0, -5.0],
        [-1.0, -2.0, -3.0, -4.0],
        [0.0, 0.0, 0.0, 0.0],
    ],
)
def test_the_largest_eigenvalue_of_a_quadratic(eigenvalues):
    alphas = {"x": torch.randn(2, **DOUBLE), "y": torch.randn(1, 2, **DOUBLE)}
    found = largest_eigenvalue(quadratic(spectrum(eigenvalues)), alphas)
    assert found == pytest.approx(max(eigenvalues), abs=1e-9)


def test_the_eigenvalue_in_a_network_is_autograds(problem):
    _, _, validation, w, a = problem
    fixed = {name: weight.detach() for name, weight in w.items()}

    def loss(alphas):
        return validation(fixed, alphas)

    hessian = torch.autograd.functional.hessian(
        lambda alpha: loss({"alpha": alpha}), a["alpha"].detach()
    )
    expected = float(torch.linalg.eigvalsh(hessian.reshape(6, 6))[-1])
    assert largest_eigenvalue(loss, a) == pytest.approx(expected, abs=1e-9)


def test_a_hessian_that_is_not_finite_is_refused():
    with pytest.raises(ValueError, match="not finite"):
        largest_eigenvalue(lambda a: (a["x"] ** 1.5).sum(), {"x": torch.zeros(2)})


@pytest.mark.parametrize(
    ("values", "ends"),
    [
        ((1.0, 1.1, 1.2, 1.3, 1.4), [False] * 5),
        ((1.0, 1.0, 1.3, 1.3, 1.5, 1.8, 2.4), [False] * 6 + [True]),  # 1.4 / 2.1
        ((1.0, 1.0, 1.5), [False] * 3),  # not two windows yet
        ((-1.0, -1.0, 5.0, 5.0), [False] * 4),
        ((3.0, 2.0, 1.0, 0.5), [False] * 4),
    ],
)
def test_the_search_ends_when_the_mean_eigenvalue_has_grown_by_a_third(values, ends):
    told = [has_grown(values[: end + 1], window=2, ratio=0.75) for end in range(len(values))]
    assert told == ends
