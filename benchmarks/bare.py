"""The bare loop that everything is compared with: FedAvg in plain PyTorch, as fast as it gets.

    for each client: copy the weights in, train, mean ← mean + share · weights

Tensors in memory, one network reused, copies in place over lists of tensors, one running mean.
Which clients train on which batches is a plan made beforehand, outside of the timed part: a
federation's own (see `plan`), so that the two aggregates can be compared, or one of its own here.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everyone writes it

from benchmarks.workloads import SEED, Workload

Data = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Variant:
    """One way to write the local step, with the same result.

    Attributes:
        update: ``sgd`` (torch's own as it comes), ``foreach``, ``fused`` (its variants), ``by hand``
            (`torch.autograd.grad` and a few operations on lists), ``graphed`` (the step by hand, on a
            GPU recorded as a CUDA graph and replayed), or one of `benchmarks.engineered`.
        channels_last: the memory layout of images and convolutions.
    """

    update: str = "sgd"
    channels_last: bool = False

    def __str__(self) -> str:
        return self.update + (", channels last" if self.channels_last else "")


PLAIN = Variant()
VARIANTS = {
    str(variant): variant
    for update in ("sgd", "foreach", "fused", "by hand", "graphed", "compiled")
    for variant in (Variant(update), Variant(update, channels_last=True))
} | {name: Variant(name) for name in ("batched", "one gradient")}


@dataclass(frozen=True)
class Visit:
    """One client's turn in a round.

    Attributes:
        batches: its batches' indices, in order.
        share: of the round's examples, its weight in the mean.
        seed: of what the network draws, for networks that do.
    """

    batches: Sequence[Tensor]
    share: float
    seed: int = SEED


def own_plan(work: Workload, round_index: int) -> list[Visit]:
    """Return a random cohort's visits."""
    generator = np.random.default_rng((SEED, round_index))
    ids = generator.choice(work.num_clients, work.cohort, replace=False).tolist()
    total = float(work.sizes[ids].sum())
    return [Visit(shuffled(work, client), work.sizes[client] / total) for client in ids]


def shuffled(work: Workload, client: int) -> list[Tensor]:
    """Return the indices of a client's batches, each pass over its examples in a new order."""
    size, num_steps = int(work.sizes[client]), work.steps_of(client)
    batches: list[Tensor] = []
    while len(batches) < num_steps:
        order = torch.randperm(size).add_(int(work.starts[client]))
        batches += order.split(work.batch_size)
    return batches[:num_steps]


class BareLoop:
    """Trains rounds of a workload.

    Args:
        work: what to train.
        data: its examples.
        variant: how.
        precision: Lightning's name: ``32-true``, ``bf16-mixed`` or ``16-mixed``.
        device: where it trains; examples are there from the start.
        mean_dtype: of the running mean. In float32 a mean of 1,000 clients' weights is off by 1e-4
            of a small step: enough for training, not for comparing.

    Attributes:
        start: the global weights that the next round starts from.
    """

    def __init__(
        self,
        work: Workload,
        data: Data,
        variant: Variant = PLAIN,
        precision: str = "32-true",
        *,
        device: str = "cpu",
        mean_dtype: torch.dtype = torch.float32,
    ) -> None:
        self.work, self.variant = work, variant
        self._device = device
        self._x, self._y = (part.to(device) for part in data)
        network = work.initial_network().to(device)
        if variant.channels_last:
            network = network.to(memory_format=torch.channels_last)
            self._x = self._x.to(memory_format=torch.channels_last)
        self._network = network
        self._leaves = [p for p in network.parameters() if p.requires_grad]
        self._params = [p.detach() for p in self._leaves]
        self.start = [p.clone() for p in self._params]
        self._mean = [torch.zeros_like(p, dtype=mean_dtype) for p in self._params]
        self._by_hand = variant.update in ("by hand", "graphed")
        has_velocity = self._by_hand and work.momentum
        self._velocity = [torch.zeros_like(p) for p in self._params] if has_velocity else []
        self._optimizer = torch.optim.SGD(
            self._leaves,
            lr=work.lr,
            momentum=work.momentum,
            weight_decay=work.weight_decay,
            foreach=True if variant.update == "foreach" else None,
            fused=True if variant.update == "fused" else None,
        )
        self._is_mixed = _is_mixed(precision)
        self._draws = any(isinstance(layer, nn.Dropout) for layer in network.modules())
        self._is_graphed = variant.update == "graphed" and device == "cuda"
        # by the size of the batch, with the tensor of the examples' indices
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._clock = clock_for(device)

    def train_round(self, plan: Sequence[Visit]) -> float:
        """Train a round and return its seconds."""
        began = self._clock()
        step = self._step_by_hand if self._by_hand else self._step
        if self._is_graphed:
            self._capture({len(batch) for visit in plan for batch in visit.batches})
        for visit in plan:
            torch._foreach_copy_(self._params, self.start)
            self._optimizer.state.clear()
            if self._velocity:
                torch._foreach_zero_(self._velocity)
            torch.randperm(sum(map(len, visit.batches)))  # any such loop shuffles
            if self._draws:
                torch.default_generator.manual_seed(visit.seed)
            if self._is_graphed:
                self._replay(visit.batches)
            else:
                for batch in visit.batches:
                    indices = batch.to(self._device, non_blocking=True)
                    step(self._x[indices], self._y[indices])
            torch._foreach_add_(self._mean, self._params, alpha=visit.share)
        torch._foreach_copy_(self.start, self._mean)
        torch._foreach_zero_(self._mean)
        wait_for(self._device)
        return self._clock() - began

    def _loss(self, x: Tensor, y: Tensor) -> Tensor:
        mixed = torch.autocast(self._device, torch.bfloat16) if self._is_mixed else _nothing
        with mixed:
            return F.cross_entropy(self._network(x), y)

    def _step(self, x: Tensor, y: Tensor) -> None:
        self._optimizer.zero_grad()
        self._loss(x, y).backward()
        self._optimizer.step()

    def _step_by_hand(self, x: Tensor, y: Tensor) -> None:
        gradients = torch.autograd.grad(self._loss(x, y), self._leaves)
        if self.work.weight_decay:
            torch._foreach_add_(gradients, self._params, alpha=self.work.weight_decay)
        if self._velocity:
            torch._foreach_mul_(self._velocity, self.work.momentum)
            torch._foreach_add_(self._velocity, gradients)
            gradients = tuple(self._velocity)
        torch._foreach_add_(self._params, gradients, alpha=-self.work.lr)

    def _capture(self, sizes: set[int]) -> None:
        """Record steps on batches of these sizes; the weights are left anywhere."""
        for size in sizes - self._graphs.keys():
            indices = torch.zeros(size, dtype=torch.long, device=self._device)
            graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(3):  # what libraries set up in a first step cannot be recorded
                    self._step_by_hand(self._x[indices], self._y[indices])
            torch.cuda.current_stream().wait_stream(stream)
            with torch.cuda.graph(graph):
                self._step_by_hand(self._x[indices], self._y[indices])
            self._graphs[size] = graph, indices

    def _replay(self, batches: Sequence[Tensor]) -> None:
        order = torch.cat(list(batches)).to(self._device, non_blocking=True)
        for batch in order.split([len(batch) for batch in batches]):
            graph, indices = self._graphs[len(batch)]
            indices.copy_(batch)
            graph.replay()


_nothing = contextlib.nullcontext()


def clock_for(device: str, num_processes: int = 1) -> Callable[[], float]:
    """Return a clock of what this process computes, where it does all; who else has the CPU does not count."""
    is_alone = device == "cpu" and num_processes == 1
    return time.process_time if is_alone else time.perf_counter


def wait_for(device: str) -> None:
    """Return when a device has done what it was given: a GPU is given work ahead of time."""
    if device == "cuda":
        torch.cuda.synchronize()


def _is_mixed(precision: str) -> bool:
    if precision not in ("32-true", "bf16-mixed", "16-mixed"):
        raise ValueError(f"precision must be 32-true, bf16-mixed or 16-mixed, got {precision!r}")
    return precision != "32-true"  # on a CPU, 16-mixed is bfloat16 as well
