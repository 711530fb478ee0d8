"""The privacy budget of a run: its limit, its spending and its line in the log.

ε of all planned rounds is logged before training. A round that would exceed the budget does not run.
Checkpoints hold the privacy spent; a resumed run keeps its noise multiplier. ε and δ of earlier fits of the
same module are added.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from fl_lightning.core.errors import ConfigurationError, RoundFailure
from fl_lightning.core.update import GlobalModel
from fl_lightning.federation.checks.privacy import check_monitors, shown_by
from fl_lightning.federation.plan import DrawsBatches
from fl_lightning.federation.round_record import RoundRecord
from fl_lightning.federation.stage import AroundFit, Stage
from fl_lightning.privacy.accounting.accountant import most_rounds
from fl_lightning.privacy.mechanism import Accounted, AccountedRun, Budgeted
from fl_lightning.privacy.noise.noise_source import coins
from fl_lightning.server.aggregator import Aggregator

# Most rounds that are counted to find how many a budget allows, if no end is planned.
_NO_END = 1_000_000
# Options of a rule of privacy that a resumed run may change; its noise multiplier is compared apart.
_FREE = {"noise_multiplier", "epsilon", "delta", "log_unprotected"}


class Spent(NamedTuple):
    """Privacy cost (ε and δ) of all fits of a module so far."""

    epsilon: float = 0.0
    delta: float = 0.0
    unamplified: float = 0.0  # ε without amplification by sampling


_SPENT: WeakKeyDictionary[LightningModule, Callable[[], Spent]] = WeakKeyDictionary()


def spent_on(module: LightningModule) -> Spent:
    """Return the privacy cost (ε, δ) of all fits of a module so far, also in processes that a Trainer forked."""
    return _SPENT.get(module, Spent)()


def note_spent(module: LightningModule, spent: Callable[[], Spent]) -> None:
    """Register a function that returns the privacy cost of all fits of a module so far."""
    _SPENT[module] = spent


class Covers(NamedTuple):
    """Texts for the log on what ε protects and what it does not."""

    clip_norm: str  # the clip norm and the vectors that it bounds
    releases: str  # the results that ε covers
    shown: list[str]  # data of clients that is shown without noise
    most: int  # number of protected units; δ must be below 1 / most
    among: str  # name of these units: "clients" or "examples of a client"
    shows: str  # data that a mechanism may publish with probability δ


class PrivateStage(AroundFit):
    """Base of stages that make a run differentially private; counts ε, including that of earlier fits.

    Args:
        privacy: the rule of privacy.
        run: the properties of the run that determine its ε.

    Raises:
        ConfigurationError: if the run cannot be accounted for, or the budget allows no round.

    Attributes:
        aggregator: aggregates a round's updates; None if updates are private by themselves.
        draws: draws clients' batches; None for passes over shards.
        mechanism: the mechanism, with its accounting.
        released: number of rounds whose privacy cost counts as spent: all up to the last released round.
    """

    key = "privacy"
    aggregator: Aggregator | None = None
    draws: DrawsBatches | None = None
    privacy: Budgeted
    mechanism: Accounted[Any]

    def __init__(self, privacy: Budgeted, run: AccountedRun) -> None:
        self.privacy, self._accounted, self._coins = privacy, run, coins(run.seed)
        self.hides_clients = not privacy.log_unprotected
        self._earlier, self.released = Spent(), 0
        self._account(None)

    @abstractmethod
    def covers(self, trainer: Trainer) -> Covers:
        """Return the texts for the log on what ε protects and what it does not."""

    def _account(self, noise_multiplier: float | None) -> None:
        """Set the noise mechanism, the number of rounds that the budget allows, and ε after the last round."""
        self.mechanism = self.privacy.mechanism(self._accounted, noise_multiplier=noise_multiplier)
        self._allowed = self._allowed_rounds()
        end = self._accounted.num_rounds if self._allowed is None else self._allowed
        self._end = None if end is None else (end, self._epsilon(end))

    def _epsilon(self, rounds: int, *, quick: bool = False) -> float:
        """Return ε after a number of rounds of this fit, including earlier fits of the module."""
        return self._earlier.epsilon + self.mechanism.epsilon(rounds, quick=quick)

    def _unamplified(self, rounds: int) -> float | None:
        """Return ε without amplification by sampling; None if sampling amplifies nothing, or if cohorts are secret."""
        if self.privacy.secure_noise or not self.mechanism.amplifies:
            return None
        return self._earlier.unamplified + self.mechanism.epsilon_if_known(rounds)

    def _allowed_rounds(self) -> int | None:
        """Return how many of the planned rounds the privacy budget allows; None without a budget."""
        budget, planned, epsilon = self.privacy.epsilon, self._accounted.num_rounds, self._epsilon
        if budget is None:
            return None
        if planned is not None and epsilon(planned) <= budget:
            return planned
        if allowed := most_rounds(epsilon, budget, planned or _NO_END):
            return allowed
        if (before := self._earlier.epsilon) > 0:
            raise ConfigurationError(
                f"federation.privacy: earlier fits of this model have spent ε = {before:.4g}, and one "
                f"more round would exceed the budget of epsilon={budget:g}: raise epsilon, or train a new model"
            )
        raise ConfigurationError(
            f"federation.privacy: one round costs ε = {epsilon(1):.3f}, more than the budget of "
            f"epsilon={budget:g}: raise noise_multiplier, or leave it out to have it found"
        )

    # What a round costs.

    def open(self, round_index: int, model: GlobalModel) -> None:
        """Raise if a round would exceed the privacy budget."""
        if self._allowed is not None and round_index >= self._allowed:
            raise RoundFailure(
                f"round {round_index + 1} would exceed the privacy budget of epsilon={self.privacy.epsilon:g}, which "
                f"allows {self._allowed} rounds: raise epsilon, or set trainer.max_epochs to {self._allowed}"
            )

    def count_round(self, round_index: int) -> None:
        """Count a round and all rounds before it as released, so that their privacy cost is spent."""
        self.released = max(self.released, round_index + 1)  # it may be trained again

    def note(self, record: RoundRecord, facts: dict[str, float]) -> None:
        """Write the privacy spent into the round's metrics; remove metrics that no noise protects."""
        if self.hides_clients:
            record.withhold()
        epsilon = self._epsilon(self.released, quick=True)
        if self._end is not None and self.released <= self._end[0]:
            epsilon = min(epsilon, self._end[1])  # the quick one is a little too high
        spent = {"privacy/epsilon": epsilon}
        if (known := self._unamplified(self.released)) is not None:
            spent["privacy/epsilon_unamplified"] = known
        if self.privacy.epsilon is not None:
            spent["privacy/budget_left"] = max(0.0, self.privacy.epsilon - epsilon)
        record.privacy = {n: value for n, value in spent.items() if math.isfinite(value)} | facts

    # Around the fit.

    def fit_begins(self, trainer: Trainer, earlier: Sequence[Stage] | None) -> None:
        """Count the privacy spent by earlier fits of the same Trainer or of the same model."""
        if earlier is not None:
            self._count_earlier(trainer, next((s for s in earlier if type(s) is type(self)), None))
        note_spent(trainer.lightning_module, self._total)

    def _total(self) -> Spent:
        epsilon = self._epsilon(self.released)
        delta = self._earlier.delta + self.privacy.delta
        return Spent(epsilon, delta, self._unamplified(self.released) or epsilon)

    def _count_earlier(self, trainer: Trainer, earlier: Stage | None) -> None:
        if (checkpoint := trainer.ckpt_path) is not None:
            raise ConfigurationError(
                f"ckpt_path: {checkpoint} has no rounds of a Federation, so the privacy cost of its training is "
                "unknown: leave ckpt_path out. To start from its weights, give model.init_args.checkpoint_path, or load "
                "its state_dict into the module; ε then leaves out the cost of the earlier training"
            )
        if trainer.current_epoch == 0:
            spent = spent_on(trainer.lightning_module)
            if spent.epsilon:
                self._earlier = spent
                self._account(self.mechanism.noise_multiplier)
            return
        if earlier is None:
            raise ConfigurationError(
                "federation.privacy: this Trainer has trained before, with another Federation or "
                "without privacy, whose privacy cost is unknown: use one Federation for all fits, resume a "
                "private run with ckpt_path, or make a new Trainer"
            )
        self.load_state_dict(earlier.state_dict())

    def training_begins(self, trainer: Trainer) -> None:
        """Log ε, δ and the data that they do not cover; end training if the privacy budget is spent."""
        covers, rule, mechanism = self.covers(trainer), self.privacy, self.mechanism
        rank_zero_info(
            f"privacy: {self._cost()}; {mechanism}; noise multiplier {mechanism.noise_multiplier:.6g}, "
            f"clip norm {covers.clip_norm}"
        )
        if shown := shown_by(trainer.callbacks) + covers.shown:  # type: ignore[attr-defined]
            said = "; ".join(shown)
            rank_zero_warn(f"privacy: ε covers {covers.releases}, but not: {said}")
        if rule.delta >= 1 / covers.most:
            rank_zero_warn(
                f"privacy: delta = {rule.delta:g} is not below 1 / {covers.most} ({covers.among}): even a mechanism "
                f"that publishes {covers.shows} would satisfy it. Set delta to at most {0.1 / covers.most:.1g}"
            )
        if not rule.secure_noise:
            rank_zero_warn(
                "privacy: secure_noise is false, so that anybody with the seed can subtract the noise"
            )
        self._stop_within_budget(trainer, trainer.current_epoch)

    def _cost(self) -> str:
        """Describe ε at the run's end and the privacy budget, for the log."""
        if self._end is None:
            cost = "no end of rounds is planned"
        else:
            rounds, epsilon = self._end
            delta = self.privacy.delta + self._earlier.delta
            cost = f"ε = {epsilon:.4g} at δ = {delta:g} after {rounds} rounds"
            if before := self._earlier.epsilon:
                cost += f", {before:.4g} of it by earlier fits of this model"
            if (known := self._unamplified(rounds)) is not None:
                cost += f" ({known:.4g} without amplification by sampling)"
        if self.privacy.epsilon is not None:
            cost += f", budget {self.privacy.epsilon:g}"
            planned = self._accounted.num_rounds
            if planned is not None and self._allowed is not None and self._allowed < planned:
                cost += f" (of {planned} planned: the next would exceed it)"
        return cost

    def round_ends(self, trainer: Trainer, record: RoundRecord) -> None:
        """Raise if a learning-rate schedule monitors a metric without noise; end training if the budget is spent."""
        check_monitors(trainer, record.unprotected_names())
        self._stop_within_budget(trainer, trainer.current_epoch + 1)

    def _stop_within_budget(self, trainer: Trainer, next_round: int) -> None:
        """End training if the next round would exceed the privacy budget."""
        if self._allowed is None or next_round < self._allowed:
            return
        planned = trainer.max_epochs
        if planned is None or planned < 0 or next_round < planned:
            rank_zero_info(f"privacy: the budget is spent after {next_round} rounds; training ends")
        trainer.should_stop = True

    # In checkpoints.

    def state_dict(self) -> dict[str, Any]:
        """Return the privacy spent, and the privacy settings that a resumed run must share."""
        return {
            "terms": self._terms(self.mechanism, self.mechanism.noise_multiplier),
            "noise_multiplier": self.mechanism.noise_multiplier,
            "released": self.released,
            "mechanism": self.mechanism.state_dict(),
            "earlier": tuple(self._earlier),
        }

    def _terms(self, mechanism: Accounted[Any], noise_multiplier: float) -> dict[str, str]:
        """Return all settings that determine the privacy cost of a round, as texts by name."""
        options = vars(self.privacy)
        return {name: repr(options[name]) for name in options.keys() - _FREE} | {
            "privacy": type(self.privacy).__name__,
            "noise_multiplier": f"{noise_multiplier:g}",
            "mechanism": str(mechanism),
            "cohort": f"{self._accounted.cohort!r} of {self._accounted.num_clients} clients",
        }

    def load_state_dict(self, state: dict[str, Any], model: GlobalModel | None = None) -> None:
        """Restore the privacy spent and the noise multiplier of earlier rounds, from a checkpoint or an earlier fit.

        Raises:
            ConfigurationError: if these rounds cost something else.
        """
        saved, given = state["noise_multiplier"], self.privacy.noise_multiplier
        mechanism = self.mechanism  # with the noise found for these rounds, where there is a budget
        if saved != mechanism.noise_multiplier:
            mechanism = self.privacy.mechanism(self._accounted, noise_multiplier=saved)
        terms, before = self._terms(mechanism, saved if given is None else given), state["terms"]
        changed = [
            f"{name} was {before.get(name)}, not {terms.get(name)}"
            for name in sorted(before.keys() | terms.keys())
            if before.get(name) != terms.get(name)
        ]
        if changed:
            raise ConfigurationError(
                f"federation.privacy: in the rounds so far {'; '.join(changed)}. Their privacy cost is therefore "
                "another: resume with the options of these rounds, or start without ckpt_path"
            )
        earlier = Spent(*state["earlier"])
        if (saved, earlier) != (self.mechanism.noise_multiplier, self._earlier):
            self._earlier = earlier
            self._account(saved)
        self.released = state["released"]
        self.mechanism.load_state_dict(state["mechanism"])
