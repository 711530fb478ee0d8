"""Clipped gradients of examples: by hand, by a plain loop, and in batches drawn by coins."""

import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torchmetrics import MeanMetric

from fl_lightning.client.log_collector import LogCollector
from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.space import Space
from fl_lightning.data.shards import poisson_batches
from fl_lightning.engines.functional.example_gradients import ExampleGradients


class Net(nn.Module):
    """Two layers, in double precision; logs the loss, to a metric too if it has one."""

    def __init__(self, metric=False):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(3, 4).double(), nn.Linear(4, 2).double()
        if metric:
            self.mean = MeanMetric()

    def training_step(self, batch, index):
        x, y = batch
        logits = self.second(self.first(x).tanh())
        loss = nn.functional.cross_entropy(logits, y)
        self.log("loss", loss)
        if hasattr(self, "mean"):
            self.mean(loss)
        return loss


class Branching(Net):
    """Looks at a value, which vmap cannot."""

    def training_step(self, batch, index):
        assert batch[0].sum().item() < 1e9
        return super().training_step(batch, index)


def batch(size=9):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(size, 3, generator=generator).double()
    return 3 * x, torch.arange(size) % 2


def gradients(module, collector=None, **options):
    loss = module.training_step
    return ExampleGradients(module, loss, takes_index=True, collector=collector, **options)


def clipped_by_hand(module, batch, clip_norm):
    total = 0
    for x, y in zip(*batch, strict=True):
        module.zero_grad()
        module.training_step((x[None], y[None]), 0).backward()
        row = torch.cat([p.grad.flatten() for p in module.parameters()])
        total = total + row * min(1.0, clip_norm / float(row.norm()))
    return total


@pytest.fixture(autouse=True)
def listen(monkeypatch):
    monkeypatch.setattr(Net, "log", lambda *args, **options: None, raising=False)


@pytest.mark.parametrize("clip_norm", [0.1, 2.0, 1e9])
@pytest.mark.parametrize("memory_limit", [None, 1, 8 * 26 * 4])
def test_each_example_is_clipped_as_one_vector(clip_norm, memory_limit):
    module = Net()
    summed = gradients(module, memory_limit=memory_limit)
    total, losses = summed(Space.of_parameters(module), batch(), 0, clip_norm)
    assert torch.allclose(total, clipped_by_hand(module, batch(), clip_norm), atol=1e-12)
    assert losses.shape == (9,)
    norms = [
        float(clipped_by_hand(module, one, 1e9).norm())
        for one in zip(*(t.split(1) for t in batch()), strict=True)
    ]
    assert summed.num_clipped == sum(norm > clip_norm for norm in norms)
    if clip_norm == 1e9:
        module.zero_grad()
        module.training_step(batch(), 0).backward()
        mean = torch.cat([p.grad.flatten() for p in module.parameters()])
        assert torch.allclose(total / 9, mean, atol=1e-12)


def test_what_vmap_cannot_run_is_done_one_by_one():
    module = Branching()
    with pytest.warns(UserWarning, match="one by one, which is slow"):
        total, _ = gradients(module)(Space.of_parameters(module), batch(), 0, 0.5)
    assert torch.allclose(total, clipped_by_hand(Net(), batch(), 0.5), atol=1e-12)


class Setting(Net):
    """Writes to its parameters in one of several ways."""

    def __init__(self, way):
        super().__init__()
        self.way = way
        self.first.bias.requires_grad_(False)

    def training_step(self, batch, index):
        x = batch[0].detach()
        if self.way == "an example":
            self.first.weight.data.copy_(x.mean(0))
        elif self.way == "frozen":
            self.first.bias.data.fill_(x.sum())
        elif self.way == "replaced":
            self.first.weight = nn.Parameter(x.expand(4, 3).clone())
        elif self.way == "no example":  # which vmap can run
            with torch.no_grad():
                self.second.weight.mul_(0.5)
        return super().training_step(batch, index)


@pytest.mark.filterwarnings("ignore:gradients of single examples are computed one by one")
@pytest.mark.parametrize("vectorize", [False, True])
@pytest.mark.parametrize("way", ["an example", "frozen", "no example", "replaced"])
def test_a_step_that_sets_parameters_is_refused_and_undone(way, vectorize):
    module = Setting(way)
    params = dict(module.named_parameters())
    before = {name: param.clone() for name, param in params.items()}
    summed = gradients(module, vectorize=vectorize)
    with pytest.raises(ConfigurationError, match=r"training_step changes the parameter .* itself"):
        summed(Space.of_parameters(module), batch(), 0, 0.5)
    for name, param in module.named_parameters():
        assert param is params[name]
        assert torch.equal(param, before[name])


def test_with_a_mask_only_its_entries_count():
    module = Net()
    picked = torch.tensor([0, 5])
    part = Space.of_parameters(module, {module.first.weight: picked})
    total, _ = gradients(module)(part, batch(1), 0, 0.1)
    module.zero_grad()
    module.training_step(batch(1), 0).backward()
    kept = module.first.weight.grad.flatten()[picked]
    rest = [p.grad.flatten() for p in list(module.parameters())[1:]]
    row = torch.cat([kept, *rest])
    assert torch.allclose(total, row * (0.1 / row.norm()), atol=1e-12)


def test_an_example_without_a_finite_gradient_counts_as_nothing():
    module, (x, y) = Net(), batch(3)
    x[1] = torch.nan
    total, _ = gradients(module)(Space.of_parameters(module), (x, y), 0, 0.5)
    others = clipped_by_hand(module, (x[[0, 2]], y[[0, 2]]), 0.5)
    assert torch.allclose(total, others, atol=1e-12)


@pytest.mark.parametrize("vectorize", [True, False])
def test_state_in_an_attribute_does_not_join_examples(vectorize):
    class Scaled(Net):
        scale = 1.0

        def training_step(self, batch, index):
            loss = super().training_step(batch, index)
            value = loss.detach() if vectorize else loss.item()
            self.scale = 0.5 * self.scale + 0.5 * value
            return loss / self.scale

    module = Scaled()
    xs, ys = batch()
    space = Space.of_parameters(module)
    made = gradients(module, vectorize=vectorize)
    total, _ = made(space, (xs, ys), 0, 0.5)
    first, _ = made(space, (xs[:1], ys[:1]), 0, 0.5)
    rest, _ = made(space, (xs[1:], ys[1:]), 0, 0.5)
    torch.testing.assert_close(total, first + rest)
    assert module.scale == 1.0


def test_a_generator_of_the_module_draws_on_for_every_example():
    seen = []

    class Noisy(Net):
        def training_step(self, batch, index):
            seen.append(torch.rand((), generator=self.generator).item())
            return super().training_step(batch, index)

    module = Noisy()
    module.generator = torch.Generator().manual_seed(0)
    made = gradients(module, vectorize=False)
    made(Space.of_parameters(module), batch(4), 0, 0.5)
    expected = torch.rand(4, generator=torch.Generator().manual_seed(0))
    assert seen == expected.tolist()


@pytest.mark.parametrize("metric", [False, True])
def test_logged_values_arrive_where_they_may(metric):
    collector, module = LogCollector(), Net(metric)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        summed = gradients(module, collector)
        with collector.listening_to(module):
            _, losses = summed(Space.of_parameters(module), batch(), 0, 0.5)
    assert float(collector.collect()["loss"]) == pytest.approx(float(losses.mean()))
    if metric:
        assert float(module.mean.compute()) == pytest.approx(float(losses.mean()))


def test_examples_draw_numbers_of_their_own():
    class Dropping(Net):
        def training_step(self, batch, index):
            return nn.functional.dropout(self.first(batch[0]), 0.5).sum()

    module, same = Dropping(), (torch.ones(40, 3).double(), torch.zeros(40))
    space = Space.of_parameters(module)
    torch.manual_seed(0)
    total, losses = gradients(module)(space, same, 0, 1e9)
    assert len(losses.unique()) > 3
    torch.manual_seed(0)
    assert torch.equal(gradients(module)(space, same, 0, 1e9)[0], total)


@given(n=st.integers(1, 40), batch_size=st.integers(1, 40), seed=st.integers(0, 5))
@settings(max_examples=40)
def test_batches_are_of_the_shard_without_repeats(n, batch_size, seed):
    shard = 100 + torch.arange(n)

    def words(step):
        return np.random.default_rng([seed, step]).integers(0, 2**64, n, dtype=np.uint64)

    order, sizes = poisson_batches(shard, batch_size, 3, words)
    for part in order.split(sizes):
        assert (
            part.unique().numel() == part.numel() == len(set(part.tolist()) & set(shard.tolist()))
        )
    if n <= batch_size:
        assert sizes == [n] * 3


def test_every_example_joins_at_its_rate_and_alone():
    generator = np.random.default_rng(0)
    order, sizes = poisson_batches(
        torch.arange(50), 10, 4000, lambda _: generator.integers(0, 2**64, 50, dtype=np.uint64)
    )
    chances = np.bincount(order.numpy(), minlength=50) / 4000
    assert np.abs(chances - 0.2).max() < 4.5 * (0.16 / 4000) ** 0.5
    assert np.var(sizes) == pytest.approx(50 * 0.2 * 0.8, rel=0.1)
