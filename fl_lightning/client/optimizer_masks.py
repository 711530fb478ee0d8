"""Masks of the optimizers that a client's local steps use: which entries of parameters may move."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.sparsity.optimizers.masked_optimizer import MaskedOptimizer


class OptimizerMasks:
    """The masks of one or several optimizers of a module, taken together.

    Args:
        module: has the parameters' names.
        optimizers: over its parameters; those that have masks keep to them.
    """

    def __init__(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self._module, self._optimizers = module, optimizers
        self._masked = [each for each in optimizers if isinstance(each, MaskedOptimizer)]
        self._noted: list[Any] = []

    def set(self, masks: Mapping[str, Tensor]) -> None:
        """Give every optimizer the masks of its own parameters, by parameter name.

        Raises:
            ConfigurationError: if no optimizer has masks.
        """
        if not self._masked:
            raise ConfigurationError(
                f"masks need an optimizer that keeps to them, like SparseSGDM, the module has "
                f"{', '.join(type(each).__name__ for each in self._optimizers)}"
            )
        params = dict(self._module.named_parameters())
        given = {params[name]: mask.to(params[name].device) for name, mask in masks.items()}
        owned = [_parameters(each) for each in self._masked]
        owned[0] |= given.keys() - set().union(*owned)  # it refuses what belongs to none
        for optimizer, own in zip(self._masked, owned, strict=True):
            optimizer.set_masks({p: mask for p, mask in given.items() if p in own})

    def active(self) -> dict[Tensor, Tensor]:
        """Return which entries may move of parameters with frozen ones, as indices.

        Raises:
            ConfigurationError: if one optimizer would move what another one's mask freezes.
        """
        active = {p: indices for each in self._masked for p, indices in each.active.items()}
        for optimizer in self._optimizers if len(self._optimizers) > 1 else ():
            own = optimizer.active if isinstance(optimizer, MaskedOptimizer) else {}
            for param in _parameters(optimizer) & active.keys():
                if param not in own or not torch.equal(own[param], active[param]):
                    raise ConfigurationError(
                        "a mask freezes entries of a parameter that another optimizer of the module, "
                        f"{type(optimizer).__name__}, would move: give a masked parameter to one "
                        "optimizer alone"
                    )
        return active

    def note(self) -> None:
        """Note the present masks, for `are_new`."""
        self._noted = self._present()

    @property
    def are_new(self) -> bool:
        """True if masks were set since they were noted."""
        # a callback may have added a parameter group, which the next round's start tells of
        return bool(self._masked) and not all(map(is_, self._noted, self._present()))

    def _present(self) -> list[Any]:
        groups = (group for each in self._masked for group in each.param_groups)
        return [group.get("active") for group in groups]


def _parameters(optimizer: Optimizer) -> set[Tensor]:
    return {param for group in optimizer.param_groups for param in group["params"]}
