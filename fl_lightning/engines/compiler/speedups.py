"""Speedups of a local step: memory layout, fused kernels, a compiled graph.

A speedup changes at most the order of additions, so updates are equal up to rounding. Which ones pay
depends on model, batch and machine; `federation.clients.trial` measures it.

- ``direct_layers``: dense layers, convolutions and poolings of few, small examples by C operators,
  see `kernels.layers`.
- ``channels_last``: images and convolutions keep the channels of a pixel together.
- ``fused_optimizer``: the optimizer's step reads and writes each parameter once.
- ``math_attention``: attention as plain matrix products, in bfloat16 where its inputs are. On CPUs
  with matrix units the backward pass of PyTorch's fused kernel is slower in bfloat16 than these.
- ``compiled``: ``training_step`` on full batches by `torch.compile`, uncompiled where that fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import SGD, Adam, AdamW, Optimizer

from fl_lightning.engines.compiler.compiling import with_own_code
from fl_lightning.kernels import (
    Forwards,
    direct_layers,
    other_forwards,
    reason_against_direct_layers,
)
from fl_lightning.sparsity.optimizers.masked_optimizer import MaskedOptimizer

Speedup = Literal[
    "direct_layers",
    "channels_last",
    "fused_optimizer",
    "math_attention",
    "compiled",
]
SPEEDUPS: tuple[Speedup, ...] = get_args(Speedup)

_CONVOLUTIONS = (nn.Conv2d, nn.ConvTranspose2d)


class FasterStep:
    """A local step with selected speedups, e.g. ``channels_last`` and ``fused_optimizer``.

    Args:
        module: the model; with ``channels_last`` its parameters change their layout until `close`.
        optimizer: optimizer of the model's parameters.
        speedups: speedups that this model supports, see `reason_against`.
        direct: result of `direct_layers` for the module, if computed before.

    Example:
        >>> module = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten())
        >>> optimizer = SGD(module.parameters(), lr=0.1)
        >>> faster = FasterStep(module, optimizer, ("channels_last", "fused_optimizer"))
        >>> images, labels = faster.batch((torch.ones(2, 3, 5, 5), torch.ones(2)))
        >>> with faster.forwards():
        ...     loss = module(images).sum()
        >>> loss.backward()
        >>> faster.step()
        >>> faster.close()
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        speedups: Sequence[Speedup],
        direct: Forwards | None = None,
    ) -> None:
        self.speedups = tuple(speedups)
        self._direct: Forwards = {}
        if "direct_layers" in speedups:
            self._direct = direct_layers(module) if direct is None else direct
        self._module, self._optimizer = module, optimizer
        self._forwards: dict[nn.Module, Callable[[Tensor], Tensor]] = {}
        self._is_channels_last = "channels_last" in speedups
        self._has_math_attention = "math_attention" in speedups
        self._step_all: Callable[[], Any] = (
            self._fused_step if "fused_optimizer" in speedups else optimizer.step
        )
        if self._is_channels_last:
            _lay_out(module, torch.channels_last)
            self._forwards.update(_pools(module))
        self._forwards.update(self._direct)

    def batch(self, batch: Any) -> Any:
        """Convert a batch to the memory layout of the model's parameters."""
        return _channels_last(batch) if self._is_channels_last else batch

    @contextmanager
    def forwards(self) -> Iterator[None]:
        """Replace layers' forward passes by faster ones while the block runs."""
        attention = _as_products() if self._has_math_attention else nullcontext()
        with other_forwards(self._forwards), attention:
            yield

    def step(self) -> None:
        """Step the optimizer after the backward pass."""
        self._step_all()

    def close(self) -> None:
        """Restore the usual memory layout of the module's parameters."""
        if self._is_channels_last:
            _lay_out(self._module, torch.contiguous_format)

    def _fused_step(self) -> None:
        groups = self._optimizer.param_groups
        for group in groups:  # for this call only: checkpoints hold what the user asked for
            group["fused"] = True
        try:
            self._optimizer.step()
        finally:
            for group in groups:
                group["fused"] = None


def compiled_step(module: nn.Module) -> Callable[..., Any]:
    """Compile a module's ``training_step``, for batches of one shape.

    It draws the same random numbers as the uncompiled step.
    """
    options = {"fallback_random": True}
    compiled = torch.compile(with_own_code(module.training_step), dynamic=False, options=options)  # type: ignore[arg-type]

    def step(batch: Any, *index: int) -> Any:
        # numbers would each want a graph: of steps, and of a metric's updates
        with torch._dynamo.config.patch(suppress_errors=True, allow_unspec_int_on_nn_module=True):
            return compiled(batch, *map(torch.tensor, index))

    return step


@contextmanager
def _as_products() -> Iterator[None]:
    """Compute attention by matrix products in the inputs' precision while the block runs.

    By default PyTorch computes these products in float32, without the processor's matrix units.
    """
    switch = torch.backends.cuda  # its name; it is everybody's
    before = switch.fp16_bf16_reduction_math_sdp_allowed()
    switch.allow_fp16_bf16_reduction_math_sdp(True)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        switch.allow_fp16_bf16_reduction_math_sdp(before)


def reason_against(speedup: Speedup, module: nn.Module, optimizer: Optimizer) -> str | None:
    """Reason why a speedup does not apply to a model and its optimizer; None if it does.

    Example:
        >>> module = nn.Linear(2, 2)
        >>> optimizer = SGD(module.parameters(), lr=0.1, foreach=True)
        >>> reason_against("channels_last", module, optimizer)
        'the model has no convolution over images'
        >>> reason_against("fused_optimizer", module, optimizer)
        'foreach or fused are given to the optimizer'
    """
    if speedup == "direct_layers":
        return reason_against_direct_layers(module)
    if speedup == "channels_last":
        if isinstance(optimizer, MaskedOptimizer):
            return "masks count a parameter's entries in the usual layout"
        has_any = any(isinstance(layer, _CONVOLUTIONS) for layer in module.modules())
        return None if has_any else "the model has no convolution over images"
    if speedup == "fused_optimizer":
        return _reason_against_fused(optimizer)
    if speedup == "compiled":
        return None  # what rules it out shows in its first step
    device = next(module.parameters()).device.type
    return None if device == "cpu" else f"it is for CPUs, the model is on {device}"


def _reason_against_fused(optimizer: Optimizer) -> str | None:
    if type(optimizer) not in (SGD, Adam, AdamW):
        return f"{type(optimizer).__name__} has no fused step: it is for SGD, Adam and AdamW"
    for group in optimizer.param_groups:
        if group["foreach"] is not None or group["fused"] is not None:
            return "foreach or fused are given to the optimizer"
        if group["differentiable"]:
            return "the optimizer has the option differentiable"
    return None


def _lay_out(module: nn.Module, layout: torch.memory_format) -> None:
    with torch.no_grad():
        for param in module.parameters():
            if param.ndim == 4:
                param.data = _laid_out(param.data, layout)


def _laid_out(value: Tensor, layout: torch.memory_format) -> Tensor:
    """Convert a tensor of shape (N, C, H, W) to exactly the strides of a memory layout.

    PyTorch counts a tensor with one channel, or one pixel, as being in both layouts. The layout of a
    convolution's result then depends on the strides of axes of length one.
    """
    _, channels, height, width = value.shape
    strides = (channels * height * width, height * width, width, 1)
    if layout is torch.channels_last:
        strides = (channels * height * width, 1, width * channels, channels)
    return value.contiguous(memory_format=layout).as_strided(value.shape, strides)


def _channels_last(batch: Any) -> Any:
    if isinstance(batch, Tensor):
        is_image = batch.ndim == 4 and batch.is_floating_point()
        return _laid_out(batch, torch.channels_last) if is_image else batch
    if type(batch) in (tuple, list):
        return type(batch)([_channels_last(part) for part in batch])
    if type(batch) is dict:
        return {key: _channels_last(part) for key, part in batch.items()}
    return batch


def _pools(module: nn.Module) -> dict[nn.Module, Callable[[Tensor], Tensor]]:
    layers = (layer for layer in module.modules() if type(layer) is nn.MaxPool2d)
    return {layer: _pool(layer) for layer in layers if "forward" not in vars(layer)}


def _pool(layer: nn.MaxPool2d) -> Callable[[Tensor], Tensor]:
    """Return a forward pass of max pooling that keeps its gradient in channels-last layout.

    From a flatten it arrives in the other layout, and PyTorch then copies the large input twice.
    """

    def forward(value: Tensor) -> Tensor:
        result: Tensor = nn.MaxPool2d.forward(layer, value)
        has_image = isinstance(result, Tensor) and result.ndim == 4 and result.requires_grad
        if has_image and result.is_contiguous(memory_format=torch.channels_last):
            result.register_hook(partial(_laid_out, layout=torch.channels_last))
        return result

    return forward
