"""Layers that compute in another way for a while; dense ones whose weights' gradients are never written out.

    y = W a + b + z,   z = 0,      so that dL/dz is the error e at the output and dL/dW = eᵀ a

With the few examples of a batch e and a are small, and `dense_step` multiplies them where SGD adds the
product to the weights. Here e and a come out of `torch.func`'s transforms and of a compiled graph, which
narrows down which layers can be thin.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor, nn

from fl_lightning.kernels import (
    direct_linear,
    is_direct_linear,
    is_usual,
    reason_against_direct_layers,
)

Forwards = Mapping[nn.Module, Callable[[Tensor], Tensor]]


@contextmanager
def other_forwards(forwards: Forwards) -> Iterator[None]:
    """Replace the forward passes of layers while the block runs.

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


# With fewer weights there is little to save.
_FEWEST_WEIGHTS = 1_000


class ThinLayers:
    """The dense layers of a module, with a forward pass for each that can be told to be thin.

    That is for layers that a training step calls once, with a row an example that is no parameter's,
    and whose weights get no gradient in another way, see `TrainingStep.thin_here`.

    Args:
        module: whose layers of type `torch.nn.Linear` are looked at.

    Attributes:
        names: of the layers' weights that train.
        forwards: by layer.
    """

    def __init__(self, module: nn.Module) -> None:
        is_possible = reason_against_direct_layers(module) is None
        layers = {
            f"{name}.weight": layer
            for name, layer in module.named_modules()
            if is_possible and is_direct_linear(layer)
        }
        self.names = [
            name
            for name, layer in layers.items()
            if layer.weight.requires_grad and layer.weight.numel() >= _FEWEST_WEIGHTS
        ]
        self._layers = {name: layers[name] for name in self.names}
        self.forwards: Forwards = {m: self._forward(n, m) for n, m in self._layers.items()}
        self._weights: dict[str, Tensor] = {}
        self._zeros: dict[str, Tensor] = {}
        self._storages: list[int] = []
        # of each call the input; None if it could not be thin
        self._calls: dict[str, list[Tensor | None]] = {name: [] for name in self.names}

    def weight(self, name: str) -> Tensor:
        """Return a weight as it is in the module."""
        return self._layers[name].weight

    def begin(
        self,
        weights: Mapping[str, Tensor],
        zeros: Mapping[str, Tensor],
        fixed: Iterable[Tensor] = (),
    ) -> None:
        """Make layers thin in the next call of the training step.

        Args:
            weights: what stands in the module for theirs, by name.
            zeros: what is added to their outputs, by name.
            fixed: given where it is to be found out which layers can be thin: tensors that an input
                must share no memory with.
        """
        self._weights.update(weights)
        self._zeros.update(zeros)
        self._storages += [t.untyped_storage().data_ptr() for t in fixed]

    @property
    def inputs(self) -> dict[str, Tensor]:
        """Inputs of those that were thin in the call and were called once, by name."""
        calls = {name: self._calls[name] for name in self._weights}
        return {n: made[0] for n, made in calls.items() if len(made) == 1 and made[0] is not None}

    def end(self) -> None:
        """Make no layer thin any more."""
        for made in self._calls.values():
            made.clear()
        self._weights.clear()
        self._zeros.clear()
        self._storages.clear()

    def _forward(self, name: str, layer: nn.Linear) -> Callable[[Tensor], Tensor]:
        def forward(value: Tensor) -> Tensor:
            weight = self._weights.get(name)
            if weight is None:
                return direct_linear(value, layer.weight, layer.bias)
            zeros, calls = self._zeros[name], self._calls[name]
            fits = value.shape[:-1] == zeros.shape[:-1] and is_usual(value)
            # another weight may stand there for a moment, as in `torch.func.functional_call`
            fits = fits and not calls and layer.weight is weight
            if not fits or (self._storages and not _is_apart(value, self._storages)):
                calls.append(None)
                return direct_linear(value, layer.weight, layer.bias)
            calls.append(value.float().detach())
            return direct_linear(value, weight.detach(), layer.bias) + zeros

        return forward


def _is_apart(value: Tensor, storages: Collection[int]) -> bool:
    """Return whether a tensor has memory of its own, and is none of a transform of the step's."""
    try:
        return value.untyped_storage().data_ptr() not in storages
    except (NotImplementedError, RuntimeError):  # in `torch.func.grad`, e.g. for a penalty on it
        return False
