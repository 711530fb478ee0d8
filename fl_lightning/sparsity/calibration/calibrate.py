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

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.seeds import derive_seed, preserve_global_generators, seed_global_generators
from fl_lightning.sparsity.calibration.plan import CalibrationPlan, soften
from fl_lightning.sparsity.calibration.rules import Rule, next_mask
from fl_lightning.sparsity.masks.mask import Mask, some
from fl_lightning.sparsity.masks.maskable import maskable_names
from fl_lightning.sparsity.sensitivity.fisher import SampledFisher
from fl_lightning.sparsity.sensitivity.protocol import Scores, Sensitivity


class Calibration:
    """The rounds of a calibration, for whoever gathers the scores.

    Args:
        plan: how.
        parameters: the maskable parameters by name; they are read, never written to.
        seed: of rules that draw.

    Example:
        >>> import torch
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


def calibrate(
    module: nn.Module,
    batches: Iterable[Any],
    *,
    density: float | None = None,
    sparsity: float | None = None,
    rule: Rule | None = None,
    sensitivity: Sensitivity | None = None,
    rounds: int = 4,
    progressive: bool = True,
    soft_mask: float = 0.01,
    per_tensor: bool = False,
    names: Sequence[str] | None = None,
    seed: int = 0,
) -> Mask:
    """Return the mask of a module on some examples; the module stays as it is.

    Args:
        module: the model.
        batches: a loader or a list of batches; read once a round. Rules without scores read none.
        density: fraction of the maskable entries that train, in (0, 1].
        sparsity: 1 - density, instead of it.
        rule: which entries train; None is the least sensitive.
        sensitivity: how they are scored; None is `SampledFisher`, as in the paper.
        rounds: R ≥ 1; 1 is one-shot.
        progressive: False scores R times without masking anything, adds up, and drops once.
        soft_mask: factor of dropped entries while others are scored, in [0, 1]; 1 is off.
        per_tensor: one threshold a tensor, all with the same density, instead of a global one.
        names: the parameters that the mask covers; None is `maskable_names`.
        seed: of everything drawn, the order of a shuffling loader among it.

    Raises:
        ConfigurationError: if an option is out of range, or ``batches`` can be read only once.

    Example:
        >>> import torch
        >>> module = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> mask = calibrate(module, [torch.ones(3, 4)], density=0.25)
        >>> mask.num_active, mask.num_entries
        (14, 58)
    """
    plan = CalibrationPlan(
        density=density,
        sparsity=sparsity,
        rule=rule,
        rounds=rounds,
        progressive=progressive,
        soft_mask=soft_mask,
        per_tensor=per_tensor,
    )
    parameters = _named(module, names)
    calibration = Calibration(plan, parameters, seed=seed)
    if len(calibration.num_kept) > 1 and isinstance(batches, Iterator):
        raise ConfigurationError(
            f"batches are read once in each of {rounds} rounds, but an iterator only once: give a "
            "loader or a list"
        )
    score = sensitivity or SampledFisher()
    while not calibration.is_done:
        scores = None
        if calibration.needs_scores:
            own = derive_seed(seed, "calibration", calibration.round)
            with preserve_global_generators():
                seed_global_generators(own)
                values = calibration.soft_parameters()
                scores = score(module, batches, parameters=values, seed=own)
        calibration.step(scores)
    return calibration.mask


def _named(module: nn.Module, names: Sequence[str] | None) -> dict[str, Tensor]:
    own: dict[str, Tensor] = dict(module.named_parameters())
    chosen = maskable_names(module) if names is None else list(names)
    if unknown := [name for name in chosen if name not in own]:
        raise ConfigurationError(
            f"{type(module).__name__} has no parameters {some(unknown)}; there are "
            f"{some(list(own))}"
        )
    if not chosen:
        raise ConfigurationError("names is empty: there is nothing to mask")
    return {name: own[name] for name in chosen}
