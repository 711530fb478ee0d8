"""Base of the masked optimizers, which apply an update rule of PyTorch to the active entries of a mask.

    v = p[active],   v ← rule(v, g[active], state),   p[active] = v

The rule is the function of `torch.optim` that the dense optimizer calls, so that the arithmetic is
PyTorch's. A frozen entry gets no gradient, no decay and no momentum. The state of a tensor has one
number per active entry.

Masks are stored in the parameter groups, so that `state_dict`, pickling and copying include them.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from fl_lightning.sparsity.optimizers.active_entries import ActiveChunks, Split, put, take

# by name or parameter, or one per parameter in the optimizer's order; None: all entries train
Masks: TypeAlias = Mapping[Any, Tensor | None] | Sequence[Tensor | None]

# a parameter, its gradient and indices of its frozen entries
Part: TypeAlias = tuple[Tensor, Tensor, Any]


_UNSUPPORTED = ("capturable", "differentiable")  # options of torch


class MaskedOptimizer(Optimizer, ABC):
    """Base class of sparse optimizers: PyTorch's update rules on only those entries that masks mark as active.

    A subclass has one of PyTorch's optimizers as its second base and defines `move`.

    Args:
        params: parameters, named parameters or groups, as for PyTorch.
        args: further options of PyTorch's optimizer.
        masks: masks of the entries that train, see `set_masks`; all train if None.
        options: further options of PyTorch's optimizer.

    Raises:
        ValueError: if an option is out of range or a mask does not fit.
    """

    _chunks: ActiveChunks | None = None

    def __init__(
        self, params: ParamsT, *args: Any, masks: Masks | None = None, **options: Any
    ) -> None:
        if refused := [name for name in _UNSUPPORTED if options.get(name)]:
            raise ValueError(
                f"{type(self).__name__} does not support {' and '.join(refused)} of torch's optimizer: leave it out"
            )
        super().__init__(params, *args, **options)
        self._step_supports_amp_scaling = False  # else GradScaler would leave unscaling to the step
        self.set_masks(masks)

    @abstractmethod
    def move(
        self,
        group: dict[str, Any],
        owners: list[Tensor],
        values: list[Tensor],
        grads: list[Tensor],
    ) -> None:
        """Apply the update rule of PyTorch's optimizer to the given values, in place.

        Args:
            group: the parameter group with the options.
            owners: the parameters that the values belong to; their state is ``self.state[owner]``.
            values: whole parameters, or the active entries of each, shape (k,).
            grads: gradients of the same shapes; do not keep them, their memory is reused.
        """

    def move_in_place(
        self, group: dict[str, Any], parts: list[tuple[Tensor, Tensor]]
    ) -> list[tuple[Tensor, Tensor]]:
        """Update active entries by a faster kernel, if a subclass has one; return the parameters still to update.

        Args:
            group: the parameter group with the options.
            parts: parameters and indices of their active entries.
        """
        return parts

    def initial_state(self, key: str, stayed: Tensor) -> Tensor:
        """Return the optimizer state with which newly active entries start, a scalar; 0 by default.

        Args:
            key: name of the state, e.g. ``exp_avg``.
            stayed: state of the entries that remain active, shape (n,), n at least 1.
        """
        return stayed.new_zeros(())

    @property
    def masks(self) -> dict[Tensor, Tensor]:
        """Masks by parameter, bool, True for entries that train; only of parameters with frozen entries."""
        pairs = chain.from_iterable(map(_pairs, self.param_groups))
        return {param: split.mask(param) for param, split in pairs if not split.is_whole}

    @property
    def active(self) -> dict[Tensor, Tensor]:
        """Flat indices of active entries by parameter, shape (k,); only of parameters with frozen entries."""
        pairs = chain.from_iterable(map(_pairs, self.param_groups))
        return {p: split.indices(p) for p, split in pairs if not split.is_whole}

    @torch.no_grad()
    def set_masks(self, masks: Masks | None) -> None:
        """Replace all masks; all entries of a parameter without a mask train.

        Entries that remain active keep their state; entries that become active start with
        `initial_state`. A tensor in which no entry remains active starts without state.

        Args:
            masks: bool tensors of the parameters' shapes, True for entries that train: by parameter, by
                name (if the optimizer was given named parameters, which needs torch 2.6), or in the
                optimizer's order. With None all entries train.

        Raises:
            ValueError: if a parameter is unknown, or the number, a shape or a dtype does not fit.
        """
        chosen = iter(self._in_order(masks))
        for group in self.param_groups:
            splits = []
            for param, before in _pairs(group):
                after = Split.of(next(chosen)).fitted(param)
                self._carry_over(param, before, after)
                splits.append(after)
            _store(group, splits)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, whose entries all train until `set_masks`.

        Raises:
            ValueError: if an option is not finite, which torch accepts.
        """
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for name in ("lr", "momentum", "weight_decay"):
            if not math.isfinite(group.get(name, 0.0)):
                raise ValueError(f"{name} must be finite, got {group[name]}")
        if "active" not in group:
            _store(group, [Split()] * len(group["params"]))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load state, options and masks; a dense optimizer's state is reduced to the currently active entries.

        Raises:
            ValueError: if masks do not fit the parameters.
        """
        current = self.masks
        super().load_state_dict(state_dict)
        is_dense = not all("active" in group for group in self.param_groups)
        for group in self.param_groups:
            if is_dense:
                _store(group, [Split()] * len(group["params"]))
            _store(group, [split.fitted(param) for param, split in _pairs(group)])
        if is_dense:
            self.set_masks(current)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the active entries once; return the loss of the closure, or None without a closure."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._chunks is None:
            self._chunks = ActiveChunks()
        for number, group in enumerate(self.param_groups):
            parts = zip(group["params"], group["active"], group["frozen"], strict=True)
            with_grad = [part for part in parts if part[0].grad is not None]
            whole = [(p, p.grad, frozen) for p, active, frozen in with_grad if active is None]
            if whole:
                self._move_whole(group, whole)
            some = [(p, i) for p, i, _ in with_grad if i is not None and len(i)]
            some = self.move_in_place(group, some)
            for chunk in self._chunks.of(number, [p for p, _ in some], [i for _, i in some]):
                chunk.read()
                self.move(group, chunk.params, chunk.values, chunk.grads)
                chunk.write()
        return loss

    def _move_whole(self, group: dict[str, Any], parts: list[Part]) -> None:
        kept = [(p, frozen, take(p, frozen)) for p, _, frozen in parts if frozen is not None]
        params = [p for p, _, _ in parts]
        self.move(group, params, params, [grad for _, grad, _ in parts])
        for param, frozen, values in kept:
            put(param, frozen, values)

    def _carry_over(self, param: Tensor, before: Split, after: Split) -> None:
        """Convert a parameter's optimizer state when its mask changes: active entries keep it, new ones start."""
        if not self.state.get(param):
            return
        stays = before.mask(param) & after.mask(param)
        if not stays.any():
            del self.state[param]
            return
        for key, value in self.state[param].items():
            if isinstance(value, Tensor) and value.ndim:  # a count of steps has no axis
                whole = before.expanded(value, param)
                whole[~stays] = self.initial_state(key, whole[stays])
                self.state[param][key] = (
                    whole if after.active is None else take(whole, after.active)
                )

    def _in_order(self, masks: Masks | None) -> list[Tensor | None]:
        """Check the masks, and return them in the order of the parameters; None for a parameter without a mask."""
        params = [p for group in self.param_groups for p in group["params"]]
        names = list(chain.from_iterable(g.get("param_names", []) for g in self.param_groups))
        if isinstance(masks, Mapping):
            known = {param: param for param in params} | dict(zip(names, params, strict=False))
            _refuse_unknown([key for key in masks if key not in known], names)
            of_param = {known[key]: mask for key, mask in masks.items()}
            ordered = [of_param.get(param) for param in params]
        else:
            ordered = [None] * len(params) if masks is None else list(masks)
        if len(ordered) != len(params):
            raise ValueError(
                f"masks: {len(ordered)} are given for {len(params)} parameters: give one per parameter, or masks by name"
            )
        for number, (param, mask) in enumerate(zip(params, ordered, strict=True)):
            if mask is not None and (mask.dtype is not torch.bool or mask.shape != param.shape):
                raise ValueError(
                    f"masks: that of parameter {names[number] if names else number} must be bool of shape "
                    f"{tuple(param.shape)}, got {mask.dtype} of shape {tuple(mask.shape)}"
                )
        return ordered


def _pairs(group: dict[str, Any]) -> list[tuple[Tensor, Split]]:
    splits = map(Split, group["active"], group["frozen"])
    return list(zip(group["params"], splits, strict=True))


def _store(group: dict[str, Any], splits: list[Split]) -> None:
    group["active"] = [split.active for split in splits]
    group["frozen"] = [split.frozen for split in splits]


def _refuse_unknown(keys: list[Any], names: list[str]) -> None:
    if not keys:
        return
    shown = [key if isinstance(key, str) else f"a tensor {tuple(key.shape)}" for key in keys[:3]]
    remedy = (
        f"its parameters are {', '.join(names[:5])}{', …' if len(names) > 5 else ''}"
        if names
        else "to use names, give it module.named_parameters() (torch 2.6 or newer)"
    )
    raise ValueError(f"masks: the optimizer has no parameter {', '.join(shown)}; {remedy}")
