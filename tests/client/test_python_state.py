"""What Python holds and a training step may write: noticed, named and put back, whatever it is."""

import collections
import itertools
import random
import types
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torchmetrics import SumMetric

from fl_lightning.client.state.python_state import PythonState
from fl_lightning.client.state.tensor_writes import TensorWrites
from fl_lightning.core.errors import ConfigurationError

COUNTER = 0
SETTINGS = {"scale": 1.0}


def count():
    global COUNTER
    COUNTER += 1


class Tracker:
    num_made = 0

    def __init__(self):
        self.total, self.seen = 0.0, []


class Slotted:
    __slots__ = ("__hidden", "value")

    def __init__(self):
        self.value, self.__hidden = 1, 2

    def hide(self, value):
        self.__hidden = value

    def hidden(self):
        return self.__hidden


@dataclass
class Record:
    step: int = 0
    losses: list = field(default_factory=list)


class Strange(nn.Module):
    shared: ClassVar[list[int]] = [0]
    kind = "strange"

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
        self.net[1].scale = 1.0
        self.teacher = [nn.Linear(2, 1)]  # hidden from state_dict
        self.metric = SumMetric()
        self.n, self.name, self.none = 0, "a", None
        self.outputs, self.nested = [], {"a": [1, {"b": 2}], "c": (1, [2])}
        self.base, self.array = torch.zeros(2), np.zeros(3)
        self.alpha = torch.ones(1, requires_grad=True)
        self.members, self.queue = {1, 2}, collections.deque([1, 2], maxlen=3)
        self.counts, self.lists = collections.Counter("aab"), collections.defaultdict(list)
        self.order = collections.OrderedDict(x=1, y=2)
        self.tracker, self.record, self.slotted = Tracker(), Record(), Slotted()
        self.bag = types.SimpleNamespace(x=1)
        self.numbers, self.again = itertools.count(), itertools.cycle([1, 2, 3])
        self.rng, self.np_rng = random.Random(0), np.random.default_rng(0)
        self.old_rng, self.torch_rng = np.random.RandomState(0), torch.Generator()
        self.loop = [self.nested]
        self.loop.append(self.loop)
        total = 0

        def inner(value):
            nonlocal total
            total += value
            return total

        self.inner = inner

    def training_step(self, batch, batch_idx, cache={}):  # noqa: B006
        count()
        cache[batch_idx] = batch
        return SETTINGS["scale"] * batch


def set_global():
    SETTINGS["scale"] = 2.0


WRITES = {
    "n": ("self.n (0 -> 1)", lambda m: setattr(m, "n", 1)),
    "name": ("self.name ('a' -> 'b')", lambda m: setattr(m, "name", "b")),
    "new": ("self.new (new)", lambda m: setattr(m, "new", 1)),
    "none": ("self.none (removed)", lambda m: delattr(m, "none")),
    "append": ("self.outputs (0 -> 1 items)", lambda m: m.outputs.append(1)),
    "rebind": ("self.outputs (0 -> 1 items)", lambda m: setattr(m, "outputs", [1])),
    "nested": ("self.nested['a'][1]['b'] (2 -> 3)", lambda m: m.nested["a"][1].update(b=3)),
    "in a tuple": ("self.nested['c'][1] (1 -> 2 items)", lambda m: m.nested["c"][1].append(3)),
    "in place": ("self.base", lambda m: m.base.add_(1)),
    "by data": ("self.base", lambda m: m.base.data.mul_(0).add_(2)),
    "resized": ("self.base", lambda m: setattr(m.base, "data", torch.ones(5))),
    "new tensor": ("self.base", lambda m: setattr(m, "base", m.base + 1)),
    "gradient": ("self.alpha.grad", lambda m: m.alpha.sum().backward()),
    "array": ("self.array", lambda m: m.array.__setitem__(0, 5)),
    "array nan": ("self.array", lambda m: m.array.__setitem__(1, np.nan)),
    "set": ("self.members (2 -> 3 items)", lambda m: m.members.add(3)),
    "deque": ("self.queue (2 -> 3 items)", lambda m: m.queue.append(3)),
    "counter": ("self.counts['a'] (2 -> 3)", lambda m: m.counts.update("a")),
    "default": ("self.lists (0 -> 1 items)", lambda m: m.lists["x"].append(1)),
    "order": ("self.order (order)", lambda m: m.order.move_to_end("x")),
    "object": ("self.tracker.total (0.0 -> 2.0)", lambda m: setattr(m.tracker, "total", 2.0)),
    "object's list": ("self.tracker.seen (0 -> 1 items)", lambda m: m.tracker.seen.append(m)),
    "its class": ("class Tracker.num_made (0 -> 1)", lambda m: setattr(Tracker, "num_made", 1)),
    "dataclass": ("self.record.step (0 -> 1)", lambda m: setattr(m.record, "step", 1)),
    "slot": ("self.slotted.value (1 -> 3)", lambda m: setattr(m.slotted, "value", 3)),
    "hidden": ("self.slotted._Slotted__hidden (2 -> 4)", lambda m: m.slotted.hide(4)),
    "namespace": ("self.bag.x (1 -> 2)", lambda m: setattr(m.bag, "x", 2)),
    "count": ("self.numbers", lambda m: next(m.numbers)),
    "cycle": ("self.again", lambda m: [next(m.again) for _ in range(5)]),
    "random": ("self.rng", lambda m: m.rng.random()),
    "generator": ("self.np_rng", lambda m: m.np_rng.random()),
    "random state": ("self.old_rng", lambda m: m.old_rng.rand()),
    "torch generator": ("self.torch_rng", lambda m: torch.rand(1, generator=m.torch_rng)),
    "mode": ("self.net.1.training (True -> False)", lambda m: m.net[1].eval()),
    "child": ("self.net.1.scale (1.0 -> 2.0)", lambda m: setattr(m.net[1], "scale", 2.0)),
    "frozen": (
        "self.net.0.weight.requires_grad (True -> False)",
        lambda m: m.net[0].weight.requires_grad_(False),
    ),
    "buffer": ("self.net.1.running_mean", lambda m: setattr(m.net[1], "running_mean", m.base)),
    "registered": ("self.late (new)", lambda m: m.register_buffer("late", m.base)),
    "part": ("self.net.2", lambda m: setattr(m.net, "2", nn.Linear(3, 1))),
    "teacher": ("self.teacher[0].weight", lambda m: m.teacher[0].weight.data.mul_(0.5)),
    "class list": ("class Strange.shared[0] (0 -> 1)", lambda m: m.shared.__setitem__(0, 1)),
    "class": ("class Strange.kind ('strange' -> 'odd')", lambda m: setattr(Strange, "kind", "odd")),
    "closure": ("total around Strange.__init__.<locals>.inner (0 -> 2)", lambda m: m.inner(2)),
    "global": (f"global COUNTER of {__name__} (0 -> 1)", lambda m: count()),
    "global dict": (f"global SETTINGS of {__name__}['scale'] (1.0 -> 2.0)", lambda m: set_global()),
    "default value": (
        "a default of Strange.training_step[0] (0 -> 1 items)",
        lambda m: m.training_step.__func__.__defaults__[0].update(x=1),
    ),
    "Python's": ("Python's random", lambda m: random.random()),
    "NumPy's": ("NumPy's random", lambda m: np.random.rand()),
}


@pytest.fixture(autouse=True)
def _nothing_stays():
    yield
    assert COUNTER == 0
    assert SETTINGS == {"scale": 1.0}
    assert (Strange.kind, Strange.shared, Tracker.num_made) == ("strange", [0], 0)


def next_values(module):
    """Return what the module's generators and iterators give next."""
    drawn = module.rng.random(), module.np_rng.random(), module.old_rng.rand()
    others = float(torch.rand(1, generator=module.torch_rng)), random.random(), np.random.rand()
    return *drawn, *others, next(module.numbers), [next(module.again) for _ in range(4)]


def test_an_untouched_module_has_no_changes():
    module = Strange()
    state = PythonState(module)
    assert state.changes() == []
    module.n, module.base, module.array = int("0"), module.base.clone(), module.array.copy()
    module.name, module.none = "ab"[:1], None
    assert state.changes() == []  # equal ones, if not the same
    state.put_back()
    assert state.changes() == []


@pytest.mark.parametrize("name", WRITES)
def test_every_write_is_named_and_put_back(name):
    module = Strange()
    state = PythonState(module)
    expected, write = WRITES[name]
    write(module)
    assert expected in state.changes()
    state.put_back()
    assert state.changes() == []


def test_a_step_of_the_module_itself_is_noticed():
    module = Strange()
    state = PythonState(module)
    module.training_step(1.0, 0)
    assert {change.split(" (")[0] for change in state.changes()} == {
        f"global COUNTER of {__name__}",
        "a default of Strange.training_step[0]",
    }
    state.put_back()


@given(st.lists(st.sampled_from(sorted(WRITES)), max_size=8), st.integers(0, 2))
def test_many_writes_are_undone_together(names, again):
    module = Strange()
    held = module.outputs, module.base, module.nested, module.tracker, module.array, module.lists
    state = PythonState(module)
    before = next_values(module)
    state.put_back()
    for _ in range(again + 1):
        for name in names:
            if name != "none" or hasattr(module, "none"):
                WRITES[name][1](module)
        state.put_back()
        assert state.changes() == []
    now = module.outputs, module.base, module.nested, module.tracker, module.array, module.lists
    assert all(a is b for a, b in zip(now, held, strict=True))
    assert module.base.tolist() == [0, 0]
    assert next_values(module) == before
    state.put_back()


def test_ignored_attributes_are_nobodys():
    module = Strange()
    module.log, module.keeps = print, 1
    state = PythonState(module, ignore=("log", "trainer"))
    module.log, module.trainer, module.keeps = len, 1, 2
    assert state.changes() == ["self.keeps (1 -> 2)"]
    state.put_back()
    assert (module.log, module.trainer, module.keeps) == (len, 1, 1)


def test_parameters_buffers_and_metrics_are_looked_after_elsewhere():
    module = Strange()
    module.params = list(module.parameters())
    state = PythonState(module)
    module.net(torch.randn(4, 2)).sum().backward()
    module.net[0].weight.data.add_(1)
    module.metric.update(3.0)
    assert state.changes() == []


def test_a_generator_cannot_be_wound_back():
    module = nn.Linear(1, 1)
    module.stream = (number for number in range(9))
    state = PythonState(module)
    assert state.changes() == []
    next(module.stream)
    assert state.changes() == ["self.stream"]
    with pytest.raises(ConfigurationError, match=r"self\.stream is a generator"):
        state.put_back()


def test_lists_that_only_grew_may_keep_what_they_got():
    module = Strange()
    module.outputs.append("earlier")
    module.pairs = {"train": [], "val": [0]}
    state = PythonState(module)
    kept = []
    for client in range(3):
        assert module.outputs == ["earlier"]
        module.outputs.append(client)
        module.pairs["train"] += [client, client]
        module.pairs["val"].insert(0, "new")  # no addition at the end
        module.lists["new"].append(client)
        module.queue.append(client)
        kept.append(state.growth())
        state.put_back()
    for growth in kept:
        state.grow(growth)
    assert module.outputs == ["earlier", 0, 1, 2]
    assert module.pairs == {"train": [0, 0, 1, 1, 2, 2], "val": [0]}
    assert module.lists == {"new": [0, 1, 2]}
    assert list(module.queue) == [1, 2]


def test_which_tensors_a_step_writes():
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))
    module[2].requires_grad_(False)
    module.register_buffer("mask", torch.tensor([0.0, -torch.inf, torch.nan]))
    module.register_buffer("centre", torch.zeros(1))
    before = {name: value.clone() for name, value in module.state_dict().items()}
    centre = module.centre
    writes = TensorWrites(module)
    assert [*writes.buffers(), *writes.frozen(), *writes.trained(), *writes.gradients()] == []
    module(torch.randn(4, 2)).sum().backward()
    module[2].weight.data.mul_(0.5)
    module.centre = module.centre + 1  # another tensor
    assert writes.buffers() == [
        "centre",
        "1.running_mean",
        "1.running_var",
        "1.num_batches_tracked",
    ]
    assert writes.frozen() == ["2.weight"]
    assert writes.trained() == []
    assert writes.gradients() == ["0.weight", "0.bias", "1.weight", "1.bias"]
    module[0].weight.data.clamp_(0, 1e-3)
    assert writes.trained() == ["0.weight"]
    writes.put_back()
    for name, value in module.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0, equal_nan=True)
    assert module.centre is centre
    assert all(param.grad is None for param in module.parameters())
