"""A run of a training step, operator by operator, with the gradients that it leads to.

A recorder below autograd sees every operator of the forward and of the backward pass, whichever code
calls it: layers, losses, hooks of tensors, functions with a backward pass of their own. What it notes
is a program of straight lines: what Python decided on the way has been decided.

Tensors are told apart by the memory that they lie in, because autograd wraps what it keeps for the
backward pass anew. Nothing that was made is freed before the record is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# Where a tensor lies: its storage, and which part of it as what.
Place = tuple[Any, ...]


@dataclass(frozen=True)
class Source:
    """Where an argument comes from.

    Attributes:
        number: of a tensor among all that the record knows, in the order in which they turned up.
        shape: of the tensor.
        dtype: of the tensor.
    """

    number: int
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Call:
    """An operator's call.

    Attributes:
        name: of the operator, with its overload, e.g. ``aten.sum.dim_IntList``.
        arguments: by name; a `Source` in place of each tensor.
        results: what came out: a `Source` for a tensor, None for anything else.
        written: the tensors that it has written to, as they are afterwards.
    """

    name: str
    arguments: dict[str, Any]
    results: list[Source | None]
    written: list[Source]


@dataclass
class Record:
    """What was seen.

    Attributes:
        size: examples in the batch.
        calls: in their order.
        given: by source number, tensors that no operator made: ``("batch", …)``, first and in their
            order, or ``("other", …)``.
        aliases: by source number, the storage that a tensor lies in.
        outputs: what the step came to, by name.
    """

    size: int
    calls: list[Call] = field(default_factory=list)
    given: dict[int, tuple[str, Tensor]] = field(default_factory=dict)
    aliases: dict[int, int] = field(default_factory=dict)
    outputs: dict[str, Source | None] = field(default_factory=dict)


class Recorder(TorchDispatchMode):
    """Notes the operators of the code inside it.

    Args:
        size: examples in the batch.
        batch: the batch's tensors.

    Attributes:
        record: what was seen so far.

    Example:
        >>> examples = torch.ones(3, 2)
        >>> with Recorder(3, [examples]) as recorder:
        ...     loss = (2 * examples).mean()
        >>> [call.name for call in recorder.record.calls]
        ['aten.mul.Tensor', 'aten.mean.default']
    """

    def __init__(self, size: int, batch: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.record = Record(size)
        self._numbers: dict[Place, int] = {}
        self._count = 0
        self._alive: list[Tensor] = []
        for tensor in batch:
            self.record.given[self._new(tensor)] = "batch", tensor

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run the operator and note it."""
        kwargs = kwargs or {}
        schema = func._schema
        names = [argument.name for argument in schema.arguments]
        given = dict(zip(names, args, strict=False)) | kwargs
        arguments = {name: self._noted(value) for name, value in given.items()}
        result = func(*args, **kwargs)
        written = [
            tensor
            for a in schema.arguments
            if a.alias_info is not None and a.alias_info.is_write and a.name in given
            for tensor in _leaves(given[a.name])
            if isinstance(tensor, Tensor)
        ]
        now = [self._fresh(tensor) for tensor in written]
        leaves = _leaves(result)
        self.record.calls.append(
            Call(
                name=str(func),
                arguments=arguments,
                results=[self._result(leaf, written) for leaf in leaves],
                written=now,
            )
        )
        return result

    def source(self, tensor: Tensor) -> Source:
        """Return where a tensor comes from."""
        place = _place(tensor)
        number = self._numbers.get(place)
        if number is None:
            number = self._new(tensor)
            self.record.given[number] = "other", tensor
        return Source(number, tuple(tensor.shape), tensor.dtype)

    def written(self, tensors: Mapping[str, Tensor]) -> list[str]:
        """Return which of some tensors, by name, an operator has written to, or to parts of them."""
        numbers = [source.number for call in self.record.calls for source in call.written]
        storages = {self.record.aliases[number] for number in numbers}
        return [name for name, tensor in tensors.items() if _place(tensor)[0] in storages]

    def _result(self, value: Any, written: Sequence[Tensor]) -> Source | None:
        if not isinstance(value, Tensor):
            return None
        if any(value is tensor for tensor in written):
            return self.source(value)
        return self._fresh(value)

    def _fresh(self, tensor: Tensor) -> Source:
        return Source(self._new(tensor), tuple(tensor.shape), tensor.dtype)

    def _noted(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self.source(value)
        if isinstance(value, (list, tuple)):
            return [self._noted(part) for part in value]
        return value

    def _new(self, tensor: Tensor) -> int:
        number, self._count = self._count, self._count + 1
        place = _place(tensor)
        self._numbers[place] = number
        self.record.aliases[number] = place[0]
        self._alive.append(tensor)
        return number


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, (list, tuple)):
        return [leaf for part in value for leaf in _leaves(part)]
    return [value]


def _place(tensor: Tensor) -> Place:
    if tensor.layout != torch.strided or not tensor.numel():
        return id(tensor), 0, tuple(tensor.shape), (), tensor.dtype
    storage = tensor.untyped_storage()._cdata  # not its address, which "meta" tensors do not have
    shape, strides = tuple(tensor.shape), tuple(tensor.stride())
    return storage, tensor.storage_offset(), shape, strides, tensor.dtype
