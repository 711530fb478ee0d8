"""Forward passes of layers by C operators, which are faster for many small layers.

They compute in float32 and also return float32 under autocast. With few, small examples a processor
without matrix units gains nothing from half precision.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everyone writes it

from fl_lightning.kernels.c_library import c_libraries
from fl_lightning.kernels.convolution import SOURCE as CONVOLUTION
from fl_lightning.kernels.convolution import (
    WINOGRAD,
    convolve,
    convolve_and_add,
    may_be_winograd,
)
from fl_lightning.kernels.convolution import flags as convolution_flags
from fl_lightning.kernels.linear import FEW, FEWEST_INPUTS, dense
from fl_lightning.kernels.linear import SOURCE as LINEAR
from fl_lightning.kernels.linear import flags as linear_flags
from fl_lightning.kernels.window_maximum import SOURCE as MAXIMUM
from fl_lightning.kernels.window_maximum import window_maximum

_ELEMENTWISE = nn.ReLU, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Dropout
_MOST_WEIGHTS = 2**20  # of a convolution: with more, their layout takes longer than a few images

Forwards = Mapping[nn.Module, Callable[[Tensor], Tensor]]


@contextmanager
def other_forwards(forwards: Forwards) -> Iterator[None]:
    """Replace the ``forward`` of some layers while the block runs.

    Example:
        >>> layer = nn.Identity()
        >>> with other_forwards({layer: lambda value: 2 * value}):
        ...     layer(21)
        42
        >>> layer(21)
        21
    """
    for layer, forward in forwards.items():
        vars(layer)["forward"] = forward
    try:
        yield
    finally:
        for layer in forwards:
            del vars(layer)["forward"]


def reason_against_direct_layers(module: nn.Module) -> str | None:
    """Return why no layer of a module can use the C operators; None if some layer can.

    Example:
        >>> reason_against_direct_layers(nn.Linear(20, 2, dtype=torch.float64))
        'the model has no dense layer or convolution (stride 1, one group) in float32 on a CPU'
    """
    if not any(_is_convolution(layer) or _is_dense(layer) for layer in module.modules()):
        return (
            "the model has no dense layer or convolution (stride 1, one group) in float32 on a CPU"
        )
    if torch.get_num_threads() > 1:
        return "this process has several threads, of which the operators would use one"
    if None in c_libraries({source for layer in module.modules() for source in _sources(layer)}):
        return "there is no C compiler, or the processor has no vectors of 256 bits"
    return None


def direct_layers(
    module: nn.Module, *, viewable: bool = False
) -> dict[nn.Module, Callable[[Tensor], Tensor]]:
    """Return forward passes by C operators, for the layers that support them.

    Each replaces its layer's ``forward``, also in `torch.func`'s transforms and in compiled graphs. In an
    `nn.Sequential`, a ReLU before a max-pooling runs after it, on fewer numbers; results and gradients are
    bit-identical.

    Args:
        module: the model.
        viewable: return the results of poolings, or of convolutions if there is no pooling, in PyTorch's
            memory layout instead of channels last, for models that ``view`` them; except in an
            `nn.Sequential` whose next layers accept both.

    Example:
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
    has_convolution = any(map(_is_convolution, module.modules()))
    has_pooling = any(map(_is_pooling, module.modules()))
    for layer in module.modules():
        if _is_convolution(layer):
            forwards[layer] = _convolution(layer, contiguous=viewable and not has_pooling)
        elif _is_pooling(layer) and has_convolution:
            forwards[layer] = _pooling(layer, contiguous=viewable)
        elif _is_dense(layer):
            forwards[layer] = _dense(layer)
        elif type(layer) is nn.Sequential and has_convolution and "forward" not in vars(layer):
            order = _poolings_first(layer)
            steps = _steps(order) if viewable else order
            if steps != list(layer):
                forwards[layer] = _chain(steps)
    return forwards


def _sources(layer: nn.Module) -> Iterator[tuple[Path, tuple[str, ...]]]:
    """Yield the C files (with compiler flags) that a layer needs."""
    if _is_convolution(layer):
        tall, wide = layer.kernel_size
        for count in layer.out_channels, wide * layer.in_channels:
            yield CONVOLUTION, convolution_flags(count)
        if may_be_winograd(tall, wide, layer.in_channels, layer.out_channels):
            yield WINOGRAD, convolution_flags(layer.out_channels)
    elif _is_dense(layer):
        yield LINEAR, linear_flags(layer.in_features)
    elif _is_pooling(layer):
        yield MAXIMUM, ()


def _is_convolution(layer: nn.Module) -> TypeGuard[nn.Conv2d]:
    return (
        type(layer) is nn.Conv2d
        and "forward" not in vars(layer)
        and layer.stride == layer.dilation == (1, 1)
        and layer.groups == 1
        and layer.padding_mode == "zeros"
        and not isinstance(layer.padding, str)
        and layer.weight.numel() <= _MOST_WEIGHTS
        and layer.weight.dtype == torch.float32
        and layer.weight.device.type == "cpu"
    )


def _is_dense(layer: nn.Module) -> TypeGuard[nn.Linear]:
    return (
        type(layer) is nn.Linear
        and "forward" not in vars(layer)
        and layer.in_features >= FEWEST_INPUTS
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
    """True if the C operators accept a tensor: on the CPU, float32 or autocast's dtype under autocast."""
    if value.device.type != "cpu":
        return False
    if value.dtype == torch.float32:
        return True
    return torch.is_autocast_enabled("cpu") and value.dtype == torch.get_autocast_dtype("cpu")


def _convolution(layer: nn.Conv2d, *, contiguous: bool) -> Callable[[Tensor], Tensor]:
    high, broad = (int(margin) for margin in layer.padding)
    tall, wide = layer.kernel_size

    def forward(value: Tensor) -> Tensor:
        if value.ndim != 4 or not _is_usual(value):
            return nn.Conv2d.forward(layer, value)
        height, width = value.shape[-2] + 2 * high, value.shape[-1] + 2 * broad
        if height < tall or width < wide or value.shape[-3] != layer.in_channels:
            return nn.Conv2d.forward(layer, value)  # its error
        images = value.float().movedim(1, -1)
        if high or broad:
            images = F.pad(images, (0, 0, broad, broad, high, high))
        images = images.contiguous()
        factors = images.unsqueeze(0), layer.weight.unsqueeze(0)
        bias = layer.bias
        result = (
            convolve(*factors) if bias is None else convolve_and_add(*factors, bias.unsqueeze(0))
        )
        result = result.squeeze(0).movedim(-1, 1)
        return result.contiguous() if contiguous else result

    return forward


def _pooling(layer: nn.MaxPool2d, *, contiguous: bool) -> Callable[[Tensor], Tensor]:
    tall, wide = _pair(layer.kernel_size)

    def forward(value: Tensor) -> Tensor:
        fits = value.ndim == 4 and value.shape[-2] >= tall and value.shape[-1] >= wide
        if not fits or not _is_usual(value):
            return F.max_pool2d(value, (tall, wide))
        # drop rows and columns that fill no window
        height, width = (value.shape[-2] // tall) * tall, (value.shape[-1] // wide) * wide
        images = value.float()[:, :, :height, :width].movedim(1, -1)
        result: Tensor = window_maximum(images, tall, wide)[0].movedim(-1, 1)
        return result.contiguous() if contiguous else result

    return forward


def _poolings_first(layers: nn.Sequential) -> list[nn.Module]:
    order = list(layers)
    for place, (layer, following) in enumerate(pairwise(layers)):
        if type(layer) is nn.ReLU and _is_pooling(following) and not _is_watched(layer, following):
            order[place : place + 2] = following, layer
    return order


def _steps(layers: list[nn.Module]) -> Sequence[Callable[[Tensor], Tensor]]:
    """Return faster forward passes of consecutive layers; results stay channels last where the next layers allow."""
    steps: list[Callable[[Tensor], Tensor]] = list(layers)
    for place, layer in enumerate(layers):
        if not _take_channels_last(layers[place + 1 :]):
            continue
        if _is_convolution(layer):
            steps[place] = _unless_watched(layer, _convolution(layer, contiguous=False))
        elif _is_pooling(layer):
            steps[place] = _unless_watched(layer, _pooling(layer, contiguous=False))
    return steps


def _take_channels_last(layers: Sequence[nn.Module]) -> bool:
    """True if these layers accept input with channels last: their results do not depend on its memory layout."""
    for layer in layers:
        if _is_watched(layer):
            return False
        if type(layer) not in _ELEMENTWISE:
            return _is_convolution(layer) or _is_pooling(layer) or type(layer) is nn.Flatten
    return False


def _chain(steps: Sequence[Callable[[Tensor], Tensor]]) -> Callable[[Tensor], Tensor]:
    def forward(value: Tensor) -> Tensor:
        for step in steps:
            value = step(value)
        return value

    return forward


def _is_watched(*layers: nn.Module) -> bool:
    """True if a layer has hooks, which a replaced forward pass would skip."""
    names = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
    return any(getattr(layer, name) for layer in layers for name in names)


def _unless_watched(
    layer: nn.Module, forward: Callable[[Tensor], Tensor]
) -> Callable[[Tensor], Tensor]:
    """Return a forward pass that calls the layer itself if it has hooks, and else ``forward``."""
    return lambda value: layer(value) if _is_watched(layer) else forward(value)


def _dense(layer: nn.Linear) -> Callable[[Tensor], Tensor]:
    def forward(value: Tensor) -> Tensor:
        weight, bias = layer.weight, layer.bias
        is_few = value.ndim == 2 and len(value) <= FEW
        if not is_few or weight.shape[1] != value.shape[1] or not _is_usual(value):
            return F.linear(value, weight, bias)
        result: Tensor = dense(value.float().unsqueeze(0), weight.unsqueeze(0)).squeeze(0)
        return result if bias is None else result + bias

    return forward
