"""What may happen to an update on its way, and how several such steps compose.

    client: x → T_1 → T_2 → … → bytes          server: bytes → … → T_2⁻¹ → T_1⁻¹ → x'

A transform maps payloads to payloads and keeps nothing: the same payload and seed give the same
result. Both sides know the seed, so that what is drawn need not be sent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

from torch import Tensor

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.seeds import derive_seed
from fl_lightning.updates.payload import Dense, Payload, Quantised, Sparse

Shapes = tuple[tuple[int, ...], ...]


class UpdateTransform(Protocol):
    """One step; implementations are frozen dataclasses.

    Attributes:
        name: what it is and with which options, e.g. ``"top-k 0.1"``. It travels in the header.
    """

    @property
    def name(self) -> str:
        """What it is and with which options."""

    def sent_size(self, size: int) -> int:
        """Return how many numbers the payload stands for that is made of ``size`` numbers."""

    def on_client(self, payload: Payload, seed: int) -> Payload:
        """Return what is sent instead of ``payload``.

        Args:
            payload: of ``size`` numbers.
            seed: of this update and this step.
        """

    def on_server(self, payload: Payload, seed: int, size: int) -> Payload:
        """Return what the server takes a payload for that arrived, of ``size`` numbers again.

        It is linear in the numbers, but of `PowerSGD`: where all clients have the same seed, it may
        be applied once to their sum instead of to each.
        """


@runtime_checkable
class NeedsShapes(Protocol):
    """A transform that may look at tensors, and not at one vector.

    Attributes:
        needs_shapes: whether it does, so that it must be told their shapes.
    """

    @property
    def needs_shapes(self) -> bool:
        """Whether it must be told the tensors' shapes."""

    def with_shapes(self, shapes: Shapes) -> UpdateTransform:
        """Return the transform for vectors that such tensors make, one after the other."""


def placed(transform: UpdateTransform, shapes: Shapes) -> UpdateTransform:
    """Return the transform for vectors of these tensors; most do not care."""
    return transform.with_shapes(shapes) if needs_shapes(transform) else transform  # type: ignore[attr-defined]


def needs_shapes(step: object) -> bool:
    """Return whether a step looks at tensors."""
    return isinstance(step, NeedsShapes) and step.needs_shapes


@dataclass(frozen=True)
class Chain:
    """Several transforms, one after the other; none is the identity.

    Args:
        transforms: in the order in which the client applies them.

    Example:
        >>> import torch
        >>> from fl_lightning.updates.affine import Affine
        >>> from fl_lightning.updates.top_k import TopK
        >>> chain = Chain((TopK(0.5), Affine(bits=8)))
        >>> payload = chain.on_client(Dense(torch.tensor([1.0, 0.0, 3.0, 0.5])), seed=0)
        >>> chain.on_server(payload, seed=0, size=4).to_dense()
        tensor([1., 0., 3., 0.])
        >>> chain.names
        ('top-k 0.5', 'affine 8 bits')
    """

    transforms: tuple[UpdateTransform, ...] = ()

    @property
    def name(self) -> str:
        """All names."""
        return ", ".join(self.names)

    @property
    def names(self) -> tuple[str, ...]:
        """The names in order, as the header has them."""
        return tuple(transform.name for transform in self.transforms)

    @property
    def needs_shapes(self) -> bool:
        """Whether one of them looks at tensors."""
        return any(map(needs_shapes, self.transforms))

    def with_shapes(self, shapes: Shapes) -> Chain:
        """Return the chain for vectors of these tensors."""
        return Chain(tuple(placed(transform, shapes) for transform in self.transforms))

    def sent_size(self, size: int) -> int:
        """Return how many numbers the payload stands for."""
        return self._sizes(size)[-1]

    def on_client(self, payload: Payload, seed: int) -> Payload:
        """Apply all in order."""
        for place, transform in enumerate(self.transforms):
            payload = transform.on_client(payload, _seed_of(transform, seed, place))
        return payload

    def on_server(self, payload: Payload, seed: int, size: int) -> Payload:
        """Undo all in reverse order."""
        sizes = self._sizes(size)
        for place, transform in reversed(list(enumerate(self.transforms))):
            payload = transform.on_server(
                payload, _seed_of(transform, seed, place), size=sizes[place]
            )
        return payload

    def _sizes(self, size: int) -> list[int]:
        sizes = [size]
        for transform in self.transforms:
            sizes.append(transform.sent_size(sizes[-1]))
        return sizes


def _seed_of(transform: UpdateTransform, seed: int, place: int) -> int:
    return derive_seed(seed, transform.name, place)


def checked_fraction(fraction: float) -> None:
    """Raise ConfigurationError if ``fraction`` is not one of something to keep."""
    if not 0 < fraction <= 1:
        raise ConfigurationError(
            f"fraction must be in (0, 1], got {fraction}: it is the share of numbers that is sent"
        )


def num_kept(size: int, fraction: float) -> int:
    """Return how many of ``size`` numbers are kept: at least one, if there is one."""
    return min(size, max(1, round(fraction * size)))


def only_dense(payload: Payload, name: str) -> Tensor:
    """Return a dense payload's numbers.

    Raises:
        ValueError: if it has gone through a transform that chooses or rounds.
    """
    if isinstance(payload, Dense) and not payload.is_half:
        return payload.to_dense()
    raise ValueError(f"{name} chooses among all numbers: put it before every other compression")


def with_values(
    payload: Payload, quantise: Callable[[Tensor], Quantised], name: str
) -> Quantised | Sparse:
    """Return the payload with its numbers quantised; of a sparse one those that it holds.

    Raises:
        ValueError: if they are quantised already.
    """
    if isinstance(payload, Dense) and not payload.is_half:
        return quantise(payload.to_dense().float())
    if isinstance(payload, Sparse) and isinstance(payload.values, Dense) and not payload.is_half:
        return replace(payload, values=quantise(payload.values.to_dense().float()))
    raise ValueError(f"{name}: the numbers are quantised already, quantise once")
