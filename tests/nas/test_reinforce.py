"""REINFORCE on a table of logits: exact expectations, learning, the baseline."""

from itertools import product

import pytest
import torch

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.nas.alpha_gradients import Reward


def table(*logits):
    return [torch.tensor(row, dtype=torch.float64, requires_grad=True) for row in logits]


def sampled(rows, choices):
    logs = [row.log_softmax(0) for row in rows]
    probability = sum(row[choice] for row, choice in zip(logs, choices, strict=True))
    return probability, sum(-(row.exp() * row).sum() for row in logs)


def baseline_of(value=0.0):
    return torch.tensor([value], dtype=torch.float64)


def expected_gradient(rows, rewards, baseline, entropy_weight=0.0):
    """Σ_a π(a) ∇loss(a), over all choices."""
    total = [torch.zeros_like(row) for row in rows]
    for choices, reward in rewards.items():
        rule, drawn = Reward(entropy_weight=entropy_weight), sampled(rows, choices)
        loss = rule.loss(reward, *drawn, baseline_of(baseline)) * drawn[0].detach().exp()
        total = [a + b for a, b in zip(total, torch.autograd.grad(loss, rows), strict=True)]
    return total


def exact_gradient(rows, rewards):
    """-∇ E[R]."""
    value = sum(sampled(rows, c)[0].exp() * r for c, r in rewards.items())
    return torch.autograd.grad(-value, rows)


@pytest.mark.parametrize("baseline", [1e-9, 0.5, 0.7, -3.0])
def test_the_expectation_is_the_exact_gradient_whatever_the_baseline(baseline):
    rows, rewards = table((0.2, -0.3)), {(0,): 0.8, (1,): 0.6}
    p = rows[0].detach().softmax(0)
    torch.testing.assert_close(p, torch.tensor([0.622459, 0.377541]).double(), rtol=0, atol=1e-6)
    (actual,) = expected_gradient(rows, rewards, baseline)
    expected = torch.tensor([-0.047001, 0.047001], dtype=torch.float64)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(actual, exact_gradient(rows, rewards)[0])


def test_entropy_in_the_reward_has_no_gradient():
    rows, rewards = table((0.2, -0.3)), {(0,): 0.8, (1,): 0.6}
    (actual,) = expected_gradient(rows, rewards, 0.7, entropy_weight=0.1)
    expected = torch.tensor([-0.047001, 0.047001], dtype=torch.float64)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6)
    attached = sum(
        sampled(rows, c)[0].detach().exp() * -(r + 0.1 * sampled(rows, c)[1]) * sampled(rows, c)[0]
        for c, r in rewards.items()
    )
    (wrong,) = torch.autograd.grad(attached, rows)
    expected = torch.tensor([-0.054789, 0.054789], dtype=torch.float64)
    torch.testing.assert_close(wrong, expected, rtol=0, atol=1e-6)


def test_the_expectation_over_several_decisions():
    torch.manual_seed(0)
    rows = table(*(torch.randn(count).tolist() for count in (2, 3, 2)))
    rewards = {c: float(c[0] + 0.5 * c[1] * c[2]) for c in product(range(2), range(3), range(2))}
    for actual, expected in zip(
        expected_gradient(rows, rewards, 0.4), exact_gradient(rows, rewards), strict=True
    ):
        torch.testing.assert_close(actual, expected)


def test_a_table_learns_what_is_rewarded():
    rows, rule, baseline = table((0.0,) * 4, (0.0,) * 4), Reward(), baseline_of()
    optimizer = torch.optim.Adam(rows, lr=0.05)
    generator = torch.Generator().manual_seed(0)
    for _ in range(300):
        choices = [int(torch.multinomial(r.softmax(0), 1, generator=generator)) for r in rows]
        optimizer.zero_grad()
        reward = float((choices[0] == 2) + (choices[1] == 1))
        rule.loss(reward, *sampled(rows, choices), baseline).backward()
        optimizer.step()
    assert [int(row.argmax()) for row in rows] == [2, 1]
    assert baseline > 1.0  # chance: 0.5


def test_the_baseline_is_of_earlier_rewards():
    rows, rule, baseline = table((0.0, 0.0)), Reward(entropy_weight=0.0), baseline_of()
    log_two = float(torch.tensor(2.0, dtype=torch.float64).log())
    drawn = sampled(rows, [0])
    losses = [rule.loss(reward, *drawn, baseline).item() for reward in (0.6, 1.0, 0.0)]
    assert losses == pytest.approx([0, 0.4 * log_two, -0.62 * log_two])
    assert float(baseline) == pytest.approx(0.95 * 0.62)


def test_the_entropy_weight_and_the_decay_change_something():
    rows = table((0.0, 0.0))
    rule, baseline = Reward(decay=0.5, entropy_weight=1.0), baseline_of(1e-12)
    log_two = float(torch.tensor(2.0, dtype=torch.float64).log())
    loss = rule.loss(1.0, *sampled(rows, [0]), baseline)
    assert loss.item() == pytest.approx((1 + log_two) * log_two)
    assert float(baseline) == pytest.approx(0.5 * (1 + log_two))


def test_bad_settings_are_refused():
    for settings in ({"decay": 1.0}, {"entropy_weight": -1.0}):
        with pytest.raises(ConfigurationError):
            Reward(**settings)
    with pytest.raises(ValueError, match="finite"):
        Reward().loss(float("nan"), *sampled(table((0.0, 0.0)), [0]), baseline_of())
