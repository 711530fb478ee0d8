"""The mapping between a module's named tensors and a flat vector.

Client and server exchange 1-D tensors of k numbers. A `Space` says which tensors of a module are in
the vector, and in which order: `read` gathers them into a vector, `write` copies a vector back into
the module. With a mask, only the entries that may move are part of it, so that all work on vectors
shrinks with the mask. Vectors are kept in float32 or wider for any precision of the module, so that
small updates to a half-precision module are not lost on the server.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn

from fl_lightning.core.errors import ConfigurationError

# From this number of entries on, a pass over memory takes longer than one operation per tensor.
_LARGE = 2**18


class Space:
    """Layout of a module's tensors as one vector of length `size`, and conversion between both.

    Args:
        tensors: the live tensors by name, in order. They are written to in place.
        active: for tensors with frozen entries, by name: increasing indices of the active entries in the
            flattened tensor, integers of shape (k_i,).

    Attributes:
        is_lossless: whether `write` keeps every bit; False for modules in half precision.

    Example:
        >>> module = nn.Linear(2, 1)
        >>> space = Space.of_parameters(module)
        >>> space.size, space.names
        (3, ['weight', 'bias'])
        >>> space.write(torch.tensor([1.0, 2.0, 3.0]))
        >>> module.bias
        Parameter containing:
        tensor([3.], requires_grad=True)
        >>> part = Space.of_parameters(module, {module.weight: torch.tensor([1])})
        >>> part.read(), part.size, part.num_entries
        (tensor([2., 3.]), 2, 3)
    """

    def __init__(
        self, tensors: Mapping[str, Tensor], active: Mapping[str, Tensor] | None = None
    ) -> None:
        self.names = list(tensors)
        # complex buffers are two real numbers each
        self._tensors = [torch.view_as_real(t) if t.is_complex() else t for t in tensors.values()]
        self.active = {name: index.long() for name, index in (active or {}).items()}
        self._indices = [self.active.get(name) for name in self.names]
        pairs = list(zip(self._tensors, self._indices, strict=True))
        self._sizes = [t.numel() if index is None else len(index) for t, index in pairs]
        self.size = sum(self._sizes)
        self.num_entries = sum(tensor.numel() for tensor in self._tensors)
        dtypes = {tensor.dtype for tensor in self._tensors}
        self.dtype = torch.float64 if torch.float64 in dtypes else torch.float32
        self.is_lossless = dtypes <= {self.dtype}
        self.device = self._tensors[0].device if self._tensors else torch.device("cpu")
        self._written: tuple[Tensor, list[Tensor]] = (torch.empty(0), [])
        self._flat: tuple[list[int], list[Tensor]] = ([], [])

    @classmethod
    def of_parameters(
        cls,
        module: nn.Module,
        active: Mapping[Tensor, Tensor] | None = None,
        without: Collection[str] = (),
    ) -> Space:
        """Return the layout of all trainable parameters as one vector; tied parameters count once.

        Args:
            module: the module.
            active: for parameters with frozen entries, the indices of those that may move.
            without: names of parameters to leave out.

        Raises:
            ConfigurationError: if no parameter is trainable, or they are on several devices.
        """
        trainable = {name: p for name, p in module.named_parameters() if p.requires_grad}
        if trainable and without:
            trainable = {name: p for name, p in trainable.items() if name not in without}
            if not trainable:
                raise ConfigurationError(
                    f"every trainable parameter of {type(module).__name__} is personal, so that nothing would "
                    "be shared: name fewer parameters in federation.personal"
                )
        if not trainable:
            raise ConfigurationError(
                f"{type(module).__name__} has no parameter with requires_grad=True, so that there is nothing to "
                "train: unfreeze at least one parameter"
            )
        if any(isinstance(p, nn.UninitializedParameter) for p in trainable.values()):
            raise ConfigurationError(
                f"{type(module).__name__} has lazy layers: call it once on a dummy batch in "
                "__init__ or configure_model, so that its parameters have shapes"
            )
        unknown = [name for name, p in trainable.items() if not p.is_floating_point()]
        if unknown:
            raise ConfigurationError(
                f"the trainable parameter {unknown[0]} has the dtype {trainable[unknown[0]].dtype}, and updates are "
                "vectors of real numbers: store real and imaginary parts as two parameters"
            )
        devices = {str(p.device) for p in trainable.values()}
        if len(devices) > 1:
            raise ConfigurationError(f"the model is on several devices, {sorted(devices)}: use one")
        chosen = active or {}
        return cls(trainable, {n: chosen[p] for n, p in trainable.items() if p in chosen})

    @classmethod
    def of_buffers(cls, module: nn.Module, without: Collection[str] = ()) -> Space:
        """Return the layout of floating-point and complex buffers (e.g. running statistics) as one vector.

        Integer buffers (batch norm's ``num_batches_tracked``) are not averaged: a client starts
        from the server's value, which does not change.
        """
        named = dict(module.named_buffers())
        floating = {n: b for n, b in named.items() if b.is_floating_point() or b.is_complex()}
        return cls({name: b for name, b in floating.items() if name not in without})

    def read(self, out: Tensor | None = None) -> Tensor:
        """Return the tensors' current values as a vector of shape (k,), in ``out`` if given."""
        if not self._tensors:
            return torch.empty(0, dtype=self.dtype, device=self.device)
        pairs = zip(self._flat_views(), self._indices, strict=True)
        parts = [t if i is None else t.index_select(0, i) for t, i in pairs]
        return torch.cat(parts, out=out).to(self.dtype)

    def write(self, vector: Tensor) -> None:
        """Copy a vector of shape (k,) into the module's tensors, in place."""
        if not self._tensors:
            return
        if self._written[0] is not vector:  # all clients of a round start with the same vector
            self._written = (vector, self.views(vector))
        views = self._written[1]
        with torch.no_grad():
            if not self.active:
                torch._foreach_copy_(self._tensors, views)
                return
            for tensor, index, view in zip(self._tensors, self._indices, views, strict=True):
                _put(tensor, index, view)

    def _flat_views(self) -> list[Tensor]:
        """Return the module's tensors as flat views, cached until a tensor moves to other memory."""
        # a kept vector keeps its memory as well, so that no other tensor can get the same address
        places = [*map(Tensor.data_ptr, self._tensors), *map(Tensor.is_contiguous, self._tensors)]
        if places != self._flat[0] or not all(places[len(self._tensors) :]):
            self._flat = (places, [tensor.detach().reshape(-1) for tensor in self._tensors])
        return self._flat[1]

    def moved_from(self, start: Tensor) -> Tensor:
        """Return start minus current values, shape (k,): the delta of a client's training."""
        if not self.is_lossless:
            end = self.read()
            self.write(start)  # the values began rounded: only their own movement counts
            return self.read().sub_(end)
        if self.active or self.size < _LARGE:
            end = self.read()
            return torch.sub(start, end, out=end)
        moved = torch.empty_like(start)  # not gathered first, which is another pass over memory
        with torch.no_grad():
            for before, (after, _, part) in zip(
                self.views(start), self.entries(moved), strict=True
            ):
                torch.sub(before, after, out=part)
        return moved

    def views(self, vector: Tensor) -> list[Tensor]:
        """Split a vector into one part per tensor, without a copy.

        A part has the shape of its tensor, or (k_i,) if only some entries belong to the space.

        Raises:
            ValueError: if the vector's shape is not (k,).
        """
        if vector.shape != (self.size,):
            raise ValueError(
                f"expected a vector of shape ({self.size},), got {tuple(vector.shape)}"
            )
        parts = vector.split(self._sizes) if self._sizes else ()
        trios = zip(parts, self._tensors, self._indices, strict=True)
        return [part if index is not None else part.view_as(t) for part, t, index in trios]

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the parts into which `views` splits a vector, in order.

        Example:
            >>> tensors = {"weight": torch.zeros(2, 3), "bias": torch.zeros(2)}
            >>> Space(tensors).shapes, Space(tensors, {"weight": torch.tensor([1, 4])}).shapes
            (((2, 3), (2,)), ((2,), (2,)))
        """
        pairs = zip(self._tensors, self._sizes, strict=True)
        return tuple(tuple(t.shape) if size == t.numel() else (size,) for t, size in pairs)

    def entries(self, vector: Tensor) -> list[tuple[Tensor, Tensor | None, Tensor]]:
        """Return per tensor: the tensor, the indices of its trainable entries (None: all), its part of the vector."""
        return list(zip(self._tensors, self._indices, self.views(vector), strict=True))

    def full(self, vector: Tensor) -> dict[str, Tensor]:
        """Return whole tensors by name: values of the vector, and current values where entries are frozen."""
        tensors = {}
        for name, (live, index, view) in zip(self.names, self.entries(vector), strict=True):
            tensors[name] = view
            if index is not None:
                tensors[name] = live.detach().clone()
                _put(tensors[name], index, view)
        return tensors

    def coordinates(self, masks: Mapping[str, Tensor]) -> Tensor:
        """Convert masks by tensor name to a mask over the vector's coordinates: bool, shape (k,).

        Args:
            masks: bool tensors by name; a tensor without a mask counts as all True.

        Raises:
            ValueError: if a mask is True for an entry outside the space.

        Example:
            >>> space = Space({"w": torch.zeros(3), "b": torch.zeros(1)}, {"w": torch.tensor([0, 2])})
            >>> space.coordinates({"w": torch.tensor([False, False, True])})
            tensor([False,  True,  True])
        """
        parts = []
        for name, tensor, index in zip(self.names, self._tensors, self._indices, strict=True):
            mask = masks.get(name)
            if mask is None:
                mask = torch.ones_like(tensor, dtype=torch.bool)
            parts.append(_entries(mask.to(tensor.device), index))
            if name in masks and parts[-1].count_nonzero() != mask.count_nonzero():
                raise ValueError(
                    f"the mask of {name} is True for entries that are frozen for all clients"
                )
        return torch.cat(parts)

    def positions_in(self, other: Space) -> Tensor:
        """Return each coordinate's index in another layout's vector, -1 if it is not there: int64, shape (k,).

        Example:
            >>> tensors = {"weight": torch.zeros(4)}
            >>> before = Space(tensors, {"weight": torch.tensor([0, 2])})
            >>> Space(tensors, {"weight": torch.tensor([1, 2])}).positions_in(before)
            tensor([-1,  1])
        """
        places: dict[str, Tensor] = {}
        start = 0
        for name, tensor, index, size in zip(
            other.names, other._tensors, other._indices, other._sizes, strict=True
        ):
            place = torch.full((tensor.numel(),), -1, device=tensor.device)
            here = torch.arange(start, start + size, device=tensor.device)
            _put(place, index, here)
            places[name] = place
            start += size
        parts = [
            _entries(places[name], index)
            if name in places
            else torch.full((size,), -1, device=self.device)
            for name, index, size in zip(self.names, self._indices, self._sizes, strict=True)
        ]
        return torch.cat(parts)

    def named_views(self, vector: Tensor) -> dict[str, Tensor]:
        """Split a vector into one part per tensor, by name, without a copy."""
        return dict(zip(self.names, self.views(vector), strict=True))

    def fingerprint(self) -> str:
        """Hash of tensor names and shapes; layouts with equal hashes can exchange vectors."""
        shapes = [(name, tuple(t.shape)) for name, t in zip(self.names, self._tensors, strict=True)]
        return hashlib.blake2b(repr(shapes).encode(), digest_size=16).hexdigest()

    def mask_fingerprint(self) -> str:
        """Hash of the indices of trainable entries; empty if no mask freezes entries."""
        if not self.active:
            return ""
        digest = hashlib.blake2b(digest_size=16)
        for name, index in self.active.items():
            digest.update(f"{name} {len(index)} ".encode())
            digest.update(index.cpu().numpy().astype("<i8").tobytes())
        return digest.hexdigest()


def _entries(tensor: Tensor, index: Tensor | None) -> Tensor:
    flat = tensor.reshape(-1)
    return flat if index is None else flat.index_select(0, index)


def _put(tensor: Tensor, index: Tensor | None, values: Tensor) -> None:
    if index is None:
        tensor.copy_(values)
    elif tensor.is_contiguous():
        tensor.view(-1).scatter_(0, index, values.to(tensor.dtype))
    else:
        tensor.put_(index, values.to(tensor.dtype))
