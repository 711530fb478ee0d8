"""A client's term on gradients where ``training_step`` steps the optimizers by hand.

    closure, if there is one  →  ∇ ← ∇ + term, on the optimizer's own parameters  →  clip, step

The term is added once per step of an optimizer: after its closure, ahead of the hook
``on_before_optimizer_step``, as in automatic optimization. Where the module clips with
``self.clip_gradients``, it is added ahead of that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import Trainer
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from fl_lightning.client.corrections.correction import AddedTerm
from fl_lightning.client.log_collector import shadowed
from fl_lightning.client.optimizers import OutermostSteps
from fl_lightning.core.errors import ConfigurationError


class TermByHand:
    """Adds one client's term to the gradients of each optimizer of a module.

    Args:
        trainer: whose optimizers they are.
        term: the client's.
        scale: returns by what losses are multiplied before they go backward.
    """

    def __init__(self, trainer: Trainer, term: AddedTerm, scale: Callable[[], float]) -> None:
        self.term, self._scale = term, scale
        self._strategy: Any = trainer.strategy
        self._module: Any = trainer.lightning_module
        self._of = {
            optimizer: term.of([p for group in optimizer.param_groups for p in group["params"]])
            for optimizer in trainer.optimizers
        }
        self._added: dict[Optimizer, Tensor | None] = {}
        self._is_inside = False

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Add the term where optimizers step inside the block."""
        self._is_inside = False
        step, clip = self._strategy.optimizer_step, self._module.clip_gradients

        def optimizer_step(
            optimizer: Optimizer, closure: Callable[[], Any], *args: Any, **kwargs: Any
        ) -> Any:
            self._is_inside = True
            try:
                return step(optimizer, self._with_term(optimizer, closure), *args, **kwargs)
            finally:
                self._is_inside = False

        def clip_gradients(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            plain = getattr(optimizer, "optimizer", optimizer)  # what Lightning has wrapped
            self._add(plain)
            self._added[plain] = self._sample(plain)
            clip(optimizer, *args, **kwargs)

        with (
            shadowed(self._strategy, "optimizer_step", optimizer_step),
            shadowed(self._module, "clip_gradients", clip_gradients),
            OutermostSteps(self._of, before=self._before_plain_step),
        ):
            yield

    def _before_plain_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Do the same for a step that does not come by way of Lightning."""
        if self._is_inside:
            return None
        itself, *others = args
        closure = others.pop(0) if others else kwargs.pop("closure", None)
        if closure is None:
            self._add(optimizer)
            return None
        return (itself, self._with_term(optimizer, closure), *others), kwargs

    def _with_term(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return a closure that adds the term after the gradients, each time when it is called."""

        def with_term() -> Any:
            value = closure()
            self._add(optimizer)
            # which compares values along a line
            if isinstance(optimizer, LBFGS) and isinstance(value, Tensor):
                return value + self._of[optimizer].value()
            return value

        return with_term

    def _add(self, optimizer: Optimizer) -> None:
        """Add the term to the gradients, unless they already contain it."""
        sample = self._sample(optimizer)
        if sample is None or self._added.pop(optimizer, None) is not sample:
            self._of[optimizer].add(self._scale())

    def _sample(self, optimizer: Optimizer) -> Tensor | None:
        """Return one of the gradients: clipping keeps it, the next backward pass makes another."""
        params = self._of[optimizer].params
        return params[0].grad if params else None


def outputs_by_hand(output: Any) -> dict[str, Any]:
    """Return the output of a training step by hand, as Lightning gives it to hooks.

    Raises:
        ConfigurationError: for anything but a tensor, a dict or nothing.
    """
    if output is None:
        return {}
    if isinstance(output, Tensor):
        return {"loss": output.detach()}
    if not isinstance(output, Mapping):
        raise ConfigurationError(
            "with automatic_optimization = False training_step must return a tensor, a dict or "
            f"nothing; it returned {type(output).__name__}"
        )
    outputs = dict(output)
    if isinstance(outputs.get("loss"), Tensor):
        outputs["loss"] = outputs["loss"].detach()
    return outputs


def loss_by_hand(outputs: Mapping[str, Any]) -> Tensor | None:
    """Return the loss that is reported, if there is one and it is one number.

    Example:
        >>> import torch
        >>> loss_by_hand(outputs_by_hand(torch.tensor([2.0])))
        tensor(2.)
    """
    loss = outputs.get("loss")
    return loss.reshape(()) if isinstance(loss, Tensor) and loss.numel() == 1 else None
