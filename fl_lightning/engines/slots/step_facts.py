"""What a training step does with parameters and buffers, found by running it on copies of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fl_lightning.core.seeds import preserve_global_generators
from fl_lightning.engines.cannot_stack import CannotStack
from fl_lightning.engines.functional.functional_step import Tensors, TrainingStep, copies_of

# Makes a batch of so many of a client's examples.
BatchOf = Callable[[int], Any]

# By what share two runs of the same step on the same batch may differ: a GPU may add in any order.
_SAME = 1e-3


@dataclass(frozen=True)
class StepFacts:
    """Facts about a training step on batches of one size.

    Attributes:
        unused: names of parameters that train and that the loss does not depend on.
        written: names of buffers that the step writes to.
    """

    unused: frozenset[str]
    written: frozenset[str]

    @classmethod
    def of(cls, step: TrainingStep, module: nn.Module, batch: BatchOf, size: int) -> StepFacts:
        """Run the step twice on a batch of ``size`` examples; the module is left alone.

        Raises:
            CannotStack: if the second run gives something else, the step writes to a parameter, or its
                loss has no gradient.
        """
        trained = [name for name, p in module.named_parameters() if p.requires_grad]
        first, tensors = _run(step, module, batch, size, trained)
        second, _ = _run(step, module, batch, size, trained)
        if _are_other(list(first.values()), list(second.values())):
            raise CannotStack("training_step does other things each time that it is called")
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
    """Return the loss, under an empty name, with its gradients, and the copies that the step had."""
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
    """True if any differ by more than rounding; a GPU is waited for once."""
    if [one is None for one in ones] != [two is None for two in twos]:
        return True
    far = [
        (_differs(one, two) & ~((one - two).abs() <= _SAME * (two.abs() + two.norm()))).any()
        for one, two in zip(ones, twos, strict=True)
        if one is not None and two is not None
    ]
    return bool(torch.stack(far).any())


def _differs(one: Tensor, two: Tensor) -> Tensor:
    """Mask of the numbers that do; NaN is the same as NaN."""
    return (one != two) & ~(one.isnan() & two.isnan())


def _is_written(module: nn.Module, name: str, copy: Tensor) -> bool:
    """Whether a copy was written to; its numbers tell of writing past autograd (``.data``)."""
    if copy._version:
        return True
    owner, _, own_name = name.rpartition(".")
    present = getattr(module.get_submodule(owner), own_name).detach()
    if present.shape != copy.shape:
        return True
    return bool(_differs(present, copy).any())
