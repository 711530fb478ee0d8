"""The largest eigenvalue of the Hessian of the validation loss by α.

When it grows, α sits in a sharp minimum: taking the largest operation of each edge changes α a lot,
and the network that comes out is worse than the search believed.

    exact    all of H, a product with a unit vector at a time, then its eigenvalues
    lanczos  H on the space of v, Hv, H²v, …, of at most 32 dimensions: the ends of its spectrum are
             found long before the rest

Source: Zela et al. 2020, Understanding and Robustifying Differentiable Architecture Search, section 4;
Golub, Van Loan, Matrix Computations, section 10.1, with full orthogonalisation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.nas.relax.bilevel import Tensors, leaves

MOST_LANCZOS_STEPS = 32

Product = Callable[[Tensor], Tensor]


def largest_eigenvalue(
    loss: Callable[[Tensors], Tensor],
    alphas: Tensors,
    *,
    how: Literal["exact", "lanczos"] = "exact",
    generator: torch.Generator | None = None,
) -> float:
    """Return the largest eigenvalue (not the largest size) of the Hessian of a loss.

    Args:
        loss: of the architecture parameters; every call the same function.
        alphas: where.
        how: ``exact`` costs a backward pass for each number of α, ``lanczos`` 32 at most.
        generator: of the first vector of ``lanczos``, on the CPU.

    Raises:
        ConfigurationError: if `how` is something else.
        ValueError: if the Hessian is not finite, or ``lanczos`` has no generator.
    """
    if how not in ("exact", "lanczos"):
        raise ConfigurationError(f"how must be exact or lanczos, got {how!r}")
    product, like = hessian_product(loss, alphas)
    if how == "lanczos":
        if generator is None:
            raise ValueError("lanczos draws its first vector: give it a generator")
        first = torch.randn(len(like), generator=generator, dtype=torch.float64)
        return _largest(_projected(product, first.to(like)))
    return _largest(torch.stack([product(unit) for unit in torch.eye(len(like)).to(like)]))


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


def _projected(product: Product, first: Tensor) -> Tensor:
    """Return the Hessian on the space that its powers make of a vector."""
    basis = (first / first.norm())[:, None]
    images = product(basis[:, 0])[:, None]
    while basis.shape[1] < min(len(first), MOST_LANCZOS_STEPS):
        rest = images[:, -1]
        for _ in range(2):  # twice is enough: once leaves what rounding made
            rest = rest - basis @ (basis.T @ rest)
        if not rest.norm() > torch.finfo(rest.dtype).eps * images[:, -1].norm() * len(first):
            break  # the space is closed: nothing beyond has to do with the vector
        basis = torch.cat([basis, (rest / rest.norm())[:, None]], 1)
        images = torch.cat([images, product(basis[:, -1])[:, None]], 1)
    projected: Tensor = basis.T @ images
    return projected


def _largest(matrix: Tensor) -> float:
    if not matrix.isfinite().all():
        raise ValueError("the Hessian by alpha holds a number that is not finite")
    # of both triangles' mean: rounding leaves them a little apart
    return float(torch.linalg.eigvalsh((matrix + matrix.T) / 2)[-1])
