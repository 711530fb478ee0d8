"""Bare loops as a good engineer would write them, each exact but for the order of sums.

- ``compiled``: the whole local step, forward, backward and optimizer, as one compiled graph.
- ``batched``: many clients in one compiled step, `torch.vmap` over parameters of their own; those that
  have fewer steps, or smaller batches, are masked.
- ``one gradient``: where every client takes one step of SGD, the mean of the clients is one step on all
  their examples, each weighted by its client's share over its batch's size.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.exc import TorchDynamoException
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F  # noqa: N812 - as everyone writes it

from benchmarks.bare import (
    PLAIN,
    VARIANTS,
    BareLoop,
    Data,
    Variant,
    Visit,
    own_plan,
    wait_for,
)
from benchmarks.workloads import Workload

# Parameters of all clients of one batched step, and its most clients.
_MOST_NUMBERS, _MOST_CLIENTS = 2**22, 20


def loop_for(
    work: Workload, data: Data, variant: Variant = PLAIN, *args: Any, **options: Any
) -> BareLoop:
    """Return the loop of a variant."""
    return ENGINEERED.get(variant.update, BareLoop)(work, data, variant, *args, **options)


def applies(variant: Variant, work: Workload) -> bool:
    """Return whether a variant gives the same as the plain loop on a workload, and may be faster."""
    if variant.update == "batched":
        network = work.network()
        size = sum(p.numel() for p in network.parameters() if p.requires_grad)
        kinds = (
            nn.Dropout,
            nn.LSTM,
        )  # the first draws other numbers; `torch.vmap` has no rule for the second
        can = not any(isinstance(layer, kinds) for layer in network.modules())
        return can and 2 * size <= _MOST_NUMBERS
    if variant.update == "one gradient":
        return max(map(work.steps_of, range(min(1000, work.num_clients)))) == 1
    return True


def _weighted_loss(outputs: Tensor, y: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum of the examples' losses; a text's is the mean over its tokens."""
    losses = F.cross_entropy(outputs, y, reduction="none")
    return (losses.view(len(losses), -1).mean(1) * weights).sum()


class _FunctionalLoop(BareLoop):
    """Base of loops whose step is one function of tensors."""

    def _loss_of(self, params: Sequence[Tensor], x: Tensor, y: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of the examples' losses."""
        named = dict(zip(self._names, params, strict=True))
        with torch.autocast(self._device, torch.bfloat16, enabled=self._is_mixed):
            return _weighted_loss(functional_call(self._network, named, (x,)), y, weights)

    @property
    def _names(self) -> list[str]:
        return [name for name, p in self._network.named_parameters() if p.requires_grad]

    def _move(
        self, params: list[Tensor], velocity: list[Tensor], grads: Sequence[Tensor], rate: Any
    ) -> None:
        for at, (p, g) in enumerate(zip(params, grads, strict=True)):
            g = g + self.work.weight_decay * p if self.work.weight_decay else g
            if velocity:
                g = velocity[at].mul_(self.work.momentum).add_(g)
            p.sub_(g * (rate if isinstance(rate, float) else rate.view(-1, *[1] * (g.ndim - 1))))


class CompiledLoop(_FunctionalLoop):
    """Takes one compiled step after the other."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        if self.work.momentum:
            self._velocity = [torch.zeros_like(p) for p in self._params]
        options = {"fallback_random": True}
        compiled = partial(torch.compile, self._whole, fullgraph=True, options=options)
        # smaller last batches share a graph, of any size; none can be compiled with dropout
        has_dropout = any(isinstance(layer, nn.Dropout) for layer in self._network.modules())
        self._of_full = compiled(dynamic=False)
        self._of_others = self._whole if has_dropout else compiled(dynamic=True)

    def _step(self, x: Tensor, y: Tensor) -> None:
        step = self._of_full if len(x) == self.work.batch_size else self._of_others
        step(x, y)

    def _whole(self, x: Tensor, y: Tensor) -> None:
        weights = x.new_full((len(x),), 1 / len(x))
        grads = grad(self._loss_of)(self._params, x, y, weights)
        self._move(self._params, self._velocity, grads, self.work.lr)


class BatchedLoop(_FunctionalLoop):
    """Trains groups of clients side by side in a compiled step."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        size = sum(p.numel() for p in self._params)
        self.num_clients = min(_MOST_CLIENTS, self.work.cohort, _MOST_NUMBERS // size)
        self._stacked = [torch.empty(self.num_clients, *p.shape) for p in self._params]
        has_velocity = bool(self.work.momentum)
        self._velocities = [torch.empty_like(p) for p in self._stacked] if has_velocity else []
        self._together = torch.compile(self._whole, fullgraph=True, dynamic=False)

    def _whole(self, x: Tensor, y: Tensor, valid: Tensor) -> None:
        sizes = valid.sum(1, keepdim=True)
        grads = vmap(grad(self._loss_of))(self._stacked, x, y, valid / sizes.clamp(min=1))
        self._move(self._stacked, self._velocities, grads, self.work.lr * (sizes[:, 0] > 0))

    def train_round(self, plan: Sequence[Visit]) -> float:
        """Train a round and return its seconds."""
        began = self._clock()
        visits = sorted(plan, key=lambda visit: -len(visit.batches))
        for first in range(0, len(visits), self.num_clients):
            self._train_group(visits[first : first + self.num_clients])
        torch._foreach_copy_(self.start, self._mean)
        torch._foreach_zero_(self._mean)
        return self._clock() - began

    def _train_group(self, group: Sequence[Visit]) -> None:
        for stacked, start in zip(self._stacked, self.start, strict=True):
            stacked.copy_(start)
        if self._velocities:
            torch._foreach_zero_(self._velocities)
        num_steps = len(group[0].batches)
        shape = num_steps, self.num_clients, self.work.batch_size
        indices, valid = torch.zeros(shape, dtype=torch.long), torch.zeros(shape)
        for at, visit in enumerate(group):
            *full, last = visit.batches
            if full and all(len(batch) == self.work.batch_size for batch in full):
                indices[: len(full), at] = torch.stack(full)
                valid[: len(full), at] = 1
                single = {len(full): last}
            else:  # a client that passes over its examples again has smaller ones between
                single = dict(enumerate(visit.batches))
            for step, batch in single.items():
                indices[step, at, : len(batch)] = batch
                valid[step, at, : len(batch)] = 1
        for step in range(num_steps):
            self._together(self._x[indices[step]], self._y[indices[step]], valid[step])
        shares = torch.tensor([visit.share for visit in group], dtype=torch.float32)
        for mean, stacked in zip(self._mean, self._stacked, strict=True):
            mean += torch.tensordot(shares, stacked[: len(group)], 1)


class OneGradientLoop(_FunctionalLoop):
    """Takes one step on the weighted examples of all clients."""

    def train_round(self, plan: Sequence[Visit]) -> float:
        """Train a round and return its seconds."""
        began = self._clock()
        batches = [batch for visit in plan for batch in visit.batches]
        of_one = [visit.share / len(visit.batches[0]) for visit in plan]
        weights = torch.tensor(of_one, dtype=torch.float32).repeat_interleave(
            torch.tensor([*map(len, batches)])
        )
        at = torch.cat(batches)
        torch._foreach_copy_(self._params, self.start)
        loss = _weighted_loss(self._network(self._x[at]), self._y[at], weights)
        grads = torch.autograd.grad(loss, self._leaves)
        decay = 1 - self.work.lr * self.work.weight_decay
        torch._foreach_mul_(self.start, decay * sum(visit.share for visit in plan))
        torch._foreach_add_(self.start, grads, alpha=-self.work.lr)
        wait_for(self._device)
        return self._clock() - began


ENGINEERED: dict[str, type[BareLoop]] = {
    "compiled": CompiledLoop,
    "batched": BatchedLoop,
    "one gradient": OneGradientLoop,
}


@dataclass(frozen=True)
class Comparison:
    """Variants of the bare loop on a workload.

    Attributes:
        seconds: of some clients, the best of some tries, by variant; the fastest first.
        differences: of a step of each of these clients from the plain loop's: the largest difference of an
            entry, as a share of the largest change.
        left_out: reasons why a variant is not among them.
    """

    seconds: dict[str, float]
    differences: dict[str, float]
    left_out: dict[str, str]


# Largest difference of a variant that counts as the same training, in full precision and in bfloat16.
_EXACT, _EXACT_IN_BF16 = 1e-5, 0.05


def compare_variants(
    work: Workload,
    data: Data,
    precision: str,
    device: str = "cpu",
    seconds: float = float("inf"),
    repetitions: int = 3,
) -> Comparison:
    """Train some clients by all variants in turn, after comparing a step of each with the plain loop's.

    Args:
        work: what to train.
        data: its examples.
        precision: Lightning's name.
        device: where.
        seconds: after which there is no further try than one of each.
        repetitions: tries of each, after one that warms up and compiles.
    """
    loops = {
        str(variant): loop_for(work, data, variant, precision, device=device)
        for variant in _candidates(work, device)
    }
    plain = loops[str(PLAIN)]
    one_client = [plain.train_round(own_plan(work, 0)[:1]) for _ in range(2)][-1]
    num_clients = max(1, int(0.2 / one_client))  # a try takes about 0.2 s
    groups = [loop.num_clients for loop in loops.values() if isinstance(loop, BatchedLoop)]
    num_clients = max([num_clients, *groups])
    exact = _EXACT if precision == "32-true" else _EXACT_IN_BF16
    differences, left_out = _differences(loops, own_plan(work, 0)[:num_clients], exact)
    took = {name: float("inf") for name in loops if name not in left_out}
    began = time.perf_counter()
    for number in range(1 + repetitions):
        if number > 1 and time.perf_counter() - began > seconds:
            break
        plan = own_plan(work, number)[:num_clients]
        for name, least in took.items():
            one = loops[name].train_round(plan)
            if number:  # the first one warms up
                took[name] = min(least, one)
    fastest_first = dict(sorted(took.items(), key=lambda item: item[1]))
    return Comparison(fastest_first, differences, left_out)


def _candidates(work: Workload, device: str) -> list[Variant]:
    layers = work.initial_network().modules()
    is_convolutional = sum(isinstance(layer, nn.Conv2d) for layer in layers) > 1
    elsewhere = ["graphed"] if device == "cpu" else [*ENGINEERED]
    return [
        variant
        for variant in VARIANTS.values()
        if applies(variant, work)
        and (is_convolutional or not variant.channels_last)
        and variant.update not in elsewhere
    ]


def _differences(
    loops: Mapping[str, BareLoop], plan: Sequence[Visit], exact: float
) -> tuple[dict[str, float], dict[str, str]]:
    """Return each loop's difference from the first after a step of some clients, and who is left out."""
    single_steps = [replace(visit, batches=visit.batches[:1]) for visit in plan]
    plain = loops[str(PLAIN)]
    before = [p.clone() for p in plain.start]
    differences, left_out = {}, {}
    for name, loop in loops.items():
        torch._foreach_copy_(loop.start, before)
        try:
            loop.train_round(single_steps)
        except (RuntimeError, TorchDynamoException) as error:
            left_out[name] = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
            continue
        differences[name] = largest_difference(loop.start, plain.start, before)
        if not differences[name] <= exact:
            left_out[name] = f"differs by {differences[name]:.1g} of the largest change"
    return differences, left_out


def largest_difference(found: list[Tensor], expected: list[Tensor], before: list[Tensor]) -> float:
    """Return the largest difference of an entry, as a share of the largest change of one."""
    gaps = torch._foreach_norm(torch._foreach_sub(found, expected), torch.inf)
    moves = torch._foreach_norm(torch._foreach_sub(expected, before), torch.inf)
    return float(torch.stack(gaps).max() / torch.stack(moves).max())
