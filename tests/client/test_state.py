"""What the attributes of a module hold is put back, by whatever step it was changed."""

import random
from collections import OrderedDict, defaultdict, deque
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from fl_lightning import ConfigurationError
from fl_lightning.client.state.attributes import Attributes, append

COUNTED, CALLED = [], {"times": 0}


def called():
    CALLED["times"] += 1


class Slotted:
    __slots__ = ("__hidden", "value")

    def __init__(self):
        self.value, self.__hidden = 0, []

    def count(self):
        self.value += 1
        self.__hidden.append(1)


class Odd(nn.Module):
    total = 0

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.first, self.second, self.third = [1, 2], [3], deque([4], maxlen=2)
        self.table, self.order = {"a": [1]}, OrderedDict(a=1, b=2)
        self.lists, self.chosen = defaultdict(list), {1, 2}
        self.object, self.slotted = SimpleNamespace(n=[0]), Slotted()
        self.tensor, self.array = torch.ones(2), np.ones(2)
        self.nested = ([torch.zeros(1)], partial(max, [1]))
        self.draws = random.Random(0), np.random.default_rng(0), torch.Generator()
        self.method = Slotted().count
        self.rows = self.layer.weight.data[0]
        self.closure = self.noted = []
        self.note = lambda: self.noted.append(1) or COUNTED.append(1)
        around = []
        self.fill = lambda: around.append(1)

    @torch.no_grad()
    def call(self):
        called()

    @property
    def seen(self):
        return COUNTED.append(2)


CHANGES = {
    "a number": lambda m: setattr(m, "n", 1),
    "removed": lambda m: delattr(m, "chosen"),
    "renamed": lambda m: setattr(m, "other", m.__dict__.pop("array")),
    "a layer's": lambda m: setattr(m.layer, "in_features", 5),
    "mode": lambda m: m.layer.eval(),
    "moved between lists": lambda m: m.second.insert(0, m.first.pop()),
    "rotated": lambda m: m.third.append(5),
    "inside": lambda m: m.table["a"].append(2),
    "key": lambda m: m.table.__setitem__("b", m.table.pop("a")),
    "order": lambda m: m.order.move_to_end("a"),
    "default": lambda m: m.lists["x"],
    "set": lambda m: m.chosen.add(3),
    "object": lambda m: m.object.n.append(1),
    "slots": lambda m: m.slotted.count(),
    "method": lambda m: m.method(),
    "in place": lambda m: m.tensor.add_(1),
    "behind autograd": lambda m: m.tensor.data.add_(1),
    "gradient": lambda m: setattr(m.tensor, "grad", torch.ones(2)),
    "resized": lambda m: m.tensor.resize_(1),
    "array": lambda m: m.array.fill(2),
    "in a tuple": lambda m: m.nested[0][0].add_(1),
    "bound": lambda m: m.nested[1].args[0].append(2),
    "python draws": lambda m: m.draws[0].random(),
    "numpy draws": lambda m: m.draws[1].random(),
    "torch draws": lambda m: torch.rand(1, generator=m.draws[2]),
    "a part": lambda m: m.add_module("more", nn.Linear(1, 1)),
    "a buffer": lambda m: m.register_buffer("more", torch.ones(1)),
    "held by a closure too": lambda m: m.note(),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_a_step_changes_is_named_and_put_back(name):
    module = Odd()
    state, held = Attributes(module), [module.first, module.table, module.noted]
    assert state.is_same()
    assert state.changes() == []
    CHANGES[name](module)
    assert not state.is_same()
    assert state.changes()[0].startswith("self.")
    state.put_back()
    assert state.is_same()
    assert state.changes() == []
    assert [module.first, module.table, module.noted] == [[1, 2], {"a": [1]}, []]
    assert all(
        a is b for a, b in zip(held, (module.first, module.table, module.noted), strict=True)
    )


def test_weights_are_not_attributes_whoever_looks_at_them():
    module = Odd()
    state = Attributes(module)
    module.layer.weight.data.fill_(3)
    state.put_back()
    assert float(module.rows.detach().min()) == 3


def test_an_iterator_is_refused():
    module = Odd()
    module.object.steps = iter([1, 2])
    with pytest.raises(
        ConfigurationError, match=r"self.object.steps .* keep a list and a position"
    ):
        Attributes(module)


OUTSIDE = {
    "a global": (lambda m: m.note(), f"global COUNTED of {__name__}"),
    "in a property": (lambda m: m.seen, f"global COUNTED of {__name__}"),
    "by a function under a decorator": (lambda m: m.call(), f"global CALLED of {__name__}.times"),
    "around a function": (lambda m: m.fill(), "around around Odd.__init__.<locals>.<lambda>"),
    "of the class": (lambda m: setattr(Odd, "total", Odd.total + 1), "class Odd.total"),
    "rebound": (lambda m: globals().update(CALLED=dict(CALLED)), None),
    "of torch": (lambda m: m.layer.train(), None),
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_what_is_outside_is_named_and_stays(name):
    module, (change, place) = Odd(), OUTSIDE[name]
    state = Attributes(module, outside=True)
    change(module)
    assert state.changes(outside=True) == ([] if place is None else [place])
    held = len(COUNTED), dict(CALLED), Odd.total
    state.put_back()
    assert ((len(COUNTED), CALLED, Odd.total), module.noted) == (held, [])
    assert state.changes(outside=True) == ([] if place is None else [place])


@pytest.mark.parametrize("draw", [random.random, np.random.rand])
def test_draws_of_the_global_generators_are_named_and_put_back(draw):
    state = Attributes(Odd(), outside=True)
    first = draw()
    assert [place.partition(".")[0] for place in state.changes()] == [
        "NumPy's random" if draw is np.random.rand else "Python's random"
    ]
    state.put_back()
    assert draw() == first


def test_lists_that_only_grew_may_keep_what_they_got():
    module = Odd()
    state = Attributes(module)
    module.first.append(9)
    module.lists["new"].append(1)
    module.second[:] = [7, 8]  # not only appended to
    growth = state.put_back()
    for _ in range(2):
        append(growth)
    assert (module.first, module.lists, module.second) == ([1, 2, 9, 9], {"new": [1, 1]}, [3])
