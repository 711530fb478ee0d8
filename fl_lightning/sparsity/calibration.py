"""From sensitivities to a mask, in rounds.

    round r of R:  score every maskable entry at  θ ⊙ (m + s (1 - m)),  s the soft mask
                   m <- of the entries that m keeps, those N · density^(r/R) that come first

One threshold over all maskable entries; entries that were dropped never come back; exactly as many
are kept as the density says, equal ones by their flat index, in the order of the names.

Source: Iurada et al. 2025, ICLR (TaLoS), Algorithm 1 and appendix A: R = 4, soft mask 0.01; its
released code uses 0.1, and a threshold that keeps all ties.
Differs: N · density is rounded to the nearest, the code cuts it off.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.sparsity.mask import Mask, some
from fl_lightning.sparsity.plan import CalibrationPlan
from fl_lightning.sparsity.selection import apportion, keep_lowest
from fl_lightning.sparsity.sensitivity import Scores


class Calibration:
    """The rounds of a calibration, for whoever gathers the scores.

    Args:
        plan: how.
        parameters: the maskable parameters by name; they are read, never written to.
        seed: of rules that draw.

    Example:
        >>> weight = torch.tensor([1.0, 2.0, 3.0, 4.0])
        >>> calibration = Calibration(CalibrationPlan(density=0.25, rounds=2), {"weight": weight})
        >>> while not calibration.is_done:
        ...     print(calibration.soft_parameters()["weight"])  # score here
        ...     calibration.step(Scores({"weight": weight}, num_examples=1))
        tensor([1., 2., 3., 4.])
        tensor([1.0000, 2.0000, 0.0300, 0.0400])
        >>> calibration.mask["weight"]
        tensor([ True, False, False, False])
    """

    def __init__(
        self, plan: CalibrationPlan, parameters: Mapping[str, Tensor], *, seed: int = 0
    ) -> None:
        self.mask = Mask.ones(parameters)
        self.round = 0
        self.num_kept = plan.num_kept(self.mask.num_entries)
        self._plan = plan
        self._rule = plan.chosen_rule
        self._parameters = {name: tensor.detach() for name, tensor in parameters.items()}
        self._seed = seed
        self._gathered: Scores | None = None

    @property
    def is_done(self) -> bool:
        """Whether all rounds were taken: `mask` is the result."""
        return self.round == len(self.num_kept)

    @property
    def needs_scores(self) -> bool:
        """Whether `step` needs scores."""
        return self._rule.needs_scores

    def soft_parameters(self) -> dict[str, Tensor]:
        """Return the values at which this round scores: dropped entries times the soft mask."""
        return soften(self._parameters, self.mask, self._plan.soft_mask)

    def step(self, scores: Scores | None = None) -> None:
        """Drop entries by this round's scores, summed over all clients that sent some.

        Raises:
            ConfigurationError: if scores are needed and missing, of other tensors, nan or negative.
        """
        if scores is not None:
            self._check(scores)
            if not self._plan.progressive and self._gathered is not None:
                scores = self._gathered + scores
            self._gathered = scores
        elif self.needs_scores:
            raise ConfigurationError(f"{type(self._rule).__name__} needs scores, got none")
        mean = {} if scores is None else scores.mean()
        order = self._rule.order_by(self._parameters, mean, self._seed)
        self.mask = next_mask(
            order, self.mask, self.num_kept[self.round], per_tensor=self._plan.per_tensor
        )
        self.round += 1

    def _check(self, scores: Scores) -> None:
        ours = {name: tensor.shape for name, tensor in self._parameters.items()}
        theirs = {name: tensor.shape for name, tensor in scores.sums.items()}
        if differing := sorted(n for n in ours | theirs if ours.get(n) != theirs.get(n)):
            raise ConfigurationError(
                f"scores must be of the maskable tensors, these differ in {some(differing)}"
            )
        bad = [name for name, total in scores.sums.items() if not bool((total >= 0).all())]
        if bad or scores.num_examples < 1:
            raise ConfigurationError(
                f"scores must be ≥ 0 and of at least one example, got {scores.num_examples} "
                f"examples, and negative numbers or nan in {some(bad) or 'none'}"
            )


def next_mask(order: Mapping[str, Tensor], mask: Mask, k: int, *, per_tensor: bool = False) -> Mask:
    """Return the mask of the k entries with the lowest values among those that a mask keeps.

    Args:
        order: values by name, without nan; ties are kept by flat index, in the mask's order.
        mask: what may be kept.
        k: how many, in [0, mask.num_active].
        per_tensor: share k over the tensors by what the mask keeps of each, choose in each.

    Raises:
        ConfigurationError: if k is out of range.

    Example:
        >>> order = {"a": torch.tensor([0.0, 0.0, 4.0]), "b": torch.tensor([0.0])}
        >>> dict(next_mask(order, Mask.ones(order), 2))
        {'a': tensor([ True,  True, False]), 'b': tensor([False])}
        >>> dict(next_mask(order, Mask.ones(order), 2, per_tensor=True))
        {'a': tensor([ True, False, False]), 'b': tensor([ True])}
    """
    if not 0 <= k <= mask.num_active:
        raise ConfigurationError(
            f"k must be in 0 to {mask.num_active}, the entries left to keep, got {k}"
        )
    values = {name: order[name].flatten() for name in mask}
    allowed = {name: mask[name].flatten().to(values[name].device) for name in mask}
    if per_tensor:
        counts = apportion(list(mask.active_per_tensor.values()), k)
        kept = [keep_lowest(values[n], allowed[n], c) for n, c in zip(mask, counts, strict=True)]
    else:
        sizes = [value.numel() for value in values.values()]
        flat = keep_lowest(torch.cat([*values.values()]), torch.cat([*allowed.values()]), k)
        kept = list(flat.split(sizes))
    return Mask({n: part.view(mask[n].shape) for n, part in zip(mask, kept, strict=True)})


def soften(parameters: Mapping[str, Tensor], mask: Mask, factor: float) -> dict[str, Tensor]:
    """Return parameters with the entries outside the mask times a factor, as new tensors.

    Example:
        >>> weight = torch.tensor([2.0, 4.0])
        >>> soften({"weight": weight}, Mask({"weight": weight > 3}), 0.5)
        {'weight': tensor([1., 4.])}
    """
    return {
        name: torch.where(mask[name].to(tensor.device), tensor, tensor * factor)
        for name, tensor in parameters.items()
    }
