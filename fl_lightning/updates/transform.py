"""Transforms that compress updates, chains of transforms, and error feedback.

    client: x → T_1 → T_2 → … → bytes          server: bytes → … → T_2⁻¹ → T_1⁻¹ → x'

A transform maps payloads to payloads and has no state: the same payload and seed give the same result.
Client and server know the seed, so random draws are not sent.

Error feedback: a client keeps the error of a biased compression and adds it to its next update.

    p_t = x_t + e_t,   sent = T(p_t),   e_(t+1) = p_t - T(p_t),   e_0 = 0

so the sent updates add up to the true ones except for one memory: Σ T(p) = Σ x - e_(t+1).
Source: Seide et al. 2014; Karimireddy et al. 2019 (1901.09847), Algorithm 2.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self, final

import torch
from torch import Tensor

from fl_lightning.core.errors import ConfigurationError, Ranged
from fl_lightning.core.seeds import derive_seed
from fl_lightning.core.traits import Trait, Traits
from fl_lightning.updates.payload import Dense, Payload, Quantised, Sparse

Shapes = tuple[tuple[int, ...], ...]


_OF_STEPS = Traits(
    needs={
        Trait.SINGLE_UPDATES: "compresses each update in its own way, so that only decoded updates can be "
        "summed (coordinates chosen by value, different levels for every client)"
    },
    breaks={Trait.UNCHANGED_UPDATES: "changes updates afterwards"},
    instead={
        Trait.SINGLE_UPDATES: "leave it out (SecureMean has options of its own: random_k, levels, bits)",
        Trait.UNCHANGED_UPDATES: "leave updates out, or use CentralDP",
    },
)
_OF_TENSORS = Traits(
    needs={Trait.ONE_MASK: "works on whole tensors"},
    instead={Trait.ONE_MASK: "use TopK, or QSGD with a block of fixed size"},
)


class UpdateStep(Ranged, ABC):
    """Base of compressions and of error feedback, the entries of a federation's option `updates`."""

    # jsonargparse finds types of dataclasses only where `ClassVar`, used in bases, is a name of this module
    ranges: ClassVar[dict[str, str]] = {}

    @property
    @abstractmethod
    def parts(self) -> tuple[Transform, ...]:
        """Compressions that a client applies to its update, in order."""

    @property
    def traits(self) -> Traits:
        """Conditions on a round that the compression needs or breaks, to detect conflicting options."""
        is_of_tensors = any(part.needs_shapes for part in self.parts)
        return _OF_TENSORS | _OF_STEPS if is_of_tensors else _OF_STEPS


class Transform(UpdateStep):
    """A compression of updates that keeps no state; subclasses are frozen dataclasses.

    Attributes:
        name: name and options, e.g. ``"top-k 0.1"``, as sent in the message's header.

    Example:
        >>> import torch
        >>> class Halves(Transform):
        ...     name = "halves"
        ...     def on_client(self, payload, seed):
        ...         return Dense(payload.to_dense() / 2)
        ...     def on_server(self, payload, seed, size):
        ...         return Dense(payload.to_dense() * 2)
        >>> chain = Chain((Halves(),))
        >>> payload = chain.on_client(Dense(torch.tensor([1.0, 3.0])), seed=0)
        >>> payload.to_dense(), chain.on_server(payload, seed=0, size=2).to_dense()
        (tensor([0.5000, 1.5000]), tensor([1., 3.]))
    """

    @property
    def name(self) -> str:
        """Name of the transform with its options, as in the message's header."""
        return type(self).__name__

    @property
    def parts(self) -> tuple[Transform, ...]:
        """The transform itself, as a tuple of length 1."""
        return (self,)

    @property
    def needs_shapes(self) -> bool:
        """True if the transform handles each tensor separately, and so needs the tensors' shapes."""
        return False

    def with_shapes(self, shapes: Shapes) -> Self:
        """Return a copy for vectors in which tensors of these shapes are concatenated."""
        return self

    @property
    def remedy(self) -> str:
        """Advice to the user if compression errors grow without bound under error feedback; else empty."""
        return ""

    @property
    def approximates(self) -> bool:
        """True if the transform loses more than the rounding of each number, e.g. drops numbers."""
        return False

    def sent_size(self, size: int) -> int:
        """Return how many values the transform sends for ``size`` numbers."""
        return size

    @abstractmethod
    def on_client(self, payload: Payload, seed: int) -> Payload:
        """Compress a payload on the client.

        Args:
            payload: payload of an update.
            seed: seed of this update and transform.
        """

    def on_server(self, payload: Payload, seed: int, size: int) -> Payload:
        """Decompress a payload on the server, to ``size`` numbers; by default it is unchanged.

        Except in `PowerSGD` the result is linear in the values: if all clients have the same seed, it may
        be computed once from their sum.
        """
        return payload


@final
@dataclass(frozen=True)
class Chain(Transform):
    """Several transforms applied one after the other; an empty chain changes nothing.

    Args:
        transforms: transforms in the order in which the client applies them.

    Example:
        >>> import torch
        >>> from fl_lightning.updates.quantisers import Affine
        >>> from fl_lightning.updates.sparsifiers import TopK
        >>> chain = Chain((TopK(0.5), Affine(bits=8)))
        >>> payload = chain.on_client(Dense(torch.tensor([1.0, 0.0, 3.0, 0.5])), seed=0)
        >>> chain.on_server(payload, seed=0, size=4).to_dense()
        tensor([1., 0., 3., 0.])
        >>> chain.names
        ('top-k 0.5', 'affine 8 bits')
    """

    transforms: tuple[Transform, ...] = ()

    @property
    def name(self) -> str:
        """Names of all transforms, joined by commas."""
        return ", ".join(self.names)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the transforms in order, as in the message's header."""
        return tuple(step.name for step in self.transforms)

    @property
    def needs_shapes(self) -> bool:
        """True if one of the transforms needs the shapes of tensors."""
        return any(step.needs_shapes for step in self.transforms)

    def with_shapes(self, shapes: Shapes) -> Chain:
        """Return a copy for vectors in which tensors of these shapes are concatenated."""
        return Chain(tuple(step.with_shapes(shapes) for step in self.transforms))

    @property
    def remedy(self) -> str:
        """Advice of the first transform whose errors grow without bound under error feedback; else empty."""
        return next((step.remedy for step in self.transforms if step.remedy), "")

    @property
    def approximates(self) -> bool:
        """True if one of the transforms loses more than the rounding of each number, e.g. drops numbers."""
        return any(step.approximates for step in self.transforms)

    def sent_size(self, size: int) -> int:
        """Return how many values the chain sends for ``size`` numbers."""
        return self._sizes(size)[-1]

    def on_client(self, payload: Payload, seed: int) -> Payload:
        """Compress a payload on the client by all transforms in order."""
        for place, step in enumerate(self.transforms):
            payload = step.on_client(payload, _seed_of(step, seed, place))
        return payload

    def on_server(self, payload: Payload, seed: int, size: int) -> Payload:
        """Decompress a payload on the server by all transforms in reverse order."""
        sizes = self._sizes(size)
        for place, step in reversed(list(enumerate(self.transforms))):
            payload = step.on_server(payload, _seed_of(step, seed, place), size=sizes[place])
        return payload

    def _sizes(self, size: int) -> list[int]:
        sizes = [size]
        for step in self.transforms:
            sizes.append(step.sent_size(sizes[-1]))
        return sizes


def _seed_of(step: Transform, seed: int, place: int) -> int:
    return derive_seed(seed, step.name, place)


def with_memory(
    chain: Chain, update: Tensor, memory: Tensor | None, seed: int
) -> tuple[Payload, Tensor]:
    """Compress an update plus the client's memory (error feedback); return the payload and the new memory.

    Args:
        chain: transforms that compress.
        update: the update, shape (k,).
        memory: the client's memory from its last round, shape (k,), or None in its first.
        seed: seed of this update.

    Raises:
        ValueError: if the memory has another length.

    Example:
        >>> from fl_lightning.updates.sparsifiers import TopK
        >>> chain = Chain((TopK(0.5),))
        >>> payload, memory = with_memory(chain, torch.tensor([1.0, 3.0]), None, seed=0)
        >>> payload.to_dense(), memory
        (tensor([0., 3.]), tensor([1., 0.]))
        >>> payload, memory = with_memory(chain, torch.tensor([1.0, 1.0]), memory, seed=1)
        >>> payload.to_dense(), memory
        (tensor([2., 0.]), tensor([0., 1.]))
    """
    if memory is not None and memory.shape != update.shape:
        raise ValueError(
            f"the memory has shape {tuple(memory.shape)}, the update {tuple(update.shape)}: "
            "start a new memory when the mask changes"
        )
    wanted = update if memory is None else update + memory
    payload = chain.on_client(Dense(wanted), seed)
    arrived = chain.on_server(payload, seed, size=wanted.numel())
    return payload, torch.sub(wanted, arrived.to_dense())


def num_kept(size: int, fraction: float) -> int:
    """Return how many of ``size`` numbers a sparsifier keeps: fraction · size, rounded, at least 1."""
    return min(size, max(1, round(fraction * size)))


def only_dense(payload: Payload, name: str) -> Tensor:
    """Return the numbers of an uncompressed payload; raise ValueError for one that was compressed before."""
    if isinstance(payload, Dense) and not payload.is_half:
        return payload.to_dense()
    raise ValueError(
        f"{name} must get all numbers unrounded: put it before every other compression"
    )


def with_values(
    payload: Payload, quantise: Callable[[Tensor], Quantised], name: str
) -> Quantised | Sparse:
    """Quantise a payload's values, and keep any indices; raise ValueError if they are quantised already."""
    if isinstance(payload, Dense) and not payload.is_half:
        return quantise(payload.to_dense().float())
    if isinstance(payload, Sparse) and isinstance(payload.values, Dense) and not payload.is_half:
        return replace(payload, values=quantise(payload.values.to_dense().float()))
    raise ValueError(
        f"{name}: an earlier transform has quantised the numbers already: use one quantiser"
    )


_MEMORIES = Traits(
    breaks={
        Trait.PRIVATE_CLIENTS: "stores sums over a client's examples from round to round, which no noise "
        "covers"
    },
    instead={
        Trait.PRIVATE_CLIENTS: "if these sums stay with the clients, set its under_privacy to true, else use "
        "QSGD or RandomK without ErrorFeedback"
    },
)


@final
@dataclass(frozen=True)
class ErrorFeedback(UpdateStep):
    """Error feedback: a client adds the compression error of its last update to its next update.

    The error (the residual) is stored in `ClientMemory` from round to round.

    Args:
        transforms: transforms that compress, in the order in which the client applies them.
        under_privacy: allow it with `federation.privacy`. Sent updates are clipped and accounted for as
            without it. The residuals depend on the clients' data and have no noise: they must stay with
            the clients, and checkpoints of a simulation contain them.

    Raises:
        ConfigurationError: for a `RandomK` that scales, and a `QSGD` of one bit or by the l2 norm of large
            blocks. Their error may be larger than the update, so that residuals would grow without bound.
    """

    transforms: Sequence[Transform]
    under_privacy: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.transforms:
            raise ConfigurationError(
                "ErrorFeedback: transforms must be a list of one transform or more, got []: without any there is "
                "no error"
            )
        for part in self.parts:
            if part.remedy:
                raise ConfigurationError(
                    f"ErrorFeedback: error feedback around {part.name} diverges, because the error can be larger "
                    f"than the update: {part.remedy}"
                )

    @property
    def parts(self) -> tuple[Transform, ...]:
        """Transforms whose errors the client adds to its next update."""
        return tuple(self.transforms)

    @property
    def traits(self) -> Traits:
        """Conditions on a round that error feedback needs or breaks, e.g. client-level privacy."""
        return super().traits if self.under_privacy else super().traits | _MEMORIES
