"""How far apart the results of two ways to train a client are, and what rounding alone makes.

    difference = ‖found - expected‖ / ‖expected‖

of the update; of buffers and of what a client keeps for itself likewise, by what training changed.

Both ways do the same arithmetic in another order, so that a step differs by some units of rounding.
Measured on digits with a linear model, an MLP, convolutions with and without batch norm and attention,
under SGD (rate 1e-5 to 0.5, with and without momentum), Adam and AdamW, 5, 50 and 200 local steps:

    float32     2e-7 to 1e-5 where training is smooth, after 200 steps as after 5;
                1e-4 with a rate of 1e-5, whose steps the weights themselves round;
                up to 1 and more where training is not (SGD with rate 0.5 and momentum 0.9)
    bf16-mixed  0.01 to 0.1; up to 1 likewise
    float64     1e-16 to 1e-11, with Adam before batch norm 5e-10; up to 0.1 likewise. Logged losses 1e-7

So no bound that grows with the number of steps would be one. `Rounding.share` is about what smooth
training never exceeds (1e-4, 0.1, and 1e-6 in float64, where a step may take its loss in float32), and
beyond it what rounding makes of this client is found by training it from a start that is off by one
rounding, `nudged`. In all cases above the share this made 0.9 to 40 times the difference of both ways.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fl_lightning.core.seeds import torch_generator
from fl_lightning.core.update import ClientUpdate, GlobalModel
from fl_lightning.federation.execution.engine_options import FULL_PRECISIONS

UPDATE = "update"
_HALF = 0.1
# Of what training has changed of a vector, its rounding is at most so small a share of it all.
_LEAST_CHANGE = 0.01


@dataclass(frozen=True)
class Trained:
    """What training a client has come to.

    Attributes:
        update: its.
        own: what it is to keep for itself, shape (o,).
        own_start: what that was before, shape (o,).
    """

    update: ClientUpdate
    own: Tensor
    own_start: Tensor


@dataclass(frozen=True)
class Rounding:
    """How coarse numbers are.

    Attributes:
        unit: the relative error of one operation, about.
        share: by which an update may differ without a closer look.
    """

    unit: float
    share: float

    @classmethod
    def of(cls, precision: str | int | None, module: nn.Module) -> Rounding:
        """Return that of a module under a Trainer's precision."""
        if precision not in FULL_PRECISIONS:
            return cls(2.0**-8, _HALF)
        floating = [p for p in module.parameters() if p.is_floating_point()]
        fewest_bytes = min(p.itemsize for p in floating)
        if fewest_bytes < 4:  # a frozen part in half precision
            return cls(2.0**-8, _HALF)
        if fewest_bytes == 8:  # a step may still take its loss in float32
            return cls(2.0**-52, 1e-6)
        if _has_coarse_products(floating):
            return cls(2.0**-10, 0.02)
        return cls(2.0**-23, 1e-4)


def _has_coarse_products(params: Sequence[Tensor]) -> bool:
    """Return whether products of float32 may be made with fewer digits (TF32)."""
    try:
        if torch.get_float32_matmul_precision() != "highest":
            return True
        is_allowed = torch.backends.cudnn.allow_tf32
    except RuntimeError:  # PyTorch knows two ways to set it and refuses to read a mixture
        return True
    has_convolutions = any(param.ndim >= 3 for param in params)
    return params[0].device.type == "cuda" and is_allowed and has_convolutions


def differences(
    expected: Trained, found: Trained, start: GlobalModel, num_seen: int
) -> dict[str, float]:
    """Return how far two results are apart, by what it is that differs.

    Args:
        expected: of one way.
        found: of the other.
        start: from which both began.
        num_seen: examples in all batches.

    Returns:
        Shares of the expected one: 0 where nothing differs, infinite where one is missing.
    """
    one, other = expected.update, found.update
    of_vectors = {
        UPDATE: _apart(one.delta, other.delta, torch.zeros_like(one.delta), 0.0),
        "buffers": _apart(one.buffers, other.buffers, start.buffers, _LEAST_CHANGE),
        "personal part": _apart(expected.own, found.own, expected.own_start, _LEAST_CHANGE),
    }
    return of_vectors | _of_metrics(one.metrics, other.metrics, num_seen)


def _apart(one: Tensor, other: Tensor, before: Tensor, least: float) -> float:
    if one.shape != other.shape:
        return math.inf
    gap = float((other - one).norm())
    if gap == 0:
        return 0.0
    changed = float((one - before).norm()) if before.shape == one.shape else 0.0
    return _share(gap, max(changed, least * float(one.norm())))


def _of_metrics(
    one: Mapping[str, Tensor], other: Mapping[str, Tensor], num_seen: int
) -> dict[str, float]:
    """Compare logged values; an example or two may be counted otherwise, at the edge of a class."""
    shares = {}
    for name in sorted({*one, *other}):
        if name not in one or name not in other:
            shares[f"logged {name}"] = math.inf
            continue
        value, second = float(one[name]), float(other[name])
        both_nan = math.isnan(value) and math.isnan(second)
        edge = 0.0 if name == "train/loss" else 2 / num_seen * max(1.0, abs(value))
        gap = 0.0 if value == second or both_nan else abs(second - value)
        shares[f"logged {name}"] = _share(gap - edge, abs(value)) if gap > edge else 0.0
        if math.isnan(gap):
            shares[f"logged {name}"] = math.inf
    return shares


def _share(gap: float, whole: float) -> float:
    share = gap / whole if whole else math.inf
    return share if math.isfinite(share) else math.inf


def nudged(model: GlobalModel, moved: Tensor | None, unit: float, *, seed: int) -> GlobalModel:
    """Return a model whose parameters have moved up or down by one rounding, by coins.

    Where a parameter is 0 or nearly so, by that of an average one or of what it moves in training.

    Args:
        model: as it is.
        moved: by what a client's training moves them, shape (k,); None if that is not known.
        unit: the relative error of one operation.
        seed: of the coins.
    """
    params = model.params
    coins = torch.randint(2, params.shape, generator=torch_generator(seed, "nudge"))
    size = params.square() + params.square().mean()
    if moved is not None:
        size += moved.square().mean()
    up_or_down = (2 * coins - 1).to(params)
    return GlobalModel(params + unit * size.sqrt() * up_or_down, model.buffers)
