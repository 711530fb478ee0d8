"""Squared gradients of single examples, summed over examples.

    Σ_i Σ_s w_is (∂ q(x_i)[y_is] / ∂θ_j)²        for every entry j

where q is the scored quantity, and an estimator chooses labels y and weights w. Squares are taken
before anything is averaged: squaring a mean gradient estimates something else.

Many examples at once through `torch.func` (vmap over examples, in chunks that fit the memory
limit); one by one through plain autograd where vmap cannot run the module.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vjp

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.sparsity.examples import chunks, limited, map_batch
from fl_lightning.sparsity.mask import some
from fl_lightning.sparsity.scoring import (
    Scoring,
    Tensors,
    checked_parameters,
    scoring_mode,
    zero_sums,
)
from fl_lightning.sparsity.sensitivity import Scores

# (batch, its size) -> what an example's labels are chosen by, first axis over examples
Given = Callable[[Any, int], Tensor]
# (logits (C,), given) -> labels (S,) and weights (S,) of one example
Choose = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
_Pullback = Callable[[Tensor], Mapping[str, Tensor]]
_Linearise = Callable[
    [Callable[[Tensors], tuple[Tensor, Tensor]], Tensors], tuple[Tensor, _Pullback, Tensor]
]


def sum_of_squares(
    scoring: Scoring,
    module: nn.Module,
    batches: Iterable[Any],
    parameters: Mapping[str, Tensor] | None,
    given: Given,
    choose: Choose,
) -> Scores:
    """Return the scores of an estimator that chooses labels and weights example by example.

    Raises:
        ConfigurationError: if there are no examples, or a score is not finite.
    """
    values = checked_parameters(module, parameters)
    device = next(iter(values.values())).device
    num_examples = 0
    with scoring_mode(module):
        squares = _Squares(scoring, module, values, choose)
        for batch, size in limited(batches, scoring.max_examples, device):
            squares.add((batch, given(batch, size).to(device)))
            num_examples += size
    check_scores(squares.sums, num_examples)
    return Scores(squares.sums, num_examples)


def check_scores(sums: Mapping[str, Tensor], num_examples: int) -> None:
    """Refuse scores of nothing, and those that overflowed."""
    if not num_examples:
        raise ConfigurationError(
            "no examples to score: batches are empty, or an iterator that was already used up"
        )
    if broken := [name for name, total in sums.items() if not bool(total.isfinite().all())]:
        raise ConfigurationError(
            f"scores are not finite in {some(broken)}: the model's output is not, or gradients "
            "overflow in half precision (score in float32 or bfloat16)"
        )


class _Squares:
    """Accumulates over batches."""

    def __init__(
        self, scoring: Scoring, module: nn.Module, values: Tensors, choose: Choose
    ) -> None:
        self.sums = zero_sums(values)
        self._score = scoring.of_values(module)
        self._values, self._choose = values, choose
        bytes_per_example = sum(
            p.numel() * (p.element_size() + self.sums[name].element_size())
            for name, p in values.items()
        )
        self._chunk = scoring.memory_limit // bytes_per_example
        self._vectorize = scoring.vectorize and self._chunk > 1

    def add(self, examples: tuple[Any, Tensor]) -> None:
        """Add a batch of examples with what is given of them."""
        if not self._vectorize:
            self._one_by_one(examples)
            return
        for chunk in chunks(examples, self._chunk):
            if self._vectorize:
                self._try_at_once(chunk)
            else:
                self._one_by_one(chunk)

    def _try_at_once(self, examples: tuple[Any, Tensor]) -> None:
        try:
            with torch.no_grad():
                squares = torch.vmap(self._of_one, in_dims=(None, None, 0))(
                    _by_vjp, self._values, examples
                )
        except ConfigurationError:
            raise
        except Exception as error:  # whatever the module does that vmap cannot
            self._vectorize = False
            self._one_by_one(examples)  # a fault of the module's own shows here again
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            warnings.warn(
                f"sensitivity is computed example by example, slowly, because {reason}",
                stacklevel=2,
            )
            return
        for name, square in squares.items():
            self.sums[name] += square.sum(dim=0)

    def _one_by_one(self, examples: tuple[Any, Tensor]) -> None:
        for example in chunks(examples, 1):
            leaves = {name: value.requires_grad_() for name, value in self._fresh().items()}
            with torch.enable_grad():
                single = map_batch(lambda tensor: tensor[0], example)
                squares = self._of_one(_by_autograd, leaves, single)
            for name, square in squares.items():
                self.sums[name] += square

    def _fresh(self) -> dict[str, Tensor]:
        return {name: value.detach() for name, value in self._values.items()}

    def _of_one(
        self, linearise: _Linearise, values: Tensors, example: tuple[Any, Tensor]
    ) -> dict[str, Tensor]:
        """Return the weighted sum of squares of one example."""
        inputs, given = example
        batch = map_batch(lambda tensor: tensor.unsqueeze(0), inputs)

        def score(parameters: Tensors) -> tuple[Tensor, Tensor]:
            quantity, logits = self._score(parameters, batch)
            return quantity[0], logits[0].detach()

        quantity, pullback, logits = linearise(score, values)
        classes = torch.arange(len(logits), device=logits.device)
        labels, weights = self._choose(logits, given)
        total: dict[str, Tensor] = {}
        for label, weight in zip(labels.unbind(), weights.unbind(), strict=True):
            gradients = pullback((classes == label).to(quantity.dtype))
            for name, gradient in gradients.items():
                square = gradient.to(self.sums[name].dtype).square() * weight
                total[name] = total[name] + square if name in total else square
        return total


def _by_vjp(
    score: Callable[[Tensors], tuple[Tensor, Tensor]], values: Tensors
) -> tuple[Tensor, _Pullback, Tensor]:
    quantity, pullback, logits = vjp(score, dict(values), has_aux=True)
    return quantity, lambda cotangent: pullback(cotangent)[0], logits


def _by_autograd(
    score: Callable[[Tensors], tuple[Tensor, Tensor]], values: Tensors
) -> tuple[Tensor, _Pullback, Tensor]:
    quantity, logits = score(values)
    leaves = list(values.values())

    def pullback(cotangent: Tensor) -> Mapping[str, Tensor]:
        gradients = torch.autograd.grad(
            quantity, leaves, cotangent, retain_graph=True, materialize_grads=True
        )
        return dict(zip(values, gradients, strict=True))

    return quantity, pullback, logits
