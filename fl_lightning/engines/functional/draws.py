"""Random numbers of a training step as inputs: recorded once, drawn outside, and replayed inside.

`DrawRecorder` works below autograd. It sees every operator that draws random numbers, also inside
PyTorch's own functions (dropout in attention), with its distribution and shape. The same calls on a
generator in the same state give identical numbers, so the numbers can be drawn outside of the step, for
each client from its own generator.

Under `vmap` and in a compiled graph there is no generator per client. There `ReplayedDraws` replaces
each random function by its definition over given numbers: dropout is ``x · noise / (1 - p)``. It
leaves unknown functions alone; `vmap` then raises, and the run falls back to the sequential engine.
"""

from __future__ import annotations

import math
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - its usual name
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fl_lightning.engines.functional import CannotStack

# Per operator: the tensor method that draws the same numbers, and the positions of the
# distribution's parameters among the operator's arguments.
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
    """One recorded call of an operator that draws random numbers: distribution, shape and layout.

    Attributes:
        method: tensor method that draws, e.g. ``bernoulli_``; ``native_dropout`` for CUDA's dropout.
        parameters: parameters of the distribution.
        shape: shape of the result.
        order: axes of the result by decreasing stride.
        dtype: data type of the result.
        device: device of the result.
    """

    method: str
    parameters: tuple[Any, ...]
    shape: tuple[int, ...]
    order: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def again(self, shape: Sequence[int] | None = None) -> Tensor:
        """Draw random numbers as in the recorded call, from the global generator; other shapes are possible.

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
        """Fill a tensor in place with random numbers from the recorded distribution."""
        if self.method == "native_dropout":
            mask = torch.native_dropout(torch.ones_like(empty), self.parameters[0], True)[1]
            return empty.copy_(mask)
        drawn: Tensor = getattr(empty, self.method)(*self.parameters)
        return drawn


class DrawRecorder(TorchDispatchMode):
    """Records all random draws inside its context.

    Raises:
        CannotStack: if a draw depends on the values of a tensor, or uses a generator of the module.

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
        """Run the operator, and record it if it draws random numbers."""
        result = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags:
            self._note(func, args, kwargs or {}, result)
        return result

    def _note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        name = func._schema.name
        key = f"{name}.{func._overloadname}".removesuffix(".default")
        given = [value for value in args if isinstance(value, torch.Generator)]
        generator = kwargs.get("generator", given[0] if given else None)
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


_ATTENTION = F.scaled_dot_product_attention
_DROPOUTS = {F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, torch.dropout, torch.feature_dropout}
_ALPHA_DROPOUTS = {F.alpha_dropout, F.feature_alpha_dropout, torch.alpha_dropout}
_SOURCES = {
    torch.Tensor.bernoulli_,
    torch.Tensor.exponential_,
    torch.Tensor.normal_,
    torch.Tensor.random_,
    torch.Tensor.uniform_,
    torch.rand,
    torch.rand_like,
    torch.randint,
    torch.randint_like,
    torch.randn,
    torch.randn_like,
}


def _no_mode(_: Any) -> bool:
    return False


def _opened(function: Any) -> Any:
    """Copy a function of `torch.nn.functional` so that a `TorchFunctionMode` sees the calls inside it.

    PyTorch passes such a function to the mode as a whole and then runs it without the mode. The copy
    skips this step.
    """
    names = {name: value for name, value in vars(F).items() if name != "__name__"}
    asks = {"has_torch_function": _no_mode, "has_torch_function_unary": _no_mode}
    copy = types.FunctionType(
        function.__code__, names | asks, function.__name__, function.__defaults__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


_OPENED = {f: _opened(f) for f in (F.multi_head_attention_forward, F.gumbel_softmax)}


class DropoutWatch(TorchFunctionMode):
    """Records whether a dropout function is called inside its context, even if switched off.

    Example:
        >>> with DropoutWatch() as watch:
        ...     _ = torch.nn.functional.dropout(torch.ones(2), 0.0)
        >>> watch.has_seen_one
        True
    """

    def __init__(self) -> None:
        super().__init__()
        self.has_seen_one = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run a function, and note whether it is a dropout."""
        is_one = func in _DROPOUTS | _ALPHA_DROPOUTS or func in _OPENED
        self.has_seen_one = self.has_seen_one or is_one
        return func(*args, **(kwargs or {}))


class ReplayedDraws(TorchFunctionMode):
    """Replaces random draws inside its context by given numbers, one tensor per call.

    Args:
        draws: random numbers in the order of the calls.

    Example:
        >>> with ReplayedDraws([torch.tensor([1.0, 0.0])]):
        ...     torch.nn.functional.dropout(torch.tensor([3.0, 4.0]), 0.5)
        tensor([6., 0.])
    """

    def __init__(self, draws: Sequence[Tensor]) -> None:
        super().__init__()
        self._draws = draws
        self._position = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run a function; a random one is replaced by its definition over the given numbers."""
        kwargs = kwargs or {}
        if func in _SOURCES:
            # not written into the tensor of an in-place method, which vmap may not know as mapped:
            # a step that ignores the method's result shows a difference in the trial
            return self._next().clone()
        if func in _DROPOUTS:
            return self._dropout(*args, **kwargs)
        if func in _ALPHA_DROPOUTS:
            return self._alpha_dropout(*args, **kwargs)
        if func is _ATTENTION and kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0) > 0:
            with self:
                return _attention(*args, **kwargs)
        if func in _OPENED:
            with self:
                return _OPENED[func](*args, **kwargs)
        return func(*args, **kwargs)

    def _next(self) -> Tensor:
        self._position += 1
        return self._draws[self._position - 1]

    def _dropout(
        self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, **o: Any
    ) -> Tensor:
        training = o.get("train", training)
        if not training or p == 0:
            return input
        noise = torch.zeros_like(input) if p == 1 else self._next() / (1 - p)
        # for an example without a batch axis PyTorch draws numbers for a batch of one
        noise = noise.reshape(noise.shape[noise.ndim - input.ndim :])
        return input.mul_(noise) if inplace else input * noise

    def _alpha_dropout(
        self, input: Tensor, p: float = 0.5, training: bool = False, inplace: bool = False, **o: Any
    ) -> Tensor:
        """Compute `alpha_dropout`, which keeps mean and variance: Klambauer et al. 2017, section 2 (α' = -1.7581)."""
        training = o.get("train", training)
        if not training or p == 0:
            return input
        if p == 1:
            return input.mul_(0) if inplace else input * 0
        alpha = 1.7580993408473766
        scale = 1 / math.sqrt((alpha * alpha * p + 1) * (1 - p))
        noise = self._next()
        shift = (noise - 1) * (alpha * scale) + alpha * scale * p
        return input.mul_(noise * scale).add_(shift) if inplace else input * (noise * scale) + shift


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute softmax(q kᵀ scale + mask) v, with dropout on the softmax."""
    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key, value = (t.repeat_interleave(groups, -3) for t in (key, value))
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = _product(query, key.transpose(-2, -1)) * scale
    if is_causal:
        shape = scores.shape[-2:]
        attn_mask = torch.ones(shape, dtype=torch.bool, device=query.device).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(attn_mask.logical_not(), -math.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    return _product(F.dropout(scores.softmax(-1), dropout_p), value)


# Largest number of multiplications of a matrix product that counts as small.
_FEW = 1024


def _is_small(one: Tensor, other: Tensor) -> bool:
    return one.shape[-2] * one.shape[-1] * other.shape[-1] <= _FEW


def _product(one: Tensor, other: Tensor) -> Tensor:
    if torch.compiler.is_compiling() and _is_small(one, other):
        return (one.unsqueeze(-1) * other.unsqueeze(-3)).sum(-2)
    return one @ other


def _compiled_attention(query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    if torch.compiler.is_compiling() and _is_small(query, key.transpose(-2, -1)):
        return _attention(query, key, *args, **kwargs)
    return _ATTENTION(query, key, *args, **kwargs)


@contextmanager
def small_attention() -> Iterator[None]:
    """Replace attention over a few tokens by sums of products, which the compiler fuses, while the block runs.

    The compiler fuses sums with the operations around them. Library calls for products of ten numbers,
    one for each example and head, took half the time of a TabTransformer's step in slots.
    """
    F.scaled_dot_product_attention = _compiled_attention
    try:
        yield
    finally:
        F.scaled_dot_product_attention = _ATTENTION
