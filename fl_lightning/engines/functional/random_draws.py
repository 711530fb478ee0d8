"""Which random numbers a training step draws, so that they can be drawn again elsewhere.

A recorder below autograd sees every operator that draws, however deep in PyTorch it is called
(dropout inside attention), with the distribution and the shape of what it draws. The same calls on
a generator in the same state give the same bits: so draws can be made outside of a step, for many
clients from their own generators, and handed to it as inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fl_lightning.engines.cannot_stack import CannotStack

# By operator: the method that draws the same numbers into a tensor, and where the distribution's
# parameters are among the operator's arguments.
_METHODS: dict[str, tuple[str, slice]] = {
    "aten::bernoulli_.float": ("bernoulli_", slice(1, 2)),
    "aten::exponential_": ("exponential_", slice(1, 2)),
    "aten::native_dropout": ("native_dropout", slice(1, 2)),
    "aten::normal_": ("normal_", slice(1, 3)),
    "aten::rand": ("uniform_", slice(0)),
    "aten::rand_like": ("uniform_", slice(0)),
    "aten::random_.from": ("random_", slice(1, 3)),
    "aten::random_.to": ("random_", slice(1, 2)),
    "aten::randint": ("random_", slice(0, 1)),
    "aten::randint.low": ("random_", slice(0, 2)),
    "aten::randint_like": ("random_", slice(1, 2)),
    "aten::randint_like.low_dtype": ("random_", slice(1, 3)),
    "aten::randn": ("normal_", slice(0)),
    "aten::randn_like": ("normal_", slice(0)),
    "aten::uniform_": ("uniform_", slice(1, 3)),
}


@dataclass(frozen=True)
class Draw:
    """One call that draws.

    Attributes:
        method: of a tensor, e.g. ``bernoulli_``; ``native_dropout`` for CUDA's own dropout.
        parameters: of the distribution.
        shape: of what is drawn.
        order: the axes by falling stride.
        dtype: of what is drawn.
        device: where.
    """

    method: str
    parameters: tuple[Any, ...]
    shape: tuple[int, ...]
    order: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def again(self, shape: Sequence[int] | None = None) -> Tensor:
        """Draw from the global generator, in another shape if one is given.

        Example:
            >>> draw = Draw("uniform_", (), (2,), (0,), torch.float32, torch.device("cpu"))
            >>> seeded = torch.manual_seed(0)
            >>> first = torch.rand(2)
            >>> seeded = torch.manual_seed(0)
            >>> torch.equal(draw.again(), first)
            True
        """
        shape = self.shape if shape is None else shape
        empty = torch.empty_permuted(tuple(shape), self.order, dtype=self.dtype, device=self.device)
        return self.into(empty)

    def into(self, empty: Tensor) -> Tensor:
        """Draw into a tensor."""
        if self.method == "native_dropout":
            mask = torch.native_dropout(torch.ones_like(empty), self.parameters[0], True)[1]
            return empty.copy_(mask)
        drawn: Tensor = getattr(empty, self.method)(*self.parameters)
        return drawn


class DrawRecorder(TorchDispatchMode):
    """Notes the draws of the code inside it.

    Raises:
        CannotStack: for a draw whose numbers depend on values, or on a generator of its own.

    Example:
        >>> with DrawRecorder() as recorder:
        ...     _ = torch.nn.functional.dropout(torch.ones(2, 3), 0.25)
        >>> [(draw.method, draw.parameters, draw.shape) for draw in recorder.draws]
        [('bernoulli_', (0.75,), (2, 3))]
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.draws: list[Draw] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run the operator and note it if it draws."""
        result = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags:
            self._note(func, args, kwargs or {}, result)
        return result

    def _note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        name = func._schema.name
        key = f"{name}.{func._overloadname}".removesuffix(".default")
        generator = kwargs.get("generator", next((a for a in args if _is_generator(a)), None))
        if key not in _METHODS or generator is not None:
            own = " with a generator of its own" if generator is not None else ""
            raise CannotStack(f"training_step draws by {name.removeprefix('aten::')}{own}")
        method, places = _METHODS[key]
        drawn = result[1] if method == "native_dropout" else result
        dtype = result[0].dtype if method == "native_dropout" else result.dtype
        strides = drawn.stride()
        order = tuple(sorted(range(drawn.ndim), key=lambda axis: -strides[axis]))
        parameters = args[places]
        if key == "aten::randint":
            parameters = (0, *parameters)
        self.draws.append(Draw(method, parameters, tuple(drawn.shape), order, dtype, drawn.device))


def _is_generator(value: Any) -> bool:
    return isinstance(value, torch.Generator)
