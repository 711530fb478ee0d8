"""What may happen to an update on its way, and how several such steps compose.

    client: x → T_1 → T_2 → … → bytes          server: bytes → … → T_2⁻¹ → T_1⁻¹ → x'

A transform maps payloads to payloads and keeps nothing: the same payload and seed give the same
result. Both sides know the seed, so that what is drawn need not be sent.

Error feedback: what a biased compression leaves out is kept and sent later.

    p_t = x_t + e_t,   sent = T(p_t),   e_(t+1) = p_t - T(p_t),   e_0 = 0

so that what was sent by round t adds up to what there was to send, less one memory:
Σ T(p) = Σ x - e_(t+1). Source: Seide et al. 2014; Karimireddy et al. 2019 (1901.09847), Algorithm 2.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Self, final

import torch
from torch import Tensor

from fl_lightning.core.errors import ConfigurationError, check_range
from fl_lightning.core.seeds import derive_seed
from fl_lightning.core.traits import Trait, Traits
from fl_lightning.updates.payload import Dense, Payload, Quantised, Sparse

Shapes = tuple[tuple[int, ...], ...]


_OF_STEPS = Traits(
    needs={
        Trait.SINGLE_UPDATES: "makes something of each update that does not add up (coordinates chosen by "
        "value, other levels for every client)"
    },
    breaks={Trait.UNCHANGED_UPDATES: "changes them after that"},
    instead={
        Trait.SINGLE_UPDATES: "leave it out (SecureMean has options of its own: random_k, levels, bits)",
        Trait.UNCHANGED_UPDATES: "leave updates out, or use CentralDP",
    },
)
_OF_TENSORS = Traits(
    needs={Trait.ONE_MASK: "works on whole tensors"},
    instead={Trait.ONE_MASK: "use TopK, or QSGD with a block of fixed size"},
)


class UpdateStep(ABC):
    """Base of the transforms in a federation's `updates`."""

    @property
    @abstractmethod
    def parts(self) -> tuple[Transform, ...]:
        """Transforms that a client applies, in order."""

    @property
    def traits(self) -> Traits:
        """Traits of the step."""
        is_of_tensors = any(part.needs_shapes for part in self.parts)
        return _OF_TENSORS | _OF_STEPS if is_of_tensors else _OF_STEPS


class Transform(UpdateStep):
    """One step that keeps nothing; leaves are frozen dataclasses.

    Attributes:
        name: what it is and with which options, e.g. ``"top-k 0.1"``. It travels in the header.

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
        """Name and options, as in the message's header."""
        return type(self).__name__

    @property
    def parts(self) -> tuple[Transform, ...]:
        """The transform itself, alone."""
        return (self,)

    @property
    def needs_shapes(self) -> bool:
        """True if the transform needs the shapes of tensors, because it does not act on one vector."""
        return False

    def with_shapes(self, shapes: Shapes) -> Self:
        """Return the transform for vectors that such tensors make, one after the other."""
        return self

    @property
    def scaling(self) -> Transform | None:
        """Option that makes numbers larger, with which error feedback diverges; None if there is none."""
        return None

    @property
    def approximates(self) -> bool:
        """True if the transform loses more than rounding each number does."""
        return False

    def sent_size(self, size: int) -> int:
        """Number of values that the payload of ``size`` numbers stands for."""
        return size

    @abstractmethod
    def on_client(self, payload: Payload, seed: int) -> Payload:
        """Payload that is sent instead of ``payload``.

        Args:
            payload: of ``size`` numbers.
            seed: of this update and this step.
        """

    def on_server(self, payload: Payload, seed: int, size: int) -> Payload:
        """Payload that the server reads from an arrived one, of ``size`` numbers again.

        It is linear in the numbers, but of `PowerSGD`: where all clients have the same seed, it may
        be applied once to their sum instead of to each. By default a payload says itself what its
        numbers are.
        """
        return payload


@final
@dataclass(frozen=True)
class Chain(Transform):
    """Several transforms, one after the other; none is the identity.

    Args:
        transforms: in the order in which the client applies them.

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
        """The names in order, as the header has them."""
        return tuple(step.name for step in self.transforms)

    @property
    def needs_shapes(self) -> bool:
        """True if one of the transforms needs the shapes of tensors."""
        return any(step.needs_shapes for step in self.transforms)

    def with_shapes(self, shapes: Shapes) -> Chain:
        """Return the chain for vectors of these tensors."""
        return Chain(tuple(step.with_shapes(shapes) for step in self.transforms))

    @property
    def scaling(self) -> Transform | None:
        """The first that does."""
        return next((step.scaling for step in self.transforms if step.scaling is not None), None)

    @property
    def approximates(self) -> bool:
        """True if one of the transforms approximates."""
        return any(step.approximates for step in self.transforms)

    def sent_size(self, size: int) -> int:
        """Number of values that the payload stands for."""
        return self._sizes(size)[-1]

    def on_client(self, payload: Payload, seed: int) -> Payload:
        """Apply all in order."""
        for place, step in enumerate(self.transforms):
            payload = step.on_client(payload, _seed_of(step, seed, place))
        return payload

    def on_server(self, payload: Payload, seed: int, size: int) -> Payload:
        """Undo all in reverse order."""
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
    """Payload with error feedback, and the client's memory for its next round.

    Args:
        chain: what compresses.
        update: shape (k,).
        memory: what this client got from its last round, shape (k,); None if it is its first.
        seed: of this update.

    Raises:
        ValueError: if the memory is of another length.

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


def checked_fraction(fraction: float) -> None:
    """Raise ConfigurationError if ``fraction`` is not one of something to keep."""
    check_range("fraction", fraction, "in (0, 1]", ": it is the share of numbers that is sent")


def num_kept(size: int, fraction: float) -> int:
    """Number of values kept of ``size``: at least one, if there is one."""
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


_MEMORIES = Traits(
    breaks={
        Trait.PRIVATE_CLIENTS: "has clients remember what their examples add up to over rounds, which no "
        "noise covers"
    },
    instead={
        Trait.PRIVATE_CLIENTS: "if these memories stay with the clients, set its under_privacy to true, else "
        "use QSGD or RandomK, which need none"
    },
)


@final
@dataclass(frozen=True)
class ErrorFeedback(UpdateStep):
    """Keeps at the client what transforms leave out, for its next update, see `with_memory`.

    Args:
        transforms: what compresses, in the order in which the client applies them.
        under_privacy: whether it may be used with `federation.privacy`. What clients send is clipped
            and accounted for as ever; what they remember is their data without noise, which must
            stay with them, and which checkpoints of a simulation hold.

    Raises:
        ConfigurationError: if it holds a `RandomK` that scales: its error may be larger than what it was
            given, and the memory would grow without bound.
    """

    transforms: Sequence[Transform]
    under_privacy: bool = False

    def __post_init__(self) -> None:
        if not self.transforms:
            raise ConfigurationError(
                "ErrorFeedback: transforms must hold at least one, got []: without any nothing is left out"
            )
        if scaling := Chain(self.parts).scaling:
            raise ConfigurationError(
                f"error feedback around {scaling.name} diverges, because it scales what it keeps: "
                "set unbiased: false"
            )

    @property
    def parts(self) -> tuple[Transform, ...]:
        """The transforms of the chain."""
        return tuple(self.transforms)

    @property
    def traits(self) -> Traits:
        """Those of a step; no noise covers memories, unless the user says that they stay with the clients."""
        return super().traits if self.under_privacy else super().traits | _MEMORIES
