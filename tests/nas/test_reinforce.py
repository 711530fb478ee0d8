"""Controllers and REINFORCE: exact expectations, learning, state."""

from itertools import product

import pytest
import torch

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.nas.search.reinforce import LSTMController, Reinforce, TableController


def table(*logits):
    controller = TableController([len(row) for row in logits]).double()
    for parameter, row in zip(controller.table, logits, strict=True):
        parameter.data = torch.tensor(row, dtype=torch.float64)
    return controller


def expected_gradient(controller, rewards, baseline, entropy_weight=0.0):
    """Σ_a π(a) ∇loss(a), over all choices."""
    total = [torch.zeros_like(parameter) for parameter in controller.parameters()]
    for choices, reward in rewards.items():
        rule = Reinforce(entropy_weight=entropy_weight)
        rule.load_state_dict({"baseline": baseline})
        sampled = controller.of(choices)
        loss = rule.loss(sampled, reward) * sampled.log_probability.detach().exp()
        gradients = torch.autograd.grad(loss, list(controller.parameters()))
        total = [a + b for a, b in zip(total, gradients, strict=True)]
    return total


def exact_gradient(controller, rewards):
    """-∇ E[R]."""
    value = sum(controller.of(c).log_probability.exp() * r for c, r in rewards.items())
    return torch.autograd.grad(-value, list(controller.parameters()))


@pytest.mark.parametrize("baseline", [0.0, 0.5, 0.7, -3.0])
def test_the_expectation_is_the_exact_gradient_whatever_the_baseline(baseline):
    controller, rewards = table((0.2, -0.3)), {(0,): 0.8, (1,): 0.6}
    p = controller.table[0].detach().softmax(0)
    torch.testing.assert_close(p, torch.tensor([0.622459, 0.377541]).double(), rtol=0, atol=1e-6)
    (actual,) = expected_gradient(controller, rewards, baseline)
    expected = torch.tensor([-0.047001, 0.047001], dtype=torch.float64)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(actual, exact_gradient(controller, rewards)[0])


def test_entropy_in_the_reward_has_no_gradient():
    controller, rewards = table((0.2, -0.3)), {(0,): 0.8, (1,): 0.6}
    (actual,) = expected_gradient(controller, rewards, 0.7, entropy_weight=0.1)
    expected = torch.tensor([-0.047001, 0.047001], dtype=torch.float64)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6)
    attached = sum(
        controller.of(c).log_probability.detach().exp()
        * -(r + 0.1 * controller.of(c).entropy)
        * controller.of(c).log_probability
        for c, r in rewards.items()
    )
    (wrong,) = torch.autograd.grad(attached, list(controller.parameters()))
    expected = torch.tensor([-0.054789, 0.054789], dtype=torch.float64)
    torch.testing.assert_close(wrong, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("make", [TableController, lambda n: LSTMController(n, hidden=5)])
def test_the_expectation_over_dependent_decisions(make):
    torch.manual_seed(0)
    controller = make([2, 3, 2]).double()
    for parameter in controller.parameters():
        parameter.data += torch.randn_like(parameter)
    everything = list(product(range(2), range(3), range(2)))
    total = sum(controller.of(c).log_probability.exp().item() for c in everything)
    assert total == pytest.approx(1, abs=1e-12)
    rewards = {c: float(c[0] + 0.5 * c[1] * c[2]) for c in everything}
    for actual, expected in zip(
        expected_gradient(controller, rewards, 0.4),
        exact_gradient(controller, rewards),
        strict=True,
    ):
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("make", [TableController, LSTMController])
def test_samples_say_their_own_probability(make):
    torch.manual_seed(0)
    controller = make([3, 4])
    generator = torch.Generator().manual_seed(1)
    sampled = controller.sample(generator)
    again = controller.sample(torch.Generator().manual_seed(1))
    assert sampled.choices == again.choices
    torch.testing.assert_close(
        sampled.log_probability, controller.of(sampled.choices).log_probability
    )
    samples = [controller.sample(generator).choices for _ in range(3000)]
    for choices in ((0, 0), (2, 3)):
        p = controller.of(choices).log_probability.exp().item()
        assert samples.count(choices) / 3000 == pytest.approx(p, abs=0.025)


def test_a_new_table_is_uniform():
    sampled = TableController([5] * 6).of([0] * 6)
    assert sampled.log_probability.item() == pytest.approx(-6 * torch.tensor(5.0).log())
    assert sampled.entropy.item() == pytest.approx(6 * torch.tensor(5.0).log())


def test_no_logit_of_the_lstm_is_larger_than_the_constant():
    controller = LSTMController([4, 4], hidden=3, tanh_constant=1.5)
    for parameter in controller.parameters():
        parameter.data *= 1e4
    logits, state = controller.logits(0, None, controller.begin())
    assert (logits.abs() <= 1.5).all()
    assert (controller.logits(1, 2, state)[0].abs() <= 1.5).all()


@pytest.mark.parametrize("make", [TableController, LSTMController])
def test_a_controller_learns_what_is_rewarded(make):
    torch.manual_seed(0)
    controller, rule = make([4, 4]), Reinforce()
    optimizer = torch.optim.Adam(controller.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(0)
    for _ in range(300):
        sampled = controller.sample(generator)
        reward = (sampled.choices[0] == 2) + (sampled.choices[1] == 1)
        optimizer.zero_grad()
        rule.loss(sampled, reward).backward()
        optimizer.step()
    assert controller.most_likely() == (2, 1)
    assert rule.baseline > 1.0  # chance: 0.5


def test_the_baseline_is_of_earlier_rewards():
    controller, rule = table((0.0, 0.0)), Reinforce(entropy_weight=0.0)
    log_two = float(torch.tensor(2.0, dtype=torch.float64).log())
    losses = [rule.loss(controller.of([0]), reward).item() for reward in (0.6, 1.0, 0.0)]
    assert losses == pytest.approx([0, 0.4 * log_two, -0.62 * log_two])
    assert rule.baseline == pytest.approx(0.95 * 0.62)
    other = Reinforce()
    other.load_state_dict(rule.state_dict())
    assert other.baseline == rule.baseline


def test_the_entropy_weight_and_the_decay_change_something():
    controller = table((0.0, 0.0))
    rule = Reinforce(decay=0.5, entropy_weight=1.0)
    rule.load_state_dict({"baseline": 0.0})
    log_two = float(torch.tensor(2.0, dtype=torch.float64).log())
    assert rule.loss(controller.of([0]), 1.0).item() == pytest.approx((1 + log_two) * log_two)
    assert rule.baseline == pytest.approx(0.5 * (1 + log_two))


def test_bad_settings_are_refused():
    for make in (
        lambda: TableController([]),
        lambda: TableController([3, 0]),
        lambda: LSTMController([2], hidden=0),
        lambda: LSTMController([2], temperature=0.0),
        lambda: Reinforce(decay=1.0),
        lambda: Reinforce(entropy_weight=-1.0),
    ):
        with pytest.raises(ConfigurationError):
            make()
    with pytest.raises(ValueError, match="2 decisions, got 1"):
        TableController([2, 2]).of([0])
    with pytest.raises(ValueError, match="finite"):
        Reinforce().loss(TableController([2]).of([0]), float("nan"))
