"""The one mapping between a module's named tensors and a flat vector.

What travels between client and server is a 1-D tensor of k numbers. A `Space` says which tensors
of a module it holds, in which order and where: `read` gathers them into a vector, `write` puts a
vector back into the module. Vectors are kept in float32 or wider, whatever the module's precision,
so that small updates to a half-precision module are not lost on the server.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fl_lightning.core.errors import ConfigurationError


class Space:
    """Named tensors laid out one after the other in a vector of length `size`.

    Args:
        tensors: the live tensors by name, in order. They are written to in place.

    Example:
        >>> module = nn.Linear(2, 1)
        >>> space = Space.of_parameters(module)
        >>> space.size, space.names
        (3, ['weight', 'bias'])
        >>> space.write(torch.tensor([1.0, 2.0, 3.0]))
        >>> module.bias
        Parameter containing:
        tensor([3.], requires_grad=True)
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.names = list(tensors)
        self._tensors = list(tensors.values())
        self._sizes = [tensor.numel() for tensor in self._tensors]
        self.size = sum(self._sizes)
        self.dtype = torch.float64 if self._any_double() else torch.float32
        self.device = self._tensors[0].device if self._tensors else torch.device("cpu")
        self._written: tuple[Tensor, list[Tensor]] = (torch.empty(0), [])

    def _any_double(self) -> bool:
        return any(tensor.dtype == torch.float64 for tensor in self._tensors)

    @property
    def is_lossless(self) -> bool:
        """Whether `write` keeps every bit: not so for modules in half precision."""
        return all(tensor.dtype == self.dtype for tensor in self._tensors)

    @classmethod
    def of_parameters(cls, module: nn.Module) -> Space:
        """Return the space of all parameters that train (``requires_grad``), shared ones once.

        Raises:
            ConfigurationError: if no parameter trains, or not all lie on one device.
        """
        trainable = {name: p for name, p in module.named_parameters() if p.requires_grad}
        if not trainable:
            raise ConfigurationError(
                f"{type(module).__name__} has no parameter with requires_grad=True: "
                "there is nothing to train. Unfreeze at least one."
            )
        if any(isinstance(p, nn.UninitializedParameter) for p in trainable.values()):
            raise ConfigurationError(
                f"{type(module).__name__} has lazy layers: call it once on a dummy batch in "
                "__init__ or configure_model, so that its parameters have shapes"
            )
        unknown = [name for name, p in trainable.items() if not p.is_floating_point()]
        if unknown:
            raise ConfigurationError(
                f"parameter {unknown[0]} is {trainable[unknown[0]].dtype}: updates are vectors of "
                "real numbers. Store real and imaginary parts as two parameters."
            )
        devices = {str(p.device) for p in trainable.values()}
        if len(devices) > 1:
            raise ConfigurationError(
                f"the model lies on several devices, {sorted(devices)}: use one"
            )
        return cls(trainable)

    @classmethod
    def of_buffers(cls, module: nn.Module) -> Space:
        """Return the space of all floating-point buffers, e.g. batch norm's running statistics.

        Integer buffers (batch norm's ``num_batches_tracked``) are not averaged: a client starts
        from the server's value, which stays as it is.
        """
        floating = {n: b for n, b in module.named_buffers() if b.is_floating_point()}
        return cls(floating)

    def read(self) -> Tensor:
        """Return the live values as a new vector of shape (k,)."""
        vector = torch.empty(self.size, dtype=self.dtype, device=self.device)
        with torch.no_grad():
            if self._tensors:
                torch._foreach_copy_(self.views(vector), self._tensors)
        return vector

    def write(self, vector: Tensor) -> None:
        """Copy a vector of shape (k,) into the live tensors, in place."""
        if not self._tensors:
            return
        if self._written[0] is not vector:  # the same one is written for every client of a round
            self._written = (vector, self.views(vector))
        with torch.no_grad():
            torch._foreach_copy_(self._tensors, self._written[1])

    def views(self, vector: Tensor) -> list[Tensor]:
        """Return the vector's parts in the shapes of the tensors they belong to, without a copy.

        Raises:
            ValueError: if the vector's shape is not (k,).
        """
        if vector.shape != (self.size,):
            raise ValueError(
                f"expected a vector of shape ({self.size},), got {tuple(vector.shape)}"
            )
        parts = vector.split(self._sizes) if self._sizes else ()
        return [part.view_as(tensor) for part, tensor in zip(parts, self._tensors, strict=True)]

    def named_views(self, vector: Tensor) -> dict[str, Tensor]:
        """Return `views` by name."""
        return dict(zip(self.names, self.views(vector), strict=True))

    def fingerprint(self) -> str:
        """Return a hash of names and shapes: two spaces with the same one exchange vectors."""
        shapes = [(name, tuple(t.shape)) for name, t in zip(self.names, self._tensors, strict=True)]
        return hashlib.blake2b(repr(shapes).encode(), digest_size=16).hexdigest()
