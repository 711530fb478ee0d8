"""What one party tells another in one round: a payload and what it is about.

Up goes a client's update, down the global model. Both say of which space (and mask) and of which
round they are; the receiver knows what it waits for and refuses everything else.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from fl_lightning.core.update import ClientUpdate
from fl_lightning.updates.payload import Dense, Payload

MessageKind = Literal["update", "model"]
LARGEST_NUMBER = 2**63 - 1


@dataclass(frozen=True, eq=False)
class Message:
    """An update on its way up, or a model on its way down.

    Args:
        kind: which of the two.
        space: fingerprint of the space and its mask, 32 hexadecimal digits.
        round_index: the round, ≥ 0.
        client_id: from whom, or to whom, ≥ 0.
        params: the delta, or the model's parameters.
        buffers: floating-point buffers.
        num_examples: the aggregation weight; ≥ 1 of an update, 0 of a model.
        num_steps: local steps taken; 0 of a model.
        metrics: by name. A metric may be NaN or infinite, unlike everything else: it is only shown.
        transforms: what has been done to the delta, in order.

    Raises:
        ValueError: if a field is outside its range.
    """

    kind: MessageKind
    space: str
    round_index: int
    client_id: int
    params: Payload
    buffers: Payload
    num_examples: int = 0
    num_steps: int = 0
    metrics: Mapping[str, Tensor | float] = field(default_factory=dict)
    transforms: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not re.fullmatch("[0-9a-f]{32}", self.space):
            raise ValueError(f"space must be 32 hexadecimal digits, got {self.space!r}")
        for name in ("round_index", "client_id", "num_examples", "num_steps"):
            if not 0 <= getattr(self, name) <= LARGEST_NUMBER:
                raise ValueError(f"{name} must be from 0 to 2^63 - 1, got {getattr(self, name)}")
        if self.kind == "update" and not self.num_examples:
            raise ValueError("num_examples of an update must be at least 1, got 0")
        if self.kind == "model" and (self.num_examples or self.num_steps):
            raise ValueError("num_examples and num_steps of a model must be 0")
        _check_names("metrics", tuple(self.metrics), at_most=2**16 - 1)
        _check_names("transforms", self.transforms, at_most=2**8 - 1)

    @classmethod
    def of_update(
        cls,
        update: ClientUpdate,
        *,
        space: str,
        round_index: int,
        params: Payload | None = None,
        transforms: tuple[str, ...] = (),
    ) -> Message:
        """Return the message that carries a client's update.

        Args:
            update: what the client has.
            space: fingerprint of the space and its mask.
            round_index: the round.
            params: what ``transforms`` made of the delta; the delta as it is if None.
            transforms: their names, in order.
        """
        return cls(
            kind="update",
            space=space,
            round_index=round_index,
            client_id=update.client_id,
            params=Dense(update.delta) if params is None else params,
            buffers=Dense(update.buffers),
            num_examples=update.num_examples,
            num_steps=update.num_steps,
            metrics=update.metrics,
            transforms=transforms,
        )

    def to_update(self) -> ClientUpdate:
        """Return the update, its delta dense.

        Raises:
            ValueError: if this is a model.
        """
        if self.kind != "update":
            raise ValueError("the message holds a model, not an update")
        return ClientUpdate(
            self.client_id,
            self.params.to_dense(),
            self.buffers.to_dense(),
            self.num_examples,
            self.num_steps,
            {n: torch.as_tensor(v, dtype=torch.float64) for n, v in self.metrics.items()},
        )


def _check_names(what: str, names: tuple[str, ...], at_most: int) -> None:
    if len(names) > at_most:
        raise ValueError(f"at most {at_most} {what} can be sent, got {len(names)}")
    for name in names:
        if len(name.encode()) >= 2**16:
            raise ValueError(f"names of {what} must be below 65536 bytes, got {name[:50]}…")


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """What the receiver of a message knows beforehand; a message that differs is refused.

    Attributes:
        kind: whether an update or a model is waited for.
        space: fingerprint of the space and its mask.
        round_index: the round.
        num_params: numbers that the params' payload stands for: `Chain.sent_size` of k, which is k
            itself for all transforms but `RandomK`.
        num_buffers: of the floating-point buffers.
        transforms: what is done to a delta, in order.
    """

    kind: MessageKind
    space: str
    round_index: int
    num_params: int
    num_buffers: int = 0
    transforms: tuple[str, ...] = ()
