"""Error feedback: what a biased compression leaves out is kept and sent later.

    p_t = x_t + e_t,   sent = T(p_t),   e_(t+1) = p_t - T(p_t),   e_0 = 0

so that what was sent by round t adds up to what there was to send, less one memory:
Σ T(p) = Σ x - e_(t+1). Source: Seide et al. 2014; Karimireddy et al. 2019 (1901.09847), Algorithm 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import final

import torch
from torch import Tensor

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.traits import Trait, Traits
from fl_lightning.updates.payload import Dense, Payload
from fl_lightning.updates.transform import (
    Chain,
    Shapes,
    Transform,
    UpdateStep,
)

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
    """Wraps transforms; the client's memory is given and returned.

    Args:
        transforms: what compresses, in the order in which the client applies them.
        under_privacy: whether it may be used with `federation.privacy`. What clients send is clipped
            and accounted for as ever; what they remember is their data without noise, which must
            stay with them, and which checkpoints of a simulation hold.

    Raises:
        ConfigurationError: if it holds a `RandomK` that scales: its error may be larger than what it was
            given, and the memory would grow without bound.

    Example:
        >>> from fl_lightning.updates.sparsifiers import TopK
        >>> feedback = ErrorFeedback([TopK(0.5)])
        >>> payload, memory = feedback.on_client(torch.tensor([1.0, 3.0]), None, seed=0)
        >>> payload.to_dense(), memory
        (tensor([0., 3.]), tensor([1., 0.]))
        >>> payload, memory = feedback.on_client(torch.tensor([1.0, 1.0]), memory, seed=1)
        >>> payload.to_dense(), memory
        (tensor([2., 0.]), tensor([0., 1.]))
    """

    transforms: Sequence[Transform]
    under_privacy: bool = False

    def __post_init__(self) -> None:
        if not self.transforms:
            raise ConfigurationError(
                "ErrorFeedback: transforms must hold at least one, got []: without any nothing is left out"
            )
        if scaling := self._chain.scaling:
            raise ConfigurationError(
                f"error feedback around {scaling.name} diverges, because it scales what it keeps: "
                "set unbiased: false"
            )

    @property
    def names(self) -> tuple[str, ...]:
        """Those of the transforms: how a memory came into the numbers need not be known."""
        return self._chain.names

    @property
    def parts(self) -> tuple[Transform, ...]:
        """The transforms."""
        return tuple(self.transforms)

    @property
    def traits(self) -> Traits:
        """Those of a step; no noise covers memories, unless the user says that they stay with the clients."""
        return super().traits if self.under_privacy else super().traits | _MEMORIES

    @property
    def needs_shapes(self) -> bool:
        """True if one of the transforms needs the shapes of tensors."""
        return self._chain.needs_shapes

    def with_shapes(self, shapes: Shapes) -> ErrorFeedback:
        """Return the same for vectors of these tensors."""
        return replace(self, transforms=self._chain.with_shapes(shapes).transforms)

    @cached_property
    def _chain(self) -> Chain:
        return Chain(tuple(self.transforms))

    def on_client(self, update: Tensor, memory: Tensor | None, seed: int) -> tuple[Payload, Tensor]:
        """Return what is sent, and the client's memory for its next round.

        Args:
            update: shape (k,).
            memory: what this client got from its last round, shape (k,); None if it is its first.
            seed: of this update.

        Raises:
            ValueError: if the memory is of another length.
        """
        if memory is not None and memory.shape != update.shape:
            raise ValueError(
                f"the memory has shape {tuple(memory.shape)}, the update {tuple(update.shape)}: "
                "start a new memory when the mask changes"
            )
        wanted = update if memory is None else update + memory
        payload = self._chain.on_client(Dense(wanted), seed)
        arrived = self.on_server(payload, seed, size=wanted.numel())
        return payload, torch.sub(wanted, arrived.to_dense())

    def sent_size(self, size: int) -> int:
        """Return how many numbers the payload of so many stands for."""
        return self._chain.sent_size(size)

    def on_server(self, payload: Payload, seed: int, size: int) -> Payload:
        """Return what the server takes a payload for, of ``size`` numbers."""
        return self._chain.on_server(payload, seed, size)
