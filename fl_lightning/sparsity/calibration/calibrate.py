"""Calibration of a mask from sensitivities, in rounds.

    round r of R:  score every maskable entry at  θ ⊙ (m + s (1 - m)),  s the soft mask
                   m <- the first N · density^(r/R) of the entries in m, in the order of the rule

There is one threshold over all maskable entries; dropped entries never come back. Exactly N · density entries are
kept in the end; of equal ones the first by flat index, in the order of the names.

Source: Iurada et al. 2025, ICLR (TaLoS), Algorithm 1 and appendix A: R = 4, soft mask 0.01; its
released code uses 0.1, and a threshold that keeps all ties.
Differs: N · density is rounded to the nearest integer, the released code truncates it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.seeds import derive_seed, preserve_global_generators, seed_global_generators
from fl_lightning.sparsity.calibration.plan import CalibrationPlan, soften
from fl_lightning.sparsity.calibration.rules import next_mask
from fl_lightning.sparsity.masks.mask import Mask, some
from fl_lightning.sparsity.masks.maskable import maskable_names
from fl_lightning.sparsity.sensitivity.fisher import SampledFisher
from fl_lightning.sparsity.sensitivity.protocol import Scores, Sensitivity


class Calibration:
    """Calibrates a mask round by round, from scores that the caller computes, e.g. on clients.

    Args:
        plan: options of the calibration.
        parameters: the maskable parameters by name; they do not change.
        seed: seed of random rules.

    Attributes:
        mask: the mask after the rounds so far.
        round: number of completed rounds.
        num_kept: number of entries that each round keeps.

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
        """True after the last calibration round; `mask` is then the result."""
        return self.round == len(self.num_kept)

    @property
    def needs_scores(self) -> bool:
        """True if the rule ranks entries by scores, so that `step` needs them."""
        return self._rule.needs_scores

    def soft_parameters(self) -> dict[str, Tensor]:
        """Return the parameters at which to score in this round; dropped entries are scaled by ``soft_mask``."""
        return soften(self._parameters, self.mask, self._plan.soft_mask)

    def step(self, scores: Scores | None = None) -> None:
        """Finish a round: choose the entries to keep by its scores, which are summed over clients.

        Raises:
            ConfigurationError: if needed scores are missing, or scores are of other tensors, NaN or negative.
        """
        if scores is not None:
            self._check(scores)
            if not self._plan.progressive and self._gathered is not None:
                scores = self._gathered + scores
            self._gathered = scores
        elif self.needs_scores:
            raise ConfigurationError(
                f"rule {type(self._rule).__name__} needs scores, got none: give those of a sensitivity"
            )
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
                f"scores must have the names and shapes of the maskable tensors, and differ in {some(differing)}"
            )
        bad = [name for name, total in scores.sums.items() if not bool((total >= 0).all())]
        if bad or scores.num_examples < 1:
            raise ConfigurationError(
                f"scores must be at least 0 and of at least one example, got {scores.num_examples} examples, and "
                f"negative numbers or NaN in {some(bad) or 'no tensor'}"
            )


def calibrate(
    module: nn.Module,
    batches: Iterable[Any],
    *,
    sensitivity: Sensitivity | None = None,
    names: Sequence[str] | None = None,
    seed: int = 0,
    **plan: Any,
) -> Mask:
    """Return a mask of the entries of a module to train, by scores on examples; the module does not change.

    Args:
        module: the model.
        batches: loader or list of batches, which is read once per round; unused by rules without scores.
        sensitivity: estimator of the scores; None for `SampledFisher`, as in the paper.
        names: names of the parameters to mask; None for `maskable_names`.
        seed: seed of all random draws, including the order of a shuffling loader.
        plan: options of `CalibrationPlan`: ``density``, or ``sparsity``, and others.

    Raises:
        ConfigurationError: if an option is out of range, or ``batches`` can be read only once.

    Example:
        >>> import torch
        >>> module = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> mask = calibrate(module, [torch.ones(3, 4)], density=0.25)
        >>> mask.num_active, mask.num_entries
        (14, 58)
    """
    parameters = _named(module, names)
    calibration = Calibration(CalibrationPlan(**plan), parameters, seed=seed)
    if len(calibration.num_kept) > 1 and isinstance(batches, Iterator):
        raise ConfigurationError(
            f"batches are read in each of {len(calibration.num_kept)} rounds, and an iterator can be read only once: "
            "give a loader or a list"
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
            f"names: {type(module).__name__} has no parameters {some(unknown)}; it has {some(list(own))}"
        )
    if not chosen:
        raise ConfigurationError(
            "names is empty: name the parameters to mask, or leave it out for the default"
        )
    return {name: own[name] for name in chosen}
