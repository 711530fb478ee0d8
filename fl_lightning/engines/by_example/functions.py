"""Which of PyTorch's functions a training step calls, with what: the program that Python makes of it.

Two batches of different sizes lead to one program if the calls are the same but for numbers and
shapes that grow with the batch. Functions themselves treat batches of all sizes alike; what they are
made of inside (a view, or a copy where one example happens to lie in memory that way) does not count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fl_lightning.engines.by_example.seen import Differs, degree_of

# Ask for what tensors are; what is done with the answer shows in other calls.
_ASKING = frozenset(["__get__", "size", "dim", "__len__", "numel", "is_floating_point", "stride"])


@dataclass(frozen=True)
class FunctionCall:
    """A call of one of PyTorch's functions.

    Attributes:
        name: of the function.
        values: numbers and the like among the arguments, and numbers of tensors in the order in
            which they turned up.
        shapes: of the tensors that came out.
    """

    name: str
    values: list[Any]
    shapes: list[tuple[int, ...]]


@dataclass
class Functions:
    """The calls of a step on a batch.

    Attributes:
        size: examples in the batch.
        calls: in their order.
    """

    size: int
    calls: list[FunctionCall] = field(default_factory=list)

    def check(self, other: Functions) -> list[int]:
        """Check that these and another batch's are one program.

        Returns:
            For each number in the program the power of the batch's size that it is proportional to.

        Raises:
            Differs: if they are not.
        """
        sizes, degrees = (self.size, other.size), list[int]()
        for one, two in zip(self.calls, other.calls, strict=False):
            if one.name != two.name or len(one.values) != len(two.values):
                raise Differs(_what(one.name, two.name, *sizes))
            for value, twin in zip(one.values, two.values, strict=True):
                degrees.append(degree_of(value, twin, *sizes))
            _check_shapes(one, two, *sizes)
        if len(self.calls) != len(other.calls):
            raise Differs(_what("", "", *sizes))
        return degrees


def _check_shapes(one: FunctionCall, two: FunctionCall, size: int, other: int) -> None:
    pairs = list(zip(one.shapes, two.shapes, strict=False))
    alike = len(one.shapes) == len(two.shapes) and all(len(a) == len(b) for a, b in pairs)
    lengths = [length for a, b in pairs for length in zip(a, b, strict=False)]
    if not alike or any(a != b and a * other != b * size for a, b in lengths):
        raise Differs(f"{one.name} makes other shapes of {other} examples than of {size}")


def _what(one: str, two: str, size: int, other: int) -> str:
    text = f"training_step does other things with {other} examples than with {size}"
    return f"{text} ({two} instead of {one})" if one != two else text


class FunctionRecorder(TorchFunctionMode):
    """Notes the functions that the code inside it calls.

    Args:
        size: examples in the batch.

    Example:
        >>> with FunctionRecorder(2) as recorder:
        ...     _ = torch.ones(2, 3).mean()
        >>> [(call.name, call.values, call.shapes) for call in recorder.functions.calls]
        [('ones', [2, 3], [(2, 3)]), ('mean', ['tensor 0'], [()])]
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.functions = Functions(size)
        self._numbers: dict[int, int] = {}
        self._alive: list[Tensor] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run the function and note it."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        values: list[Any] = []
        if name not in _ASKING:
            self._note(args, values)
            self._note([kwargs[key] for key in sorted(kwargs)], values)
        result = func(*args, **kwargs)
        if name not in _ASKING:
            shapes = [tuple(tensor.shape) for tensor in _tensors(result)]
            for tensor in _tensors(result):
                self._number(tensor)
            self.functions.calls.append(FunctionCall(name, values, shapes))
        return result

    def _note(self, value: Any, values: list[Any]) -> None:
        """Write down an argument, part by part."""
        if isinstance(value, Tensor):
            values.append(f"tensor {self._number(value)}")
        elif isinstance(value, (list, tuple)):
            for part in value:
                self._note(part, values)
        elif isinstance(value, slice):
            values += [value.start, value.stop, value.step]
        elif isinstance(value, dict):
            self._note([value[key] for key in sorted(value, key=str)], values)
        elif value is None or isinstance(value, (bool, int, float, str, torch.dtype)):
            values.append(value)
        else:
            values.append(type(value).__name__)

    def _number(self, tensor: Tensor) -> int:
        if id(tensor) not in self._numbers:
            self._alive.append(tensor)  # so that no other one gets its identity
        return self._numbers.setdefault(id(tensor), len(self._numbers))


def _tensors(value: Any) -> Sequence[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for part in value for tensor in _tensors(part)]
    return []
