"""The largest eigenvalue of the Hessian of the validation loss by α.

When it grows, α sits in a sharp minimum: taking the largest operation of each edge changes α a lot,
and the network that comes out is worse than the search believed.

    exact    all of H, a product with a unit vector at a time, then its eigenvalues
    power    v ← Hv / ‖Hv‖; if the eigenvalue of the largest size is negative, once more on H - λI

Source: Zela et al. 2020, Understanding and Robustifying Differentiable Architecture Search, section 4.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.nas.relax.bilevel import Tensors, leaves

MOST_POWER_STEPS = 200
TOLERANCE = 1e-6

Product = Callable[[Tensor], Tensor]


def largest_eigenvalue(
    loss: Callable[[Tensors], Tensor],
    alphas: Tensors,
    *,
    how: Literal["exact", "power"] = "exact",
    generator: torch.Generator | None = None,
) -> float:
    """Return the largest eigenvalue (not the largest size) of the Hessian of a loss.

    Args:
        loss: of the architecture parameters; every call the same function.
        alphas: where.
        how: ``exact`` costs a backward pass for each number of α, ``power`` some tens of them.
        generator: of the first vector of ``power``, on the CPU.

    Raises:
        ConfigurationError: if `how` is something else.
        ValueError: if the Hessian is not finite, or ``power`` has no generator.
    """
    if how not in ("exact", "power"):
        raise ConfigurationError(f"how must be exact or power, got {how!r}")
    product, like = hessian_product(loss, alphas)
    if how == "power":
        if generator is None:
            raise ValueError("the power iteration draws its first vector: give it a generator")
        return _by_power(product, like, generator)
    hessian = torch.stack([product(unit) for unit in torch.eye(len(like)).to(like)])
    if not hessian.isfinite().all():
        raise ValueError("the Hessian by alpha holds a number that is not finite")
    # of both triangles' mean: rounding leaves them a little apart
    return float(torch.linalg.eigvalsh((hessian + hessian.T) / 2)[-1])


def hessian_product(loss: Callable[[Tensors], Tensor], alphas: Tensors) -> tuple[Product, Tensor]:
    """Return v ↦ Hv, and a vector like v: the numbers of all α in one row."""
    a = leaves(alphas)
    values = list(a.values())
    gradients = torch.autograd.grad(
        loss(a), values, create_graph=True, allow_unused=True, materialize_grads=True
    )
    flat = torch.cat([gradient.flatten() for gradient in gradients])

    def product(vector: Tensor) -> Tensor:
        if not flat.requires_grad:  # a loss that is linear in α
            return torch.zeros_like(vector)
        parts = torch.autograd.grad(
            flat, values, vector, retain_graph=True, allow_unused=True, materialize_grads=True
        )
        return torch.cat([part.flatten() for part in parts])

    return product, flat.detach()


def _by_power(product: Product, like: Tensor, generator: torch.Generator) -> float:
    first = torch.randn(len(like), generator=generator, dtype=torch.float64).to(like)
    dominant = _dominant(product, first)
    if dominant >= 0:
        return dominant
    return dominant + _dominant(lambda vector: product(vector) - dominant * vector, first)


def _dominant(product: Product, vector: Tensor) -> float:
    """Return the eigenvalue of the largest size."""
    eigenvalue = 0.0
    vector = vector / vector.norm()
    for _ in range(MOST_POWER_STEPS):
        image = product(vector)
        before, eigenvalue = eigenvalue, float(vector @ image)
        norm = image.norm()
        if not norm.isfinite():
            raise ValueError("the Hessian by alpha holds a number that is not finite")
        if norm == 0 or abs(eigenvalue - before) <= TOLERANCE * abs(eigenvalue):
            break
        vector = image / norm
    return eigenvalue
