"""Clients' personal models, one at a time in the module, to be evaluated."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn

from fl_lightning.client.memory import ClientMemory
from fl_lightning.core.space import Space

# Under which names clients remember what they have for themselves.
MEMORY = "personal"
MIXTURE = "mixture"


class PersonalModels:
    """Puts personal models into a module that holds the global one.

    Args:
        module: on its device.
        names: of the tensors that clients have for themselves.
        memory: where these are; a client that never took part has the global ones.
        tune: fine-tunes the module for a client, in place; None for not.

    Example:
        >>> module, memory = nn.Linear(1, 1), ClientMemory()
        >>> memory.put(MEMORY, 3, torch.tensor([7.0]))
        >>> memory.commit()
        >>> with PersonalModels(module, ["bias"], memory).of(3):
        ...     module.bias.tolist()
        [7.0]
        >>> module.bias.tolist() == [7.0]
        False
    """

    def __init__(
        self,
        module: nn.Module,
        names: Sequence[str],
        memory: ClientMemory,
        tune: Callable[[int], None] | None = None,
    ) -> None:
        tensors = dict(module.named_parameters()) | dict(module.named_buffers())
        self._own = Space({name: tensors[name] for name in names})
        self._changing = [tensors[name] for name in names] if tune is None else [*tensors.values()]
        self._memory, self._tune = memory, tune

    @contextmanager
    def of(self, client: int) -> Iterator[None]:
        """Loads a client's model into the module inside this block."""
        before = [tensor.detach().clone() for tensor in self._changing]
        try:
            own = self._memory.get(MEMORY, client)
            if own is not None:
                self._own.write(self._mixed(client, own.to(self._own.device)))
            if self._tune is not None:
                self._tune(client)
            yield
        finally:
            with torch.no_grad():
                for tensor, value in zip(self._changing, before, strict=True):
                    tensor.copy_(value)

    def _mixed(self, client: int, own: Tensor) -> Tensor:
        """Return a client's own tensors, mixed with the global ones if it has a mixture."""
        mixture = self._memory.get(MIXTURE, client)
        return own if mixture is None else torch.lerp(self._own.read(), own, float(mixture))


@runtime_checkable
class HasPersonalModels(Protocol):
    """A callback that may know personal models."""

    def personal_models(self, trainer: Trainer) -> PersonalModels | None:
        """Return them; None if clients have nothing for themselves."""

    def personal_state(self) -> dict[str, Any]:
        """Return what another process needs for `personal_models`; empty if nothing."""

    def take_personal_state(self, state: dict[str, Any]) -> None:
        """Receive personal state after a fit in other processes."""


def personal_models(trainer: Trainer) -> PersonalModels | None:
    """Return the personal models that one of a Trainer's callbacks knows; None if there are none."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, HasPersonalModels):
            return callback.personal_models(trainer)
    return None
