"""AttentiveNAS's predictor of accuracy in a run: fitted once, after some rounds of uniform draws.

    n sub-networks drawn uniformly, scored on training examples:  n/2 fit a random forest, n/2 check it

From that round on `Attentive` keeps the best or the worst by what the forest says. Which sub-networks are
scored is a function of the seed, and what was found is in every checkpoint. No evaluation data are read.
Source: Wang et al. 2021, CVPR (AttentiveNAS), section 4: a random forest fitted to 1,024 sub-networks.
Differs: accuracies are counted by clients, on the examples that they train on. When it begins, the halves and
the number of examples are ours. The released code compares losses on the batch instead (`predictor: null`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_info

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.seeds import torch_generator
from fl_lightning.nas.cost.latency_measure import rank_correlation
from fl_lightning.nas.elastic.attentive import ForestPredictor, Predict
from fl_lightning.nas.spaces.sizes import SizeSpace
from fl_lightning.nas.spaces.space import Architecture
from fl_lightning.nas.sub_networks.training_accuracy import training_accuracies


@final
@dataclass(frozen=True)
class AccuracyPredictor:
    """When a predictor is fitted, and on what.

    Attributes:
        start: part of a run's rounds before it begins, in [0, 1).
        num_scored: sub-networks that are drawn, at least 4; different ones are scored once, and half of
            them are for the check.
        max_examples: that each is scored on, of all clients together, at least 2; None for all.

    Example:
        >>> AccuracyPredictor(start=0.1).first_round(num_rounds=100)
        10
    """

    start: float = 0.1
    num_scored: int = 1024
    max_examples: int | None = 1024

    def __post_init__(self) -> None:
        rules = {
            f"start must be in [0, 1), got {self.start}": 0 <= self.start < 1,
            f"num_scored must be at least 4, got {self.num_scored}": self.num_scored >= 4,
            f"max_examples must be at least 2, got {self.max_examples}": self.max_examples is None
            or self.max_examples >= 2,
        }
        if broken := [message for message, holds in rules.items() if not holds]:
            raise ConfigurationError("predictor: " + "; ".join(broken))

    def first_round(self, num_rounds: int) -> int:
        """Return the round before which it is fitted."""
        return math.ceil(self.start * num_rounds - 1e-9)


class RunPredictor:
    """The predictor of a run.

    Args:
        options: of it; None for a run without.
        space: of the sub-networks.
        seed: of the run.

    Attributes:
        predict: accuracies of architectures; None until it is fitted.
    """

    def __init__(self, options: AccuracyPredictor | None, space: SizeSpace, seed: int) -> None:
        self._options, self._space, self._seed = options, space, seed
        self._scores: list[tuple[str, float]] = []
        self.predict: Predict | None = None

    def check(self, trainer: Trainer) -> None:
        """Refuse a run whose end nobody knows.

        Raises:
            ConfigurationError: saying what to set.
        """
        if self._options is not None and (trainer.max_epochs or 0) < 1:
            raise ConfigurationError(
                "model.method.predictor begins after a part of a run's rounds: set trainer.max_epochs"
            )

    def before_round(self, trainer: Trainer, module: Any) -> dict[str, float]:
        """Fit it if the round that begins is the one; return what to log.

        Raises:
            ConfigurationError: if there are no training examples to score on.
        """
        options = self._options
        if options is None or self.predict is not None:
            return {}
        if trainer.current_epoch < options.first_round(trainer.max_epochs or 0):
            return {}
        generator = torch_generator(self._seed, "scored sub-networks")
        every = (self._space.sample(generator) for _ in range(options.num_scored))
        drawn = list(dict.fromkeys(every))  # far fewer in a small space
        found = training_accuracies(
            trainer,
            module.network,
            drawn,
            max_examples=options.max_examples,
            seed=self._seed,
        )
        if found is None:
            raise ConfigurationError(
                "model.method.predictor scores sub-networks on training examples, and there are none: "
                "train on a data module or a data set that has a length"
            )
        rank = self._fit(drawn, found.values)
        rank_zero_info(
            f"predictor: fitted on {_half(drawn)} sub-networks; rank correlation {rank:.2f} on "
            f"{len(drawn) - _half(drawn)} others"
        )
        return {"predictor/rank_correlation": rank, "predictor/bytes_up": float(found.num_bytes)}

    def _fit(self, drawn: Sequence[Architecture], scores: Sequence[float]) -> float:
        """Fit the forest on the first half; return its rank correlation on the other."""
        half = _half(drawn)
        self.predict = ForestPredictor(drawn[:half], scores[:half], seed=self._seed)
        self._scores = [(str(a), score) for a, score in zip(drawn, scores, strict=True)]
        return rank_correlation(self.predict(drawn[half:]), scores[half:])

    def state_dict(self) -> dict[str, Any]:
        """Return what was scored."""
        return {"scores": self._scores}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Fit it again as it was."""
        if self._options is not None and (scores := state.get("scores")):
            drawn = [self._space.parse(text) for text, _ in scores]
            self._fit(drawn, [score for _, score in scores])


def _half(drawn: Sequence[Architecture]) -> int:
    """Return how many fit the forest."""
    return (len(drawn) + 1) // 2
