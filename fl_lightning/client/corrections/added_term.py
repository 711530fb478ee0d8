"""A correction's term on the gradients of a module.

    ∇ ← ∇ + pull · (y - x) + shift

It is added before clipping and the optimizer's step, so it is treated as the gradient of a term in
the loss would be.
"""

from __future__ import annotations

import copy
from collections.abc import Collection

import torch
from torch import Tensor

from fl_lightning.client.corrections.correction import GradientTerm
from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.space import Space

# A parameter with frozen entries, its active entries, and x and the shift there.
Part = tuple[Tensor, Tensor, Tensor, Tensor | None]


class AddedTerm:
    """One client's term, laid out on the parameters that it trains.

    Args:
        space: of these parameters.
        start: the global model x, shape (k,).
        term: what to add.

    Example:
        >>> layer = torch.nn.Linear(2, 1, bias=False)
        >>> space = Space.of_parameters(layer)
        >>> added = AddedTerm(space, space.read() - 1, GradientTerm(0.5, torch.tensor([0.0, 3.0])))
        >>> added.add()
        >>> layer.weight.grad
        tensor([[0.5000, 3.5000]])
    """

    def __init__(self, space: Space, start: Tensor, term: GradientTerm) -> None:
        self._pull = term.pull
        shift = torch.zeros_like(start) if term.shift is None else term.shift
        self._whole: list[Tensor] = []
        self._starts: list[Tensor] = []
        self._shifts: list[Tensor] = []
        self._parts: list[Part] = []
        self._has_shift = term.shift is not None
        pairs = zip(space.entries(start), space.entries(shift), strict=True)
        for (param, index, before), (_, _, own) in pairs:
            # in half precision a client starts from the rounded values
            before, own = before.to(param.dtype), own.to(param.dtype)
            if index is not None:
                self._parts.append((param, index, before, own if self._has_shift else None))
                continue
            self._whole.append(param)
            self._starts.append(before)
            self._shifts.append(own)

    def of(self, params: Collection[Tensor]) -> AddedTerm:
        """Return the term on some of the parameters alone."""
        chosen, part = set(params), copy.copy(self)
        kept = [n for n, param in enumerate(self._whole) if param in chosen]
        part._whole = [self._whole[n] for n in kept]
        part._starts = [self._starts[n] for n in kept]
        part._shifts = [self._shifts[n] for n in kept]
        part._parts = [each for each in self._parts if each[0] in chosen]
        return part

    @property
    def params(self) -> list[Tensor]:
        """The parameters that it is added to."""
        return [*self._whole, *(param for param, *_ in self._parts)]

    @torch.no_grad()
    def add(self, scale: float = 1.0) -> None:
        """Add the term to the gradients; a parameter without one gets the term as its gradient.

        Args:
            scale: of the gradients that are there (`torch.amp.GradScaler`).

        Raises:
            ConfigurationError: if a gradient is sparse.
        """
        grads = [_gradient(param) for param in self._whole]
        if self._pull and grads:
            away = torch._foreach_sub(self._whole, self._starts)
            torch._foreach_add_(grads, away, alpha=self._pull * scale)
        if self._has_shift and grads:
            torch._foreach_add_(grads, self._shifts, alpha=scale)
        for param, index, before, shift in self._parts:
            term = (param.reshape(-1).index_select(0, index) - before) * (self._pull * scale)
            if shift is not None:
                term.add_(shift, alpha=scale)
            _gradient(param).put_(index, term, accumulate=True)

    @torch.no_grad()
    def value(self) -> Tensor:
        """Return the objective's term, pull/2 ‖y - x‖² + ⟨shift, y - x⟩, a scalar."""
        away = torch._foreach_sub(self._whole, self._starts)
        triples = list(zip(away, self._shifts, strict=True))
        for param, index, before, shift in self._parts:
            moved = param.reshape(-1).index_select(0, index) - before
            triples.append((moved, torch.zeros_like(moved) if shift is None else shift))
        if not triples:
            return torch.zeros(())
        values = [
            0.5 * self._pull * moved.square().sum() + (moved * shift).sum()
            for moved, shift in triples
        ]
        return torch.stack(values).sum()


def _gradient(param: Tensor) -> Tensor:
    if param.grad is None:
        param.grad = torch.zeros_like(param)
    elif param.grad.layout is not torch.strided:
        raise ConfigurationError(
            "federation.correction adds to every entry's gradient, and an embedding has sparse ones: "
            "give it sparse=False"
        )
    return param.grad
