"""Squared gradients of single examples, summed over examples.

    Σ_i Σ_s w_is (∂ q(x_i)[y_is] / ∂θ_j)²        for every entry j

where q is the scored quantity, and an estimator chooses labels y and weights w. Gradients are squared
before they are averaged: the square of a mean gradient estimates something else.

Examples are scored together by `torch.func` (vmap over examples, in chunks that fit the memory limit), or one
by one by autograd if vmap cannot run the module.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vjp

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.sparsity.masks.mask import some
from fl_lightning.sparsity.sensitivity.protocol import Scores
from fl_lightning.sparsity.sensitivity.scoring import (
    Scoring,
    Tensors,
    checked_parameters,
    chunks,
    limited,
    map_batch,
    scoring_mode,
    zero_sums,
)

# (batch, its size) -> inputs of the choice of labels, first axis over examples
Given = Callable[[Any, int], Tensor]
# (logits (C,), given) -> labels (S,) and weights (S,) of one example
Choose = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
_Pullback = Callable[[Tensor], Sequence[Tensor]]
_Linearise = Callable[
    [Callable[[Tensors], tuple[Tensor, Tensor]], Tensors], tuple[Tensor, _Pullback, Tensor]
]


class Estimator(ABC):
    """Base class of sensitivity estimators that score batch by batch and add the scores; see `Sensitivity`."""

    scoring: Scoring = Scoring()

    def __call__(
        self,
        module: nn.Module,
        batches: Iterable[Any],
        *,
        parameters: Mapping[str, Tensor] | None = None,
        seed: int = 0,
    ) -> Scores:
        """Return the scores; see `Sensitivity`."""
        values = checked_parameters(module, parameters)
        sums, num_examples = zero_sums(values), 0
        device = next(iter(values.values())).device
        with scoring_mode(module):
            add = self._added_to(sums, module, values, seed)
            for batch, size in limited(batches, self.scoring.max_examples, device):
                add(batch, size)
                num_examples += size
        if not num_examples:
            raise ConfigurationError(
                "there are no examples to score: batches are empty, or an iterator that was read before: give a "
                "loader or a list"
            )
        if broken := [name for name, total in sums.items() if not bool(total.isfinite().all())]:
            raise ConfigurationError(
                f"scores of {some(broken)} are not finite: the output of the model is not, or gradients overflow in "
                "half precision: score in float32 or bfloat16"
            )
        return Scores(sums, num_examples)

    @abstractmethod
    def _added_to(
        self, sums: dict[str, Tensor], module: nn.Module, values: Tensors, seed: int
    ) -> Callable[[Any, int], None]:
        """Return a function of (batch, size) that adds the batch's scores to ``sums``."""


class SquaredGradients(Estimator):
    """Base class of estimators that add squared per-example gradients; subclasses choose the labels.

    Subclasses are frozen dataclasses.

    Attributes:
        scoring: quantity to score, number of examples, memory; an option of subclasses that declare it
            as a field.

    Example:
        >>> class First(SquaredGradients):
        ...     def choose(self, logits, given):
        ...         return torch.tensor([0]), torch.ones(1)
        >>> module, batches = nn.Linear(1, 2, bias=False), [torch.ones(1, 1)]
        >>> _ = nn.init.zeros_(module.weight)
        >>> First()(module, batches).mean()["weight"]  # (1 - p)² and p²
        tensor([[0.2500],
                [0.2500]])
    """

    def given(self, seed: int) -> Given:
        """Return a function of (batch, size) that makes ``given``, the input of `choose`, for each example.

        The function is called in the order of the batches. By default its results are empty.
        """
        return lambda _, size: torch.empty(size, 0)

    @abstractmethod
    def choose(self, logits: Tensor, given: Tensor) -> tuple[Tensor, Tensor]:
        """Return the labels for which to score one example, shape (S,), and their weights ≥ 0, shape (S,).

        It runs under `torch.vmap`: no ``if`` on values, and shapes that do not depend on values.

        Args:
            logits: logits of the example, shape (classes,).
            given: the result of the function `given` for this example.
        """

    def _added_to(
        self, sums: dict[str, Tensor], module: nn.Module, values: Tensors, seed: int
    ) -> Callable[[Any, int], None]:
        given, squares = self.given(seed), _Squares(self.scoring, module, values, self.choose, sums)
        device = next(iter(values.values())).device
        return lambda batch, size: squares.add((batch, given(batch, size).to(device)))


class _Squares:
    """Adds up squared per-example gradients over batches, by vmap if memory and module allow it."""

    def __init__(
        self,
        scoring: Scoring,
        module: nn.Module,
        values: Tensors,
        choose: Choose,
        sums: dict[str, Tensor],
    ) -> None:
        self._sums = sums
        self._score = scoring.of_values(module)
        self._values, self._choose = values, choose
        bytes_per_example = sum(
            p.numel() * (p.element_size() + self._sums[name].element_size())
            for name, p in values.items()
        )
        self._chunk = scoring.memory_on(next(iter(values.values())).device) // bytes_per_example
        self._vectorizes = self._chunk > 1

    def add(self, examples: tuple[Any, Tensor]) -> None:
        """Add the squared gradients of a batch's examples; ``examples`` is the batch and its inputs of `choose`."""
        for chunk in chunks(examples, max(1, self._chunk)):
            if self._vectorizes:
                self._try_at_once(chunk)
            else:
                self._one_by_one(chunk)

    def _try_at_once(self, examples: tuple[Any, Tensor]) -> None:
        try:
            with torch.no_grad():
                squares = torch.vmap(self._of_one, in_dims=(None, 0))(self._values, examples)
        except ConfigurationError:
            raise
        except Exception as error:  # noqa: BLE001 - anything that vmap cannot run
            self._vectorizes = False
            self._one_by_one(examples)  # an error of the module itself is raised here again
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            warnings.warn(
                f"sensitivity is computed example by example, which is slow, because vmap cannot run the module: {reason}",
                stacklevel=2,
            )
            return
        for total, square in zip(self._sums.values(), squares, strict=True):
            total += square.sum(dim=0)

    def _one_by_one(self, examples: tuple[Any, Tensor]) -> None:
        leaves = {name: value.detach().requires_grad_() for name, value in self._values.items()}
        sums = list(self._sums.values())
        for example in chunks(examples, 1):
            single = map_batch(lambda tensor: tensor[0], example)
            with torch.enable_grad():
                for gradients in self._gradients(_by_autograd, leaves, single):
                    torch._foreach_addcmul_(sums, gradients, gradients)

    def _of_one(self, values: Tensors, example: tuple[Any, Tensor]) -> list[Tensor]:
        """Return one example's squared gradients, summed over its labels with their weights."""
        first, *others = self._gradients(_by_vjp, values, example)
        total = [gradient.square() for gradient in first]
        for gradients in others:
            total = [old + new.square() for old, new in zip(total, gradients, strict=True)]
        return total

    def _gradients(
        self, linearise: _Linearise, values: Tensors, example: tuple[Any, Tensor]
    ) -> Iterator[list[Tensor]]:
        """Yield one example's gradient for each of its labels, times the square root of the label's weight."""
        inputs, given = example
        batch = map_batch(lambda tensor: tensor.unsqueeze(0), inputs)

        def score(parameters: Tensors) -> tuple[Tensor, Tensor]:
            quantity, logits = self._score(parameters, batch)
            return quantity[0], logits[0].detach()

        quantity, pullback, logits = linearise(score, values)
        classes = torch.arange(len(logits), device=logits.device)
        labels, weights = self._choose(logits, given)
        for label, weight in zip(labels.unbind(), weights.sqrt().unbind(), strict=True):
            gradients = pullback((classes == label) * weight.to(quantity.dtype))
            yield [
                gradient.to(total.dtype)
                for gradient, total in zip(gradients, self._sums.values(), strict=True)
            ]


def _by_vjp(
    score: Callable[[Tensors], tuple[Tensor, Tensor]], values: Tensors
) -> tuple[Tensor, _Pullback, Tensor]:
    quantity, pullback, logits = vjp(score, dict(values), has_aux=True)  # type: ignore[misc]
    return quantity, lambda cotangent: list(pullback(cotangent)[0].values()), logits


def _by_autograd(
    score: Callable[[Tensors], tuple[Tensor, Tensor]], values: Tensors
) -> tuple[Tensor, _Pullback, Tensor]:
    quantity, logits = score(values)
    leaves = list(values.values())

    def pullback(cotangent: Tensor) -> Sequence[Tensor]:
        return torch.autograd.grad(
            quantity, leaves, cotangent, retain_graph=True, materialize_grads=True
        )

    return quantity, pullback, logits
