"""Buffers that a step rebinds, aliases, resizes, scripts, quantises or shares: a table.

Each module scales its loss by what the buffer ``n`` holds and then changes it, so that a step that
does not see what the one before it left gives another model.
"""

import numpy as np
import torch
from torch import nn

from strange.rows import BLOBS, ROWS, SEQUENTIAL, UNEVEN, Row, Small


class Changes(Small):
    """Has buffers ``n`` and ``m`` and changes them by a function."""

    def __init__(self, start, change):
        super().__init__()
        self.register_buffer("n", start.clone())
        self.register_buffer("m", start.clone() + 1, persistent=False)
        self.change = change
        self.prepare()

    def prepare(self):
        pass

    def level(self):
        """What the loss depends on, a number."""
        levels = (t.abs() if t.is_complex() else t for t in (self.n, self.m))
        return sum(t.to(self.net[0].weight.dtype).mean() for t in levels)

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch) / (1 + self.level().abs())
        self.change(self)
        return loss


class EveryType(Changes):
    """Has more buffers, of every type, each with its own change."""

    CHANGES = (
        (torch.ones(2, 3, dtype=torch.long), lambda b: b + 1),
        *(
            (torch.ones((), dtype=t), lambda b: b + 1)
            for t in (torch.int32, torch.int16, torch.int8)
        ),
        (torch.tensor(250, dtype=torch.uint8), lambda b: b + 3),  # it wraps
        (torch.tensor(True), torch.logical_not),
        (torch.ones((), dtype=torch.float16), lambda b: b + 0.125),
        *((torch.ones((), dtype=t), lambda b: 0.9 * b) for t in (torch.float32, torch.float64)),
    )

    def prepare(self):
        for place, (start, _) in enumerate(self.CHANGES):
            self.register_buffer(f"b{place}", start.clone())

    def level(self):
        others = (getattr(self, f"b{place}") for place in range(len(self.CHANGES)))
        return super().level() + 0.1 * sum(b.to(self.net[0].weight.dtype).mean() for b in others)


def change_all(m):
    m.n = m.n + 1
    for place, (_, change) in enumerate(m.CHANGES):
        setattr(m, f"b{place}", change(getattr(m, f"b{place}")))


class Shares(Changes):
    """A part of it has the same buffer."""

    def prepare(self):
        self.net[1].register_buffer("n", self.n)


class InTheHook(Changes):
    def training_step(self, batch, batch_idx):
        return self.loss(batch) / (1 + self.level().abs())

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.change(self)


class Plain(Changes):
    """Tensors and an array that are no buffers."""

    def prepare(self):
        self.k, self.view, self.array = torch.tensor(0), self.n.view(-1)[:1], np.zeros(2)
        self.bank = [torch.tensor(0)]

    def on_train_epoch_end(self):
        del self.bank[1:]  # which holds all clients' then

    def level(self):
        kept = self.k + self.bank[-1] + len(self.bank) + float(self.array.sum())
        return super().level() + kept.to(self.net[0].weight.dtype)


class Counting(nn.Module):
    count: int

    def __init__(self, net: nn.Module):
        super().__init__()
        self.net, self.count = net, 0
        self.register_buffer("n", torch.tensor(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        self.n = self.n + 1
        return self.net(x) / (self.count + self.n)


class Scripted(Changes):
    def prepare(self):
        self.net = torch.jit.script(self.net)

    def level(self):
        return self.n.to(torch.float32).mean()


class ScriptedCounter(Scripted):
    def prepare(self):
        self.net = torch.jit.script(Counting(self.net))


def put(name, new):
    """Return a change by which the buffer ``name`` becomes another tensor."""
    return lambda m: setattr(m, name, new(getattr(m, name)))


def write(function):
    """Return a change that works on ``n`` itself."""
    return lambda m: function(m.n)


def data(new):
    return lambda m: setattr(m.n, "data", new(m.n))


def swap(m):
    m.n, m.m = m.m, m.n


def alias(m):
    m.n.data = m.net[0].bias.data


def from_nothing(m):
    m.n = None
    m.n = torch.ones_like(m.m)


def registered_anew(m):
    old = m.n
    del m.n
    m.register_buffer("n", old + 1)


def both(m):
    m.n = m.net[1].n = m.n + 1


def quantised(m):
    weight = m.net[0].weight.detach()
    m.n = (weight * 16).round().clamp(-127, 127).to(torch.int8)


def one(dtype, *shape):
    return torch.ones(shape, dtype=dtype)


def plus_one(n):
    return n + 1


LONG, BYTE, FLOAT, BOOL, COMPLEX = (
    torch.long, torch.uint8, torch.float32, torch.bool, torch.complex128,
)  # fmt: skip
BEHIND, TURNED = "keep their shapes", torch.polar(torch.tensor(1.0), torch.tensor(0.3))
# name, class, n at the start, change, and what differs from a row that either engine may train
CHANGES = [
    ("EveryType", EveryType, one(LONG), change_all, {}),
    ("ComplexInPlace", Changes, one(COMPLEX, 3), write(lambda n: n.add_(0.1j)), {}),
    ("ComplexConstant", Changes, one(COMPLEX, 3), lambda m: None, {}),
    ("NotPersistent", Changes, one(LONG), put("m", plus_one), {}),
    ("Wider", Changes, one(torch.int32), put("n", lambda n: n.long() + 1), SEQUENTIAL),
    ("FloatToDouble", Changes, one(FLOAT), put("n", lambda n: n.double() + 1), {}),
    ("DataOfLong", Changes, one(LONG), data(plus_one), SEQUENTIAL),
    ("DataOfFloat", Changes, one(FLOAT), data(plus_one), SEQUENTIAL),
    ("DataOfComplex", Changes, one(COMPLEX), data(plus_one), SEQUENTIAL),
    ("SetOfFloat", Changes, one(FLOAT), write(lambda n: n.set_(n + 1)), SEQUENTIAL),
    ("AliasOfAParameter", Changes, one(FLOAT, 8), alias, SEQUENTIAL),
    ("Swapped", Changes, one(LONG), swap, {}),
    ("SwappedFloats", Changes, one(FLOAT), swap, {}),
    ("FromNothing", Changes, one(LONG), from_nothing, {}),
    ("RegisteredAnew", Changes, one(LONG), registered_anew, {}),
    ("SharedInPlace", Shares, one(LONG), write(lambda n: n.add_(1)), {}),
    ("SharedBothRebound", Shares, one(FLOAT), both, {}),
    ("SharedOneRebound", Shares, one(FLOAT), put("n", plus_one), "were the same tensor"),
    ("Nothing", Changes, one(LONG), put("n", lambda n: None), BEHIND + "|NoneType"),
    ("Grows", Changes, one(FLOAT, 2), put("n", lambda n: torch.cat([n, n[:1]])), BEHIND),
    ("Resized", Changes, one(FLOAT, 2), write(lambda n: n.resize_(1)), BEHIND),
    ("Unsqueezed", Changes, one(LONG, 2), write(lambda n: n.unsqueeze_(0)), BEHIND),
    ("Transposed", Changes, torch.arange(4.0).view(2, 2), write(lambda n: n.t_().add_(1)), {}),
    ("Quantised", Changes, one(torch.int8, 8, 4), quantised, {}),
    ("InTheHook", InTheHook, one(LONG), put("n", plus_one), {}),
    ("PlainTensor", Plain, one(LONG), put("k", plus_one), SEQUENTIAL),
    ("PlainView", Plain, one(LONG, 2), lambda m: m.view.add_(1), {}),
    ("PlainArray", Plain, one(LONG), lambda m: np.add(m.array, 1, out=m.array), SEQUENTIAL),
    ("Bank", Plain, one(LONG), lambda m: m.bank.append(m.bank[-1] + 1), SEQUENTIAL),
    ("Scripted", Scripted, one(LONG), put("n", plus_one), {}),
    ("ScriptedCounter", ScriptedCounter, one(LONG), put("n", plus_one), SEQUENTIAL),
]  # fmt: skip
for name, kind, start, change, apart in CHANGES:
    key = "refused" if isinstance(apart, str) else "engines"
    make = lambda kind=kind, start=start, change=change: kind(start, change)
    ROWS.append(Row(f"Rebound{name}", make, BLOBS, UNEVEN, **({key: apart} if apart else {})))
