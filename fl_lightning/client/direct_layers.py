"""Convolutions and poolings of a model, computed by the operators that many small ones want."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everyone writes it

from fl_lightning.client.direct_convolution import FLAGS, SOURCE, convolve
from fl_lightning.client.window_maximum import SOURCE as MAXIMUM
from fl_lightning.client.window_maximum import window_maximum
from fl_lightning.core.c_library import c_library


def reason_against_direct_layers(module: nn.Module) -> str | None:
    """Return why a module's convolutions cannot be computed so; None if some can.

    Example:
        >>> reason_against_direct_layers(nn.Linear(2, 2))
        'the model has no convolution with stride 1 and one group in float32 on a CPU'
    """
    if not any(_is_convolution(layer) for layer in module.modules()):
        return "the model has no convolution with stride 1 and one group in float32 on a CPU"
    if torch.get_num_threads() > 1:
        return "this process has several threads, of which they would use one"
    if c_library(SOURCE, FLAGS) is None or c_library(MAXIMUM) is None:
        return "there is no C compiler, or the processor has no vectors of 256 bits"
    return None


def direct_layers(
    module: nn.Module, *, viewable: bool = False
) -> dict[nn.Module, Callable[[Tensor], Tensor]]:
    """Return other forward passes for convolutions and the poolings between them; none if impossible.

    Each serves as its layer's ``forward``, in `torch.func`'s transforms and compiled graphs as well.

    Args:
        module: the model.
        viewable: have the results of poolings, or of convolutions if there is no pooling, lie in
            memory as PyTorch's own layers have them, not with channels last: for models that
            ``view`` the last one's.

    Example:
        >>> from fl_lightning.client.other_forwards import other_forwards
        >>> network = nn.Sequential(nn.Conv2d(2, 3, 3), nn.MaxPool2d(2))
        >>> images = torch.randn(4, 2, 8, 8)
        >>> with other_forwards(direct_layers(network)):
        ...     result = network(images)
        >>> torch.allclose(result, network(images), atol=1e-5)
        True
    """
    if reason_against_direct_layers(module) is not None:
        return {}
    forwards: dict[nn.Module, Callable[[Tensor], Tensor]] = {}
    has_pooling = any(map(_is_pooling, module.modules()))
    for layer in module.modules():
        if _is_convolution(layer):
            forwards[layer] = _convolution(layer, contiguous=viewable and not has_pooling)
        elif _is_pooling(layer):
            forwards[layer] = _pooling(layer, contiguous=viewable)
    return forwards


def _is_convolution(layer: nn.Module) -> TypeGuard[nn.Conv2d]:
    return (
        type(layer) is nn.Conv2d
        and "forward" not in vars(layer)
        and layer.stride == layer.dilation == (1, 1)
        and layer.groups == 1
        and layer.padding_mode == "zeros"
        and not isinstance(layer.padding, str)
        and layer.weight.dtype == torch.float32
        and layer.weight.device.type == "cpu"
    )


def _is_pooling(layer: nn.Module) -> TypeGuard[nn.MaxPool2d]:
    return (
        type(layer) is nn.MaxPool2d
        and "forward" not in vars(layer)
        and _pair(layer.kernel_size) == _pair(layer.stride)
        and _pair(layer.padding) == (0, 0)
        and _pair(layer.dilation) == (1, 1)
        and not layer.return_indices
        and not layer.ceil_mode
    )


def _pair(value: int | tuple[int, int]) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[0], value[1])


def _is_usual(value: Tensor) -> bool:
    is_full = value.dtype == torch.float32 and value.device.type == "cpu"
    return value.ndim == 4 and is_full and not torch.is_autocast_enabled("cpu")


def _convolution(layer: nn.Conv2d, *, contiguous: bool) -> Callable[[Tensor], Tensor]:
    high, broad = (int(margin) for margin in layer.padding)
    tall, wide = layer.kernel_size

    def forward(value: Tensor) -> Tensor:
        height, width = value.shape[-2] + 2 * high, value.shape[-1] + 2 * broad
        fits = height >= tall and width >= wide and value.shape[-3] == layer.in_channels
        if not _is_usual(value) or not fits:
            return nn.Conv2d.forward(layer, value)  # or its error
        images = value.movedim(1, -1)
        if high or broad:
            images = F.pad(images, (0, 0, broad, broad, high, high))
        weights = layer.weight.permute(2, 3, 1, 0)
        result: Tensor = convolve(images.unsqueeze(0), weights.unsqueeze(0)).squeeze(0)
        if layer.bias is not None:
            result = result + layer.bias
        result = result.movedim(-1, 1)
        return result.contiguous() if contiguous else result

    return forward


def _pooling(layer: nn.MaxPool2d, *, contiguous: bool) -> Callable[[Tensor], Tensor]:
    tall, wide = _pair(layer.kernel_size)

    def forward(value: Tensor) -> Tensor:
        if not _is_usual(value) or value.shape[-2] < tall or value.shape[-1] < wide:
            return F.max_pool2d(value, (tall, wide))
        # what fills no window takes no part
        height, width = (value.shape[-2] // tall) * tall, (value.shape[-1] // wide) * wide
        images = value[:, :, :height, :width].movedim(1, -1)
        result: Tensor = window_maximum(images, tall, wide)[0].movedim(-1, 1)
        return result.contiguous() if contiguous else result

    return forward
