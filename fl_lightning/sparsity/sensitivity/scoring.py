"""Options of all estimators of sensitivity (quantity, examples, memory), and functions on batches."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from fl_lightning.core.errors import ConfigurationError, check_range
from fl_lightning.core.modules import modes_kept
from fl_lightning.sparsity.masks.mask import some
from fl_lightning.sparsity.sensitivity.protocol import (
    Logits,
    Scored,
    log_probabilities,
    module_logits,
)

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Scoring:
    """Options of sensitivity estimators: what to score, on how many examples, with how much memory.

    Args:
        quantity: scored quantity of a class: `log_probabilities` (the paper) or `raw_logits` (its
            released code).
        logits: returns the logits (B, classes) of a module and a batch, of at least two classes.
        max_examples: largest number of examples to score, from the first batch on; None for all.
        memory_limit: bytes of gradients of single examples in memory at a time, without activations. If
            None, 64 MiB on a CPU, where gradients beyond its caches are slower than one example after the
            other, and 2 GiB on an accelerator. With 1, examples are scored one by one.
    """

    quantity: Scored = log_probabilities
    logits: Logits = module_logits
    max_examples: int | None = None
    memory_limit: int | None = None

    def __post_init__(self) -> None:
        check_range("max_examples", self.max_examples, "at least 1", "; leave it out for all")
        advice = "; below the size of an example's gradients, examples are scored one by one"
        check_range("memory_limit", self.memory_limit, "at least 1 byte", advice)

    def memory_on(self, device: torch.device) -> int:
        """Return how many bytes of per-example gradients scoring may hold on a device."""
        default = 2**26 if device.type == "cpu" else 2**31
        return default if self.memory_limit is None else self.memory_limit

    def of_values(self, module: nn.Module) -> Callable[[Tensors, Any], tuple[Tensor, Tensor]]:
        """Return a function ``(parameters, batch) -> (quantity to score, logits)``, both (B, classes).

        Parameters that are not given are constants with the module's values; buffers are copies, so
        that the module does not change.
        """
        wrapper = _LogitsAsForward(module, self.logits)
        fixed = {f"module.{n}": p.detach() for n, p in module.named_parameters()}
        fixed |= {f"module.{n}": b.detach().clone() for n, b in module.named_buffers()}

        def score(parameters: Tensors, batch: Any) -> tuple[Tensor, Tensor]:
            values = fixed | {f"module.{name}": value for name, value in parameters.items()}
            with sdpa_kernel(SDPBackend.MATH):  # vmap would run fused attention example by example
                logits = functional_call(wrapper, values, (batch,))
            _check_logits(logits)
            logits = logits if logits.dtype == torch.float64 else logits.float()
            return self.quantity(logits), logits

        return score


class _LogitsAsForward(nn.Module):
    def __init__(self, module: nn.Module, logits: Logits) -> None:
        super().__init__()
        self.module = module
        self.logits = logits

    def forward(self, batch: Any) -> Tensor:
        return self.logits(self.module, batch)


def _check_logits(logits: Tensor) -> None:
    if not isinstance(logits, Tensor) or logits.ndim != 2 or logits.shape[1] < 2:
        shape = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise ConfigurationError(
            f"logits must be a tensor of shape (examples, classes), with at least 2 classes, got {shape}: give the "
            "option `logits`, a function of module and batch"
        )


def checked_parameters(module: nn.Module, parameters: Tensors | None) -> dict[str, Tensor]:
    """Return the parameter values at which to score, detached: the given or else all trainable parameters.

    Raises:
        ConfigurationError: if the module lacks a given parameter, or there are none.
    """
    own = dict(module.named_parameters())
    if parameters is None:
        parameters = {name: p for name, p in own.items() if p.requires_grad}
    unknown = [n for n, p in parameters.items() if n not in own or own[n].shape != p.shape]
    if unknown:
        raise ConfigurationError(
            f"{type(module).__name__} has no parameters {some(unknown)} of the given shapes: give names and shapes "
            "of its named_parameters()"
        )
    if not parameters:
        raise ConfigurationError(
            f"{type(module).__name__} has no trainable parameter to score: set requires_grad of some"
        )
    return {name: parameter.detach() for name, parameter in parameters.items()}


def zero_sums(parameters: Tensors) -> dict[str, Tensor]:
    """Return zero tensors to sum scores in, by parameter name: float64 for float64 parameters, else float32."""
    return {
        name: torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32))
        for name, p in parameters.items()
    }


@contextlib.contextmanager
def scoring_mode(module: nn.Module) -> Iterator[None]:
    """Put a module into evaluation mode, and autocast's cache off, inside a ``with`` block."""
    caches = torch.is_autocast_cache_enabled()
    # a weight cast inside one transform must not be reused outside it
    torch.set_autocast_cache_enabled(False)
    try:
        with torch.inference_mode(False), modes_kept(module):
            module.eval()
            yield
    finally:
        torch.set_autocast_cache_enabled(caches)


def map_batch(function: Callable[[Tensor], Tensor], batch: Any) -> Any:
    """Apply a function to every tensor of a batch, in tuples, lists and dicts.

    Raises:
        ConfigurationError: if the batch contains anything else.

    Example:
        >>> map_batch(lambda tensor: tensor + 1, {"x": torch.zeros(2)})
        {'x': tensor([1., 1.])}
    """
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, (list, tuple)):
        parts = [map_batch(function, part) for part in batch]
        # the constructor of a named tuple takes one argument per part
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    if isinstance(batch, dict):
        return {key: map_batch(function, part) for key, part in batch.items()}
    raise ConfigurationError(
        "batches to score must be tensors in tuples, lists or dicts, and one contains a "
        f"{type(batch).__name__}: leave it out in the loader's collate_fn"
    )


def batch_size(batch: Any) -> int:
    """Return the number of examples in a batch: the length of the first axis of its tensors.

    Raises:
        ConfigurationError: if the lengths differ.
    """
    sizes: set[int] = set()

    def note(tensor: Tensor) -> Tensor:
        sizes.add(tensor.shape[0] if tensor.ndim else -1)
        return tensor

    map_batch(note, batch)
    if len(sizes) != 1 or -1 in sizes:
        raise ConfigurationError(
            "all tensors of a batch must have one entry per example along their first axis, and their "
            f"lengths are {sorted(sizes)} (-1: no axis): change the loader's collate_fn"
        )
    return sizes.pop()


def chunks(batch: Any, size: int) -> Iterator[Any]:
    """Yield a batch in parts of at most ``size`` examples."""
    for start in range(0, batch_size(batch), size):
        yield map_batch(lambda tensor, at=start: tensor[at : at + size], batch)  # type: ignore[misc]


def limited(
    batches: Iterable[Any], max_examples: int | None, device: torch.device
) -> Iterator[tuple[Any, int]]:
    """Yield batches, moved to the device, with their sizes; stop after ``max_examples`` examples."""
    left = max_examples
    for batch in batches:
        size = batch_size(batch)
        if left is not None and size > left:
            batch, size = next(chunks(batch, left)), left
        if size:
            yield map_batch(lambda tensor: tensor.to(device), batch), size
        if left is not None:
            left -= size
            if left == 0:
                return
