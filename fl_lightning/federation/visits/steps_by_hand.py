"""A correction's gradient term with manual optimization.

    closure, if there is one  →  ∇ ← ∇ + term, for the parameters of the optimizer  →  clip, step

The term is added once per step of an optimizer: after its closure and before the hook
``on_before_optimizer_step``, as in automatic optimization, or before ``self.clip_gradients``.
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
    """Adds a correction's gradient term under manual optimization, in the steps of each of a module's optimizers.

    Args:
        trainer: the Trainer of the optimizers.
        term: the client's term.
        scale: returns the factor by which losses are multiplied before the backward pass.
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
        """Add the correction's term to the gradients in each optimizer step inside the block."""
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
        """Add the correction's term in an optimizer step that the module calls directly, not through Lightning."""
        if self._is_inside:
            return None
        itself, *others = args
        closure = others.pop(0) if others else kwargs.pop("closure", None)
        if closure is None:
            self._add(optimizer)
            return None
        return (itself, self._with_term(optimizer, closure), *others), kwargs

    def _with_term(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return a closure that adds the correction's term after each computation of the gradients."""

        def with_term() -> Any:
            value = closure()
            self._add(optimizer)
            # LBFGS compares values along a line
            if isinstance(optimizer, LBFGS) and isinstance(value, Tensor):
                return value + self._of[optimizer].value()
            return value

        return with_term

    def _add(self, optimizer: Optimizer) -> None:
        """Add the correction's term to an optimizer's gradients, unless they already contain it."""
        sample = self._sample(optimizer)
        if sample is None or self._added.pop(optimizer, None) is not sample:
            self._of[optimizer].add(self._scale())

    def _sample(self, optimizer: Optimizer) -> Tensor | None:
        """Return one parameter's gradient, to tell whether it is new: a backward pass creates another tensor."""
        params = self._of[optimizer].params
        return params[0].grad if params else None


def outputs_by_hand(output: Any) -> dict[str, Any]:
    """Return the output of a training step in manual optimization, as Lightning gives it to hooks.

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
    """Return the loss that a training step reports; None unless it is a single number.

    Example:
        >>> import torch
        >>> loss_by_hand(outputs_by_hand(torch.tensor([2.0])))
        tensor(2.)
    """
    loss = outputs.get("loss")
    return loss.reshape(()) if isinstance(loss, Tensor) and loss.numel() == 1 else None
