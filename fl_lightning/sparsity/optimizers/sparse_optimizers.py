"""SGD with momentum, and AdamW, on the entries that a mask allows; c is the mask, 0 or 1.

    SGD     m ← μ m + (1 - τ) c · (g + λ p),      p ← p - η c · m
    AdamW   p ← p - c η λ p,   m ← β₁ m + (1 - β₁) g,   v ← β₂ v + (1 - β₂) g²,   p ← p - c η m̂ / (√v̂ + ε)

Sources: Iurada, Ciccone, Tommasi 2025, "Efficient Model Editing with Task-Localized Sparse Fine-tuning",
ICLR, section 4 (θ ← θ - γ [c · ∇]); Loshchilov, Hutter 2019, "Decoupled Weight Decay Regularization", ICLR,
algorithm 2, as in torch.
Differs: the mask also gates decay and momentum. If it masked the gradient alone, weight decay would move the
frozen entries.
"""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor
from torch.optim import SGD, AdamW
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd
from typing_extensions import override

from fl_lightning.kernels import sgd_in_one_pass
from fl_lightning.sparsity.optimizers.masked_optimizer import MaskedOptimizer


@final
class SparseSGDM(MaskedOptimizer, SGD):
    """`torch.optim.SGD` that updates only the entries in its masks; frozen entries stay bit-identical.

    Without masks, or with masks of ones, it is `torch.optim.SGD`, bit for bit. On a CPU a C kernel updates
    the active entries in one pass, see `sgd_in_one_pass`; with ``foreach`` or ``fused`` PyTorch's kernels do.
    A parameter whose mask is all zero needs no gradient, see `freeze_masked`.

    Args: those of torch's, and ``masks``, see `MaskedOptimizer`. With ``fused``, gradients must be
    unscaled, as by `GradScaler`.

    Example:
        >>> p = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
        >>> mask = torch.tensor([True, False])
        >>> optimizer = SparseSGDM([p], lr=0.5, weight_decay=0.1, masks=[mask])
        >>> p.grad = torch.tensor([0.3, 0.3])
        >>> optimizer.step()
        >>> [round(x, 6) for x in p.tolist()]
        [0.8, 2.0]
    """

    def move_in_place(
        self, group: dict[str, Any], parts: list[tuple[Tensor, Tensor]]
    ) -> list[tuple[Tensor, Tensor]]:
        """Update parameters by a C kernel, in one pass; return those that it cannot update."""
        if group["foreach"] or group["fused"]:
            return parts
        rest = []
        for param, active in parts:
            momentum = self.state[param].get("momentum_buffer") if group["momentum"] else None
            is_first = bool(group["momentum"]) and momentum is None
            if is_first or not sgd_in_one_pass(param, active, momentum, group):
                rest.append((param, active))
        return rest

    @override
    def move(
        self,
        group: dict[str, Any],
        owners: list[Tensor],
        values: list[Tensor],
        grads: list[Tensor],
    ) -> None:
        momentum: list[Tensor | None] = [None] * len(owners)
        if group["momentum"]:
            momentum = [self.state[p].get("momentum_buffer") for p in owners]
        sgd(
            values,
            grads,
            momentum,
            has_sparse_grad=any(grad.is_sparse for grad in grads),
            lr=group["lr"],
            momentum=group["momentum"],
            dampening=group["dampening"],
            weight_decay=group["weight_decay"],
            nesterov=group["nesterov"],
            maximize=group["maximize"],
            foreach=group["foreach"],
            fused=group["fused"],
        )
        if group["momentum"]:
            for param, buffer in zip(owners, momentum, strict=True):
                self.state[param]["momentum_buffer"] = buffer


@final
class SparseAdamW(MaskedOptimizer, AdamW):
    """`torch.optim.AdamW` on only the entries in its masks, bit for bit; frozen entries stay bit-identical.

    A tensor has one count of steps for all its entries. Entries that become active later start with the
    mean second moment of the entries that remain active: with a second moment of zero, their steps would
    be far too large.

    Args: those of torch's, and ``masks``, see `MaskedOptimizer`. With ``fused``, gradients must be
    unscaled, as by `GradScaler`.

    Example:
        >>> p = torch.nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
        >>> optimizer = SparseAdamW([p], lr=0.5, masks=[torch.arange(3) == 0])
        >>> p.grad = torch.tensor([0.3, 0.3, 0.3])
        >>> optimizer.step()
        >>> [round(x, 4) for x in p.tolist()], optimizer.state[p]["exp_avg"].shape
        ([0.495, 2.0, 3.0], torch.Size([1]))
    """

    def initial_state(self, key: str, stayed: Tensor) -> Tensor:
        """Return with which state newly active entries start: 0 as first moment, the others' mean as second."""
        return stayed.mean() if key != "exp_avg" else super().initial_state(key, stayed)

    @override
    def move(
        self,
        group: dict[str, Any],
        owners: list[Tensor],
        values: list[Tensor],
        grads: list[Tensor],
    ) -> None:
        for owner, value in zip(owners, values, strict=True):
            if not self.state[owner]:
                self.state[owner].update(_first_state(value, group["amsgrad"], group["fused"]))
        states = [self.state[owner] for owner in owners]
        adamw(
            values,
            grads,
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [state["max_exp_avg_sq"] for state in states] if group["amsgrad"] else [],
            [state["step"] for state in states],
            amsgrad=group["amsgrad"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=group["maximize"],
            foreach=group["foreach"],
            fused=group["fused"],
        )


def _first_state(value: Tensor, amsgrad: bool, fused: bool | None) -> dict[str, Tensor]:
    # the fused kernel reads the count of steps on its own device
    device = value.device if fused else "cpu"
    state = {"step": torch.zeros((), dtype=torch.float32, device=device)}
    moments = ["exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if amsgrad else [])]
    return state | {key: torch.zeros_like(value) for key in moments}
