"""SGD with momentum on the entries that a mask allows.

    m ← μ m + (1 - τ) c · (g + λ p),      p ← p - η c · m        c: the mask, 0 or 1

Source: Iurada, Ciccone, Tommasi 2025, "Efficient Model Editing with Task-Localized Sparse
Fine-tuning", ICLR, section 4 (θ ← θ - γ [c · ∇]).
Differs: the mask also gates decay and momentum. If it masked the gradient alone, weight decay would
move the frozen entries.
"""

from __future__ import annotations

from typing import Any, final

from torch import Tensor
from torch.optim import SGD
from torch.optim.optimizer import ParamsT
from torch.optim.sgd import sgd
from typing_extensions import override

from fl_lightning.kernels import sgd_in_one_pass
from fl_lightning.sparsity.optimizers.masked_optimizer import MaskedOptimizer, Masks


@final
class SparseSGDM(MaskedOptimizer, SGD):
    """`torch.optim.SGD` on the active entries; frozen entries stay bit-identical.

    Without masks, or if all masks are all ones, it is `torch.optim.SGD`, bit for bit. On a CPU the
    active entries move in one pass, see `sgd_in_one_pass`, unless ``foreach`` or ``fused`` is set;
    then torch's kernels move them. A parameter whose mask is all zero needs no gradient, see
    `freeze_masked`.

    Args:
        params: parameters, named parameters or groups, as for torch.
        lr: learning rate η ≥ 0.
        momentum: μ ≥ 0.
        dampening: dampening τ of the momentum.
        weight_decay: λ ≥ 0, on active entries.
        nesterov: use Nesterov momentum; needs momentum and no dampening.
        maximize: ascend the gradient.
        foreach: move all tensors in one call, fast on an accelerator; None leaves it to torch.
        fused: torch's fused kernel, the fastest if no entry is frozen; gradients must be unscaled,
            as by `GradScaler`.
        masks: masks of the entries that may move, see `set_masks`; None moves all.

    Raises:
        ValueError: if an option is out of range or a mask does not fit.

    Example:
        >>> import torch
        >>> p = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
        >>> mask = torch.tensor([True, False])
        >>> optimizer = SparseSGDM([p], lr=0.5, weight_decay=0.1, masks=[mask])
        >>> p.grad = torch.tensor([0.3, 0.3])
        >>> optimizer.step()
        >>> [round(x, 6) for x in p.tolist()]
        [0.8, 2.0]
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        masks: Masks | None = None,
    ) -> None:
        super().__init__(
            params,
            lr,
            momentum,
            dampening,
            weight_decay,
            nesterov,
            maximize=maximize,
            foreach=foreach,
            fused=fused,
        )
        self._step_supports_amp_scaling = False  # else GradScaler would leave unscaling to the step
        self.set_masks(masks)

    def move_in_place(
        self, group: dict[str, Any], parts: list[tuple[Tensor, Tensor]]
    ) -> list[tuple[Tensor, Tensor]]:
        """Move parameters that already have momentum in one pass, unless foreach or fused is set."""
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
