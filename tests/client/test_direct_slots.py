"""Slots whose layers are direct ones train as slots of PyTorch's layers do."""

import gc
import weakref
from functools import partial

import pytest
import torch
from test_direct_kernels import draws
from test_slot_training import OPTIMIZERS, works
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD

from fl_lightning.client.local_training import LocalTrainer
from fl_lightning.client.log_collector import LogCollector
from fl_lightning.engines.compiler.compiling import Compiled
from fl_lightning.engines.functional import CannotStack
from fl_lightning.engines.slots.stacked_step import StackedStep
from fl_lightning.engines.slots.step_functions import StackedOptions
from fl_lightning.engines.slots.training import SlotTrainer
from fl_lightning.kernels.layers import reason_against_direct_layers
from fl_lightning.sparsity.optimizers.sparse_optimizers import SparseSGDM

pytestmark = pytest.mark.skipif(
    reason_against_direct_layers(nn.Conv2d(1, 1, 1)) is not None, reason="no compiler"
)


class Dense(nn.Module):
    """A classifier as users write it, with what a test adds to its loss."""

    def __init__(self, *, bias=True):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.first = nn.Linear(40, 30, bias=bias)
            self.second = nn.Linear(30, 40, bias=bias)
            self.last = nn.Linear(40, 3)

    def training_step(self, batch, batch_idx):
        x, y = batch
        x = self.second(F.relu(self.first(x)))
        return F.cross_entropy(self.last(F.relu(x)), y) + self.penalty()

    def penalty(self):
        return 0.0

    def log(self, *args, **options):
        """Stand in for Lightning's."""


X, Y = draws(200, 40), torch.arange(200) % 3


def train(module, make, sizes, num_slots=3, rounds=1, step=None, reads=None, **options):
    """Return updates in the order of clients, and the step that they took; count what is read."""

    def read(indices):
        if reads is not None:
            reads.append(len(indices))
        return X[indices], Y[indices]

    optimizer = make(module.parameters())
    local = LocalTrainer(module, optimizer, None, LogCollector())
    step = step or StackedStep(module, optimizer, True, StackedOptions(num_slots, **options))
    slots = SlotTrainer(step, local.space, local.buffers, read, 8)
    for _ in range(rounds):
        updates = [u for group in slots.train(local.read(), works(sizes, 8, 1)) for u in group]
    return sorted(updates, key=lambda update: update.client_id), step


def is_compiled(step):
    return all(isinstance(run, Compiled) and not run.is_given_up for run in step.graphs.present)


def assert_alike(found, expected, tolerance=1e-5):
    for one, other in zip(found, expected, strict=True):
        bound = tolerance * float(other.delta.abs().max())
        torch.testing.assert_close(one.delta, other.delta, rtol=0, atol=bound)
        torch.testing.assert_close(one.metrics["train/loss"], other.metrics["train/loss"])


@pytest.mark.parametrize(
    ("optimizer", "sizes", "bias"),
    [
        pytest.param("sgd", (5, 30, 16, 9, 24), True, id="unequal ones, streamed"),
        pytest.param("momentum", (5, 30, 16, 9, 24), False, id="streamed, no bias"),
        pytest.param("momentum", (20,) * 5, True, id="all begin together"),
        pytest.param("sgd", (8,) * 3 + (7,) * 2, False, id="one step each"),
    ],
)
def test_updates_are_those_of_pytorchs_layers(optimizer, sizes, bias):
    make = OPTIMIZERS[optimizer]
    found, _ = train(Dense(bias=bias), make, sizes, rounds=2, direct=True)
    expected, _ = train(Dense(bias=bias), make, sizes, rounds=2)
    assert_alike(found, expected)


@pytest.mark.parametrize(
    "sizes", [(20,) * 3, *(pytest.param(s, marks=pytest.mark.slow) for s in ((5, 30), (8,) * 3))]
)
def test_as_one_compiled_graph(sizes):
    make = OPTIMIZERS["momentum"]
    found, step = train(Dense(), make, sizes, rounds=2, compiled=True, direct=True)
    assert is_compiled(step)
    expected, _ = train(Dense(), make, sizes)
    assert_alike(found, expected)


class Decayed(Dense):
    def penalty(self):
        return self.first.weight.square().sum()


class Tied(Dense):
    def penalty(self):
        return F.linear(torch.ones(40), self.first.weight).sum()


class Twice(Dense):
    def penalty(self):
        return self.first(torch.ones(1, 40)).sum()


class Token(Dense):
    """A layer's input is a parameter, which moves before the layer's weight does."""

    def __init__(self):
        super().__init__()
        self.token = nn.Parameter(draws(1, 40, seed=7))

    def penalty(self):
        return self.second(self.first(self.token)).square().mean()

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self.last(x), y) + self.penalty()


class Perturbed(Dense):
    """Another weight stands in a layer while it is called, as for sharpness-aware training."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        other = {"weight": self.first.weight * 1.5}
        x = torch.func.functional_call(self.first, other, (x,))
        return F.cross_entropy(self.last(F.relu(self.second(F.relu(x)))), y)


class Smooth(Dense):
    """A weight has a part in the loss through the gradient with respect to the input."""

    def training_step(self, batch, batch_idx):
        x, y = batch

        def loss(x):
            z = self.second(torch.tanh(self.first(x)))
            return F.cross_entropy(self.last(torch.tanh(z)), y, reduction="sum")

        gradient, value = torch.func.grad_and_value(loss)(x)
        return value / len(x) + gradient.square().sum(1).mean()


class Halved(Dense):
    """One layer runs under autocast."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        x = F.relu(self.first(x))
        with torch.autocast("cpu", torch.bfloat16):
            x = self.second(x)
        return F.cross_entropy(self.last(F.relu(x.float())), y)


class Normed(Dense):
    """Counts its batches and what is in them."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(40)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return super().training_step((self.norm(x), y), batch_idx)


class Late(Decayed):
    """Reads a weight from the second round on."""

    is_late = False

    def penalty(self):
        return super().penalty() if self.is_late else 0.0


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", [Decayed, Tied, Twice, Token, Perturbed, Smooth, Halved])
def test_a_weight_may_have_another_part_in_the_loss(kind, compiled):
    """And a layer under autocast stays in full precision."""
    make = OPTIMIZERS["sgd"]
    padded = kind is Token  # a row an example is one row then, as the token is
    found, step = train(kind(), make, (5, 17), direct=True, compiled=compiled, padded=padded)
    assert is_compiled(step) is compiled
    plain = Dense if kind is Halved else kind
    assert_alike(found, train(plain(), make, (5, 17))[0])


def test_nothing_is_left_behind_by_finding_out():
    module = Normed()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    make, sizes = OPTIMIZERS["momentum"], (16, 24)
    found, _ = train(module, make, sizes, padded=False, direct=True)
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name])
    assert_alike(found, train(module, make, sizes, padded=False)[0])


@pytest.mark.slow
def test_a_part_in_the_loss_that_comes_and_goes():
    """Either kind of step keeps its graph."""
    module, make = Late(), OPTIMIZERS["sgd"]
    _, step = train(module, make, (5, 17), direct=True, compiled=True)
    graphs = {False: step.graphs.present}
    for module.is_late in (True, False, True):
        found, _ = train(module, make, (5, 17), step=step)
        assert step.graphs.present is graphs.setdefault(module.is_late, step.graphs.present)
        assert is_compiled(step)
        assert_alike(found, train(module, make, (5, 17))[0])


@pytest.mark.slow
def test_only_a_change_is_looked_for_again():
    """Graphs tell that there is none; a kind of step without a graph cannot tell."""
    module, make, reads = Dense(), OPTIMIZERS["sgd"], []
    _, step = train(module, make, (8,) * 3, reads=reads, direct=True, compiled=True)
    assert len(reads) == 8  # to rehearse, to look, to prove, to train
    found_out = 7
    for sizes, num_reads in (((8,) * 3, 1), ((16,) * 3, found_out + 3), ((16,) * 3, 2)):
        reads.clear()
        found, _ = train(module, make, sizes, step=step, reads=reads)
        assert_alike(found, train(module, make, sizes)[0])
        assert is_compiled(step)
        assert len(reads) == num_reads


def with_groups(module, **options):
    """Two weights in one group, all else in another."""
    weights = [module.first.weight, module.second.weight]
    others = [p for p in module.parameters() if all(p is not weight for weight in weights)]
    return lambda _: SGD([{"params": weights, **options}, {"params": others}], lr=0.1, momentum=0.9)


@pytest.mark.slow
def test_options_and_masks_that_change_between_rounds():
    """No graph reads them."""
    module, sizes = Dense(), (5, 30, 16)
    _, step = train(module, with_groups(module), sizes, direct=True, compiled=True)
    for options in ({"momentum": 0.5}, {"nesterov": True}):
        step._optimizer.param_groups[0].update(options)
        found, _ = train(module, with_groups(module), sizes, step=step)
        kept = {key: step._optimizer.param_groups[0][key] for key in ("momentum", "nesterov")}
        assert_alike(found, train(module, with_groups(module, **kept), sizes)[0])
    assert is_compiled(step)
    masks = {module.first.weight: draws(30, 40) > 0}
    plain = partial(SparseSGDM, lr=0.1, momentum=0.9)
    _, step = train(module, plain, sizes, direct=True, compiled=True)
    step._optimizer.set_masks(masks)
    masked = partial(plain, masks=masks)
    found, _ = train(module, masked, sizes, step=step)
    assert_alike(found, train(module, masked, sizes)[0])


def test_a_step_that_nobody_needs_is_freed():
    _, step = train(Dense(), OPTIMIZERS["sgd"], (5, 17), direct=True)
    gone = weakref.ref(step)
    gc.collect()
    gc.disable()
    try:
        del step
        assert gone() is None
    finally:
        gc.enable()


def test_a_fault_of_the_step_itself_is_not_hidden():
    class Faulty(Dense):
        def penalty(self):
            raise CannotStack("it is faulty")

    with pytest.raises(CannotStack, match="it is faulty"):
        train(Faulty(), OPTIMIZERS["sgd"], (5,), direct=True)
