"""A whole model in a message: also what is frozen, which orders to train leave out; and the mask of it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.flower.failures import OrderRefused
from fl_lightning.flower.messages import Order
from fl_lightning.sparsity.masks.mask import Mask

_MODEL, _BITS = "stage/model/", "stage/mask/"
_FIELDS = ("version", "hash", "shapes")  # the version is that of the layout of bits


def model_tensors(module: nn.Module, without: Collection[str] = ()) -> dict[str, Tensor]:
    """Return parameters and buffers as the tensors of an order.

    Args:
        module: whose.
        without: names of those that are left out.
    """
    return {
        f"{_MODEL}{name}": tensor.detach().cpu().contiguous()
        for name, tensor in _tensors(module).items()
        if name not in without
    }


def hold_model(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Have a module hold what `model_tensors` returned.

    Raises:
        OrderRefused: if it is of another module; then nothing is written.
    """
    own = _tensors(module)
    given = of_stage(_MODEL, tensors)
    for name, tensor in given.items():
        if name not in own or (own[name].shape, own[name].dtype) != (tensor.shape, tensor.dtype):
            raise OrderRefused("model", f"this site's module has no {name} of its form")
    with torch.no_grad():
        for name, tensor in given.items():
            own[name].copy_(tensor)


class RunMask(NamedTuple):
    """A mask of a run.

    Attributes:
        mask: the mask.
        number: which of the run's; from 0.
    """

    mask: Mask
    number: int

    def __str__(self) -> str:
        """Return what both sides call it."""
        return f"{self.number} {self.mask.hash()}"


def mask_message(mask: RunMask) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return a mask as options and tensors of an order."""
    state = mask.mask.state_dict()
    bits = {f"{_BITS}{name}": tensor for name, tensor in state["bits"].items()}
    return {"mask": {name: state[name] for name in _FIELDS}, "mask_number": mask.number}, bits


def told_mask(order: Order) -> RunMask | None:
    """Return the mask that `mask_message` put into an order; None if there is none.

    Raises:
        OrderRefused: if it is damaged.
    """
    if "mask_number" not in order.options:
        return None
    try:
        told = {name: order.options["mask"][name] for name in _FIELDS}
        mask = Mask.from_state_dict(told | {"bits": of_stage(_BITS, order.tensors)})
        return RunMask(mask, int(order.options["mask_number"]))
    except (ConfigurationError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise OrderRefused("model", f"the order has no mask: {error}") from error


def of_stage(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors whose names begin so, without it."""
    return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return dict(module.named_parameters()) | dict(module.named_buffers())
