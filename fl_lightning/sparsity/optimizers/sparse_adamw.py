"""AdamW on the entries that a mask allows.

    p ← p - c η λ p,   m ← β₁ m + (1 - β₁) g,   v ← β₂ v + (1 - β₂) g²,   p ← p - c η m̂ / (√v̂ + ε)

with c the mask, 0 or 1. Source: Loshchilov, Hutter 2019, "Decoupled Weight Decay Regularization",
ICLR, algorithm 2, as in torch; the mask gates step and decay as in Iurada et al. 2025, ICLR.
"""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor
from torch.optim import AdamW
from torch.optim.adamw import adamw
from torch.optim.optimizer import ParamsT
from typing_extensions import override

from fl_lightning.sparsity.optimizers.masked_optimizer import MaskedOptimizer, Masks


@final
class SparseAdamW(MaskedOptimizer, AdamW):
    """`torch.optim.AdamW`, bit for bit, on the active entries; frozen entries stay bit-identical.

    A tensor has one count of steps for all its entries. Entries that join later start with the mean
    second moment of the entries that stayed, because with a second moment of zero they would make far
    too large steps.

    Args:
        params: parameters, named parameters or groups, as for torch.
        lr: learning rate η ≥ 0.
        betas: β₁ and β₂, each in [0, 1).
        eps: ε ≥ 0.
        weight_decay: λ ≥ 0, on active entries.
        amsgrad: divide by the largest second moment so far.
        maximize: ascend the gradient.
        foreach: move all tensors in one call, fast on an accelerator; None leaves it to torch.
        fused: torch's fused kernel, the fastest; gradients must be unscaled, as by `GradScaler`.
        masks: masks of the entries that may move, see `set_masks`; None moves all.

    Raises:
        ValueError: if an option is out of range or a mask does not fit.

    Example:
        >>> p = torch.nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
        >>> optimizer = SparseAdamW([p], lr=0.5, masks=[torch.arange(3) == 0])
        >>> p.grad = torch.tensor([0.3, 0.3, 0.3])
        >>> optimizer.step()
        >>> [round(x, 4) for x in p.tolist()], optimizer.state[p]["exp_avg"].shape
        ([0.495, 2.0, 3.0], torch.Size([1]))
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        masks: Masks | None = None,
    ) -> None:
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            maximize=maximize,
            foreach=foreach,
            fused=fused,
        )
        self._step_supports_amp_scaling = False  # else GradScaler would leave unscaling to the step
        self.set_masks(masks)

    def newcomers(self, key: str, stayed: Tensor) -> Tensor:
        """Return zero for the first moment, and the mean for second moments."""
        return stayed.mean() if key != "exp_avg" else super().newcomers(key, stayed)

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
