"""Rehearsal of a training step on one batch, with copies of its tensors, before it runs in slots.

`StepFacts` finds the parameters that the loss uses and the buffers that the step writes to. `rehearse`
finds its random draws and the inputs of its metrics. `hooks_against_slots` finds the user's hooks that a
step of many clients would not call, or would call differently; it reads private attributes of PyTorch,
because there is no public way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import Metric

from fl_lightning.core.seeds import preserve_global_generators
from fl_lightning.engines.functional import CannotStack
from fl_lightning.engines.functional.functional_step import (
    Observed,
    Tensors,
    TrainingStep,
    copies_of,
    map_tensors,
    tensors_in,
)
from fl_lightning.engines.functional.metrics import MetricFeed
from fl_lightning.engines.slots.inputs import DrawnRows

# Builds a batch of a given number of a client's examples.
BatchOf = Callable[[int], Any]

# Largest relative difference between two runs of a step on one batch; a GPU may add in any order.
_SAME = 1e-3


@dataclass(frozen=True)
class StepFacts:
    """Facts found by running a training step on batches of one size: unused parameters, written buffers.

    Attributes:
        unused: names of trainable parameters that the loss does not depend on.
        written: names of buffers that the step writes to.
    """

    unused: frozenset[str]
    written: frozenset[str]

    @classmethod
    def of(cls, step: TrainingStep, module: nn.Module, batch: BatchOf, size: int) -> StepFacts:
        """Find the facts by running the step twice on ``size`` examples, on copies of the module's tensors.

        Raises:
            CannotStack: if the two runs differ, the step writes to a parameter, or its loss has no
                gradient.
        """
        trained = [name for name, p in module.named_parameters() if p.requires_grad]
        first, tensors = _run(step, module, batch, size, trained)
        second, _ = _run(step, module, batch, size, trained)
        if _are_other(list(first.values()), list(second.values())):
            raise CannotStack(
                "training_step does not repeat the same operations when it is called again"
            )
        buffers = dict(module.named_buffers())
        written = [n for n, tensor in tensors.items() if _is_written(module, n, tensor)]
        for name in written:
            if name not in buffers:
                kind = "parameter" if name in trained else "frozen parameter"
                raise CannotStack(f"training_step writes to the {kind} {name}")
        unused = frozenset(name for name in trained if first[name] is None)
        return cls(unused, frozenset(written))


def _run(
    step: TrainingStep, module: nn.Module, batch: BatchOf, size: int, trained: list[str]
) -> tuple[dict[str, Tensor | None], Tensors]:
    """Run the step on copies of the tensors; return gradients by name (loss as '') and the copies."""
    with preserve_global_generators():  # reading it may draw
        read = batch(size)
    tensors = copies_of(module, step.stand_ins.prefixes)
    count = torch.zeros((), dtype=torch.float64, device=tensors[trained[0]].device)
    with preserve_global_generators(only_torch=True), step.in_place(), torch.enable_grad():
        loss = step(tensors, read, count).loss
        if not loss.requires_grad:
            raise CannotStack("its loss has no gradient")
        of = [tensors[name] for name in trained]
        gradients = torch.autograd.grad(loss, of, allow_unused=True)
    return {"": loss.detach(), **dict(zip(trained, gradients, strict=True))}, tensors


def _are_other(ones: list[Tensor | None], twos: list[Tensor | None]) -> bool:
    """True if any pair of tensors differs by more than rounding; synchronises with a GPU only once."""
    if [one is None for one in ones] != [two is None for two in twos]:
        return True
    far = [
        (_differs(one, two) & ~((one - two).abs() <= _SAME * (two.abs() + two.norm()))).any()
        for one, two in zip(ones, twos, strict=True)
        if one is not None and two is not None
    ]
    return bool(torch.stack(far).any())


def _differs(one: Tensor, two: Tensor) -> Tensor:
    """Return a mask of the entries that differ by more than rounding; NaN equals NaN."""
    return (one != two) & ~(one.isnan() & two.isnan())


def _is_written(module: nn.Module, name: str, copy: Tensor) -> bool:
    """True if a step wrote to a copy of a tensor, also through ``.data``."""
    if copy._version:
        return True
    owner, _, own_name = name.rpartition(".")
    present = getattr(module.get_submodule(owner), own_name).detach()
    if present.shape != copy.shape:
        return True
    return bool(_differs(present, copy).any())


@dataclass(frozen=True)
class Rehearsal:
    """Findings of a trial run of the training step: its random draws, and the metrics it updates and logs.

    Attributes:
        draws: random numbers of the step.
        feed: metrics that the step updates.
        metrics: metrics that the step logs, by name.
        is_final: True if later rounds need no rehearsal: no draws, no metrics, no disabled dropout.
    """

    draws: DrawnRows
    feed: MetricFeed
    metrics: dict[str, Metric]
    is_final: bool


def rehearse(
    step: TrainingStep, module: nn.Module, batch: Any, *, num_slots: int, by_example: bool
) -> Rehearsal:
    """Find the step's random draws and metrics by a trial run on a full batch and on one example.

    Args:
        step: training step of the module.
        module: the LightningModule; it is not changed.
        batch: full batch.
        num_slots: G.
        by_example: True if the stacked step evaluates its loss example by example, because batches are padded.

    Raises:
        CannotStack: if slots do not support one of its draws or metrics.
    """
    size = len(tensors_in(batch)[0])
    count = torch.zeros((), dtype=torch.float64, device=next(module.parameters()).device)

    def observed(part: Any) -> Observed:
        return step.observe(copies_of(module, step.stand_ins.prefixes), part, count)

    with step.in_place():
        full = observed(batch)
        one = observed(map_tensors(lambda tensor: tensor[:1], batch)) if by_example else None
        draws = DrawnRows(full.draws, None if one is None else one.draws, num_slots, size)
    feed = MetricFeed(full.calls, None if one is None else one.calls, size)
    is_final = not full.draws and not full.has_dropout and not len(feed) and not full.metrics
    return Rehearsal(draws, feed, full.metrics, is_final)


_OF_PARAMETERS = {
    "_backward_hooks": "register_hook",
    "_post_accumulate_grad_hooks": "register_post_accumulate_grad_hook",
}
_OF_MODULES = {
    "_backward_hooks": "register_full_backward_hook",
    "_backward_pre_hooks": "register_full_backward_pre_hook",
}
_OF_OPTIMIZERS = {
    "_optimizer_step_pre_hooks": "register_step_pre_hook",
    "_optimizer_step_post_hooks": "register_step_post_hook",
}


def hooks_against_slots(module: nn.Module, optimizer: Optimizer) -> str | None:
    """Return a description of the first hook that training in slots would skip; None if there is none.

    Forward hooks are not among them, because a stacked step calls them.

    Example:
        >>> import torch
        >>> layer = nn.Linear(1, 1)
        >>> optimizer = torch.optim.SGD(layer.parameters())
        >>> hooks_against_slots(layer, optimizer)
        >>> handle = layer.weight.register_hook(lambda gradient: gradient.clamp(-1, 1))
        >>> hooks_against_slots(layer, optimizer)
        'the parameter weight has a hook (register_hook)'
    """
    return next(_found(module, optimizer), None)


def _found(module: nn.Module, optimizer: Optimizer) -> Iterator[str]:
    for name, param in module.named_parameters():
        yield from _of(param, _OF_PARAMETERS, f"the parameter {name}")
    for name, child in module.named_modules():
        yield from _of(child, _OF_MODULES, f"the layer {name}" if name else "the module")
    yield from _of(optimizer, _OF_OPTIMIZERS, "the optimizer")


def _of(owner: Any, names: dict[str, str], who: str) -> Iterator[str]:
    for attribute, method in names.items():
        if getattr(owner, attribute):
            yield f"{who} has a hook ({method})"
