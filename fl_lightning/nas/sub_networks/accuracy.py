"""Accuracy of sub-networks without training them: measured during or after a run, and predicted.

    accuracy(a) = Σ_owners right answers of a / Σ_owners examples,   batch norm statistics recalibrated

Between rounds it is of training examples: every client counts its own; only counts travel, and the sums of
statistics. AttentiveNAS's predictor is fitted to it once, after some rounds of uniform draws:

    n sub-networks drawn uniformly, scored on training examples:  n/2 fit a random forest, n/2 check it

From that round on `Attentive` keeps the best or the worst by what the forest says. Which sub-networks are
scored is a function of the seed, and what was found is in every checkpoint. No evaluation data are read.
Of a trained supernet, the accuracy of a part on validation examples is an objective of a search.
Sources: Wang et al. 2021, CVPR (AttentiveNAS), section 4: a random forest fitted to 1,024 sub-networks;
Cai et al. 2020 (Once-for-All), section 3.3, and Yu et al. 2020 (BigNAS), section 3.2, for the objective.
Differs: accuracies are counted by clients, on the examples that they train on. When it begins, the halves and
the number of examples are ours. AttentiveNAS's code compares losses on the batch instead (`predictor: null`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import numpy as np
import numpy.typing as npt
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn

from fl_lightning.core.errors import ConfigurationError, check_range
from fl_lightning.core.seeds import derive_seed, torch_generator
from fl_lightning.federation import Ranks, shares, visiting
from fl_lightning.nas.cost.latency_measurement import rank_correlation
from fl_lightning.nas.spaces.sizes import SizeSpace
from fl_lightning.nas.spaces.space import Architecture
from fl_lightning.nas.sub_networks.methods import Predict
from fl_lightning.nas.sub_networks.recalibration import (
    Sums,
    TrainingExamples,
    collect_sums,
    has_norms,
    normalised_by,
    recalibrated,
)


@final
@dataclass(frozen=True)
class AccuracyPredictor:
    """Time and data of a predictor's fit.

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
        check_range("predictor: start", self.start, "in [0, 1)")
        check_range("predictor: num_scored", self.num_scored, "at least 4")
        check_range("predictor: max_examples", self.max_examples, "at least 2")

    def first_round(self, num_rounds: int) -> int:
        """Return the round before which it is fitted."""
        return math.ceil(self.start * num_rounds - 1e-9)


class ForestPredictor:
    """Predicts a number from choices: a random forest, as published; its 100 trees of depth 15 are ours.

    Args:
        architectures: of one space.
        scores: of each, e.g. its accuracy on examples that no test uses.
        seed: of the run.

    Raises:
        ConfigurationError: if there are not as many scores as architectures, or none.

    Example:
        >>> from fl_lightning.nas.spaces.resnet import small_resnet
        >>> space = small_resnet()
        >>> predict = ForestPredictor([space.smallest, space.largest], [0.1, 0.9], seed=0)
        >>> worse, better = predict([space.smallest, space.largest])
        >>> bool(worse < better)
        True
    """

    def __init__(
        self, architectures: Sequence[Architecture], scores: Sequence[float], *, seed: int
    ) -> None:
        if not architectures or len(architectures) != len(scores):
            raise ConfigurationError(
                f"a predictor needs a score for each architecture, and one at least; got "
                f"{len(architectures)} architectures and {len(scores)} scores"
            )
        state = derive_seed(seed, "predictor") % 2**32
        from sklearn.ensemble import RandomForestRegressor  # slow to import, and few need it

        self._forest: Any = RandomForestRegressor(100, max_depth=15, random_state=state)
        self._forest.fit(_features(architectures), np.asarray(scores, np.float64))

    def __call__(self, architectures: Sequence[Architecture]) -> list[float]:
        """Return a prediction for each."""
        predicted: list[float] = self._forest.predict(_features(architectures)).tolist()
        return predicted


def _features(architectures: Sequence[Architecture]) -> npt.NDArray[np.int64]:
    """The choices; -1, which is below any option, for decisions without an effect."""
    rows = []
    for architecture in architectures:
        choices = np.array(architecture.choices)
        space = architecture.space
        if isinstance(space, SizeSpace):
            choices[~np.array(space.active(architecture.choices))] = -1
        rows.append(choices)
    return np.stack(rows)


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
        """Raise ConfigurationError for a run without a known end.

        Raises:
            ConfigurationError: saying what to set.
        """
        if self._options is not None and (trainer.max_epochs or 0) < 1:
            raise ConfigurationError(
                "model.method.predictor begins after a part of a run's rounds: set trainer.max_epochs"
            )

    def before_round(self, trainer: Trainer, module: Any) -> dict[str, float]:
        """Fit the predictor if its round begins; returns numbers to log.

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
        """Return the scored sub-networks."""
        return {"scores": self._scores}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Refit the accuracy predictor on the saved scores; the result is the same."""
        if self._options is not None and (scores := state.get("scores")):
            drawn = [self._space.parse(text) for text, _ in scores]
            self._fit(drawn, [score for _, score in scores])


def _half(drawn: Sequence[Architecture]) -> int:
    """Number of the drawn sub-networks to which the forest is fitted; the others test it."""
    return (len(drawn) + 1) // 2


_AT_ONCE = 16  # sub-networks, whose statistics are in memory together
_COUNT_BYTES = 8  # of a count


class Accuracies(NamedTuple):
    """Accuracies that clients have counted.

    Attributes:
        values: of each sub-network, in [0, 1].
        num_bytes: that clients sent together.
    """

    values: list[float]
    num_bytes: int


def training_accuracies(
    trainer: Trainer,
    network: nn.Module,
    architectures: Sequence[Any],
    *,
    max_examples: int | None,
    seed: int,
) -> Accuracies | None:
    """Return accuracies of sub-networks; to be called by all processes. The network is left as it was.

    Args:
        trainer: whose training data are read.
        network: of all sizes, or of all cells.
        architectures: of the sub-networks, as the network takes them beside images.
        max_examples: of all clients together, each in proportion to its own; None for all.
        seed: of which examples, and of their order.

    Returns:
        None if no training data are at hand, or none of two examples.
    """
    examples = TrainingExamples.of(trainer, max_examples=max_examples, seed=seed)
    if examples is None:
        return None
    right, total, num_bytes = torch.zeros(0, dtype=torch.int64), 0, 0
    for start in range(0, len(architectures), _AT_ONCE):
        some = architectures[start : start + _AT_ONCE]
        sums: list[Sums] = [{} for _ in some]
        if has_norms(network):
            found = recalibrated(trainer, network, some, max_examples=max_examples, seed=seed)
            assert found is not None, "the examples are at hand"
            sums, num_bytes = found.sums, num_bytes + found.num_bytes
        counted, total = _counted(trainer, network, list(zip(some, sums, strict=True)), examples)
        right = torch.cat([right, counted])
    if total == 0:
        return None
    num_bytes += _COUNT_BYTES * len(examples.indices) * (len(architectures) + 1)
    return Accuracies((right.double() / total).tolist(), num_bytes)


def _counted(
    trainer: Trainer,
    network: nn.Module,
    parts: Sequence[tuple[Any, Sums]],
    examples: TrainingExamples,
) -> tuple[Tensor, int]:
    """Return the right answers of each part, and of how many examples, over all owners."""
    ranks = Ranks(trainer)
    right, total = torch.zeros(len(parts), dtype=torch.int64), 0
    with visiting(trainer, "validation", mode="eval") as visit, torch.no_grad():
        for images, labels in map(visit.prepared, _own_batches(ranks, examples)):
            total += len(labels)
            for number, (architecture, sums) in enumerate(parts):
                with trainer.precision_plugin.forward_context(), normalised_by(network, sums):
                    answers = network(images, architecture).argmax(1)
                right[number] += int((answers == labels).sum())
    told = ranks.gather((right, total))
    return torch.stack([own for own, _ in told]).sum(0), sum(number for _, number in told)


def _own_batches(ranks: Ranks, examples: TrainingExamples) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the batches of the owners that this process reads for."""
    sizes = np.array([len(indices) for indices in examples.indices])
    for owner in shares(sizes, ranks.size)[ranks.rank].tolist():
        yield from examples.batches(owner)


Batches = Iterable[tuple[Tensor, Tensor]]


@final
@dataclass(frozen=True, eq=False)
class SubNetworkScore:
    """The accuracy as an objective of a search; an architecture always has the same score.

    Attributes:
        network: of all sizes, trained, whose ``forward(images, architecture)`` runs a part.
        training: batches of at least two examples for the statistics; a list, or what can be gone
            through again. Without batch norms none are read.
        validation: batches of examples that nothing was trained on, and no test uses.
        context: what surrounds every pass, e.g. mixed precision.
    """

    network: nn.Module
    training: Batches
    validation: Batches
    context: Callable[[], AbstractContextManager[Any]] = nullcontext

    def __call__(self, architecture: Architecture) -> float:
        """Return the accuracy, in [0, 1]."""
        was_training = self.network.training
        self.network.eval()
        sums: Sums = {}
        if has_norms(self.network):
            sums = collect_sums(
                self.network, lambda batch: self._logits(batch[0], architecture), self.training
            )
        right = total = 0
        with torch.no_grad(), normalised_by(self.network, sums):
            for images, labels in self.validation:
                right += int((self._logits(images, architecture).argmax(1) == labels).sum())
                total += len(labels)
        self.network.train(was_training)
        return right / total

    def _logits(self, images: Tensor, architecture: Architecture) -> Tensor:
        with self.context():
            logits: Tensor = self.network(images, architecture)
        return logits
