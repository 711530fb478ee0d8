"""Dense layers in slots whose weights' gradients are never written out.

    y = W a + b + z,   z = 0,      so that dL/dz is the error e at the output and dL/dW = eᵀ a

With the few examples of a batch e and a are small, and `dense_step` multiplies them where SGD adds the
product to the weights: see `ThinGradients`, which does the same for one client after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor, nn

from fl_lightning.client.cannot_stack import CannotStack
from fl_lightning.client.direct_layers import (
    direct_linear,
    is_direct_linear,
    reason_against_direct_layers,
)
from fl_lightning.client.other_forwards import Forwards

# With fewer weights there is little to save.
_FEWEST_WEIGHTS = 1_000


class ThinLayers:
    """The dense layers of a module, with a forward pass for each that can be told to be thin.

    That is for layers that a training step calls once, with a row an example, and whose weights get
    no gradient from anything else, see `TrainingStep.thin_here`.

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
        self._inputs: dict[str, Tensor] = {}

    def weight(self, name: str) -> Tensor:
        """Return a weight as it is in the module."""
        return self._layers[name].weight

    def begin(self, weights: Mapping[str, Tensor], zeros: Mapping[str, Tensor]) -> None:
        """Have layers be thin in the next call of the training step.

        Args:
            weights: theirs, by name.
            zeros: what is added to their outputs, by name.
        """
        self._weights.update(weights)
        self._zeros.update(zeros)

    @property
    def called(self) -> list[str]:
        """Names of those that were thin in the call."""
        return list(self._inputs)

    def inputs(self) -> dict[str, Tensor]:
        """Return the inputs of those that were thin in the call, by name.

        Raises:
            CannotStack: if one of them was not called.
        """
        if missing := self._zeros.keys() - self._inputs.keys():
            raise CannotStack(f"its layer of {min(missing)} is not called as it was before")
        return dict(self._inputs)

    def end(self) -> None:
        """Have none be thin."""
        for of_layers in (self._weights, self._zeros, self._inputs):
            of_layers.clear()

    def _forward(self, name: str, layer: nn.Linear) -> Callable[[Tensor], Tensor]:
        def forward(value: Tensor) -> Tensor:
            weight = self._weights.pop(name, None)
            if weight is None or value.shape[:-1] != self._zeros[name].shape[:-1]:
                return direct_linear(value, layer.weight, layer.bias)
            self._inputs[name] = value.detach()
            return direct_linear(value, weight, layer.bias) + self._zeros[name]

        return forward
