"""The privacy budget of a run: its limit, spending and report.

ε of all planned rounds is logged before training. A round that would exceed the budget does not run.
Checkpoints hold the privacy spent; a resumed run keeps its noise multiplier.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info

from fl_lightning.core.errors import ConfigurationError, RoundFailure
from fl_lightning.core.update import GlobalModel
from fl_lightning.federation.checks.privacy import check_monitors
from fl_lightning.federation.plan import DrawsBatches
from fl_lightning.federation.round_record import RoundRecord
from fl_lightning.federation.stage import AroundFit, Stage
from fl_lightning.privacy.accounting.accountant import most_rounds
from fl_lightning.privacy.central import CentralGaussian
from fl_lightning.privacy.mechanism import Accounted, AccountedRun, Budgeted
from fl_lightning.server.aggregator import Aggregator

# Most rounds that are counted to find how many a budget allows, if no end is planned.
_NO_END = 1_000_000

M = TypeVar("M", bound=Accounted)


@dataclass(frozen=True)
class Spent:
    """Privacy cost of a model's fits so far; ``rounds`` and ``state`` are of the last fit."""

    epsilon: float = 0.0
    delta: float = 0.0
    unamplified: float = 0.0
    rounds: int = 0
    state: dict[str, Any] | None = None


_SPENT: WeakKeyDictionary[LightningModule, Callable[[], Spent]] = WeakKeyDictionary()


def spent_on(module: LightningModule) -> Spent:
    """Return the privacy cost of a module's fits in this process and in processes of its Trainers."""
    return _SPENT.get(module, Spent)()


def note_spent(module: LightningModule, spent: Callable[[], Spent]) -> None:
    """Remember the privacy cost of a module's fits."""
    _SPENT[module] = spent


class PrivacyLedger(Generic[M]):
    """Counts the released rounds of one fit and their privacy cost.

    Raises:
        ConfigurationError: if the run cannot be accounted for, or the budget allows no round.

    Attributes:
        mechanism: the accounted mechanism.
        released: number of rounds that count as released: all up to the last released one.
    """

    def __init__(
        self, privacy: Budgeted, run: AccountedRun, make: Callable[[float | None], M]
    ) -> None:
        self._privacy, self._num_rounds, self._make = privacy, run.num_rounds, make
        self._cohort = f"{run.cohort!r} of {run.num_clients} clients"
        self._before, self._earlier = 0, Spent()
        self._use(make(None))
        self.released = 0

    def _use(self, mechanism: M) -> None:
        self.mechanism = mechanism
        self._allowed = self._allowed_rounds()
        end = self._num_rounds if self._allowed is None else self._allowed
        self._end = end if end is None else (end, self._epsilon(end))

    def _epsilon(self, rounds: int, *, quick: bool = False) -> float:
        """Return ε of the model after a number of rounds of this fit."""
        own = self.mechanism.epsilon(self._before + rounds, quick=quick)
        return self._earlier.epsilon + own

    def _allowed_rounds(self) -> int | None:
        """Return the number of rounds that the budget allows, of those planned; None without a budget."""
        budget, planned = self._privacy.epsilon, self._num_rounds
        if budget is None:
            return None
        epsilon = self._epsilon
        if planned is not None and epsilon(planned) <= budget:
            return planned
        allowed = most_rounds(epsilon, budget, planned or _NO_END)
        if allowed == 0 and (before := epsilon(0)) > 0:
            raise ConfigurationError(
                f"federation.privacy: earlier fits of this model have spent ε = {before:.4g}, and one "
                f"more round would exceed the budget of epsilon={budget:g}: raise it, or train a new model"
            )
        if allowed == 0:
            raise ConfigurationError(
                f"federation.privacy: one round costs ε = {epsilon(1):.3f}, more than the budget of "
                f"epsilon={budget:g}: raise noise_multiplier, or leave it out to have it found"
            )
        return allowed

    def _if_known(self, rounds: int) -> float | None:
        """Return ε without amplification; None if nothing amplifies, or if cohorts are secret."""
        if self._privacy.secure_noise or not self.mechanism.amplifies:
            return None
        return self._earlier.unamplified + self.mechanism.epsilon_if_known(rounds)

    def announce(self, clip_norm: str) -> None:
        """Log the run's privacy cost before training."""
        privacy, mechanism = self._privacy, self.mechanism
        cost = "no end of rounds is planned"
        if self._end is not None:
            rounds, epsilon = self._end
            delta = privacy.delta + self._earlier.delta
            cost = f"ε = {epsilon:.4g} at δ = {delta:g} after {rounds} rounds"
            if before := self._epsilon(0):
                cost += f", {before:.4g} of it by earlier fits of this model"
        if self._end is not None and (known := self._if_known(self._end[0])) is not None:
            cost += f" ({known:.4g} without amplification by sampling)"
        if privacy.epsilon is not None:
            cost += f", budget {privacy.epsilon:g}"
            if self._num_rounds is not None and rounds < self._num_rounds:
                cost += f" (of {self._num_rounds} planned: the next would exceed it)"
        rank_zero_info(
            f"privacy: {cost}; {mechanism}; noise multiplier {mechanism.noise_multiplier:.6g}, "
            f"clip norm {clip_norm}{self._rounding()}"
        )

    def _rounding(self) -> str:
        """Return a clause on the grid to which sums are rounded, and by how much that raises ε."""
        noise, factor = self.mechanism.noise_multiplier, self.mechanism.rounding
        if not noise or self._end is None:
            return ""
        rounds, step = self._end[0], self.mechanism.step(self._privacy.clip_norm)
        with_it = self.mechanism.epsilon(rounds, quick=True)
        without = self._make(noise * factor).epsilon(rounds, quick=True)
        return f", in steps of {step:.2g}, which adds {max(0.0, with_it - without):.1g} to ε"

    def check_open(self, round_index: int) -> None:
        """Raise if a round would exceed the budget."""
        if self._allowed is not None and round_index >= self._allowed:
            raise RoundFailure(
                f"round {round_index + 1} would exceed the privacy budget of "
                f"epsilon={self._privacy.epsilon:g}, which allows {self._allowed} rounds"
            )

    def count_round(self, round_index: int) -> None:
        """Count a round and all earlier ones as released, also those that were broken off."""
        self.released = max(self.released, round_index + 1)  # it may be trained again

    def spent(self) -> dict[str, float]:
        """Return ε so far and the remaining budget, for logs."""
        epsilon = self._epsilon(self.released, quick=True)
        if self._end is not None and self.released <= self._end[0]:
            epsilon = min(epsilon, self._end[1])  # the quick one is a little too high
        facts = {"privacy/epsilon": epsilon}
        if (known := self._if_known(self.released)) is not None:
            facts["privacy/epsilon_unamplified"] = known
        if self._privacy.epsilon is not None:
            facts["privacy/budget_left"] = max(0.0, self._privacy.epsilon - epsilon)
        return {name: value for name, value in facts.items() if math.isfinite(value)}

    def note(self, record: RoundRecord, facts: dict[str, float]) -> None:
        """Record the privacy spent; remove numbers that no noise protects."""
        if not self._privacy.log_unprotected:
            record.withhold()
        record.privacy = dict(facts)

    def state_dict(self) -> dict[str, Any]:
        """Return the privacy spent and the settings on which later rounds depend."""
        return {
            "kind": type(self._privacy).__name__,
            "setting": str(self.mechanism),
            "cohort": self._cohort,
            "terms": self._terms(),
            "noise_multiplier": self.mechanism.noise_multiplier,
            "released": self.released,
            "mechanism": self.mechanism.state_dict(),
            "before": self._before,
            "earlier": [self._earlier.epsilon, self._earlier.delta, self._earlier.unamplified],
        }

    def _terms(self) -> dict[str, str]:
        """Return the options that a resumed run must share, without those of the noise multiplier."""
        free = {"noise_multiplier", "epsilon", "delta", "log_unprotected"}
        options = {name: repr(value) for name, value in vars(self._privacy).items()}
        return {name: options[name] for name in options.keys() - free}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the privacy spent in earlier rounds, and their noise multiplier."""
        if (reason := self._reason_against(state)) is not None:
            raise ConfigurationError(f"federation.privacy: {reason}, or start without ckpt_path")
        self._before, self._earlier = state.get("before", 0), Spent(*state.get("earlier", ()))
        saved = state["noise_multiplier"]
        if saved != self.mechanism.noise_multiplier or self._before or self._earlier.epsilon:
            self._use(self._make(saved))
        self.released = state["released"]
        self.mechanism.load_state_dict(state["mechanism"])

    def _reason_against(self, state: dict[str, Any]) -> str | None:
        """Return why rounds of a saved state cannot be counted with this run's; None if they can."""
        given = self._privacy.noise_multiplier
        saved, cohort = state["noise_multiplier"], state.get("cohort")
        same = state["kind"] == type(self._privacy).__name__ and given in (None, saved)
        if not same or (state["setting"], cohort) != (str(self.mechanism), self._cohort):
            return (
                f"the rounds so far were with {state['kind']}, noise multiplier {saved:g} "
                f"({state['setting']}) and {cohort}, and these rounds cost something else "
                f"({self.mechanism}; {self._cohort}): resume with that"
            )
        before = state.get("terms", terms := self._terms())
        if other := [name for name in terms if before.get(name) != terms[name]]:
            changed = "; ".join(
                f"{name} was {before.get(name)}, not {terms[name]}" for name in other
            )
            return f"{changed} in the rounds so far: resume with that"
        return None

    def follow(self, earlier: Spent) -> None:
        """Add the privacy cost of earlier fits of the model, with other Trainers.

        Rounds of the same cost compose as one run if cohorts are secret, and thus newly drawn; otherwise ε
        and δ add up. A budget that allows no further round raises ConfigurationError.
        """
        if (state := earlier.state) is None or not earlier.epsilon:
            return
        alike = isinstance(self.mechanism, CentralGaussian) and self._privacy.secure_noise
        if alike and self._reason_against(state) is None:
            self._before, self._earlier = earlier.rounds, Spent(*state["earlier"])
            self._use(self._make(state["noise_multiplier"]))
        else:
            self._earlier = replace(earlier, rounds=0, state=None)
            self._use(self.mechanism)

    def total(self) -> Spent:
        """Return the privacy spent so far."""
        return Spent(
            epsilon=self._epsilon(self.released),
            delta=self._earlier.delta + self._privacy.delta,
            unamplified=self._if_known(self.released) or self._epsilon(self.released),
            rounds=self._before + self.released,
            state=self.state_dict(),
        )

    def stop_within_budget(self, trainer: Trainer, next_round: int) -> None:
        """End training if the next round would exceed the budget."""
        if self._allowed is None or next_round < self._allowed:
            return
        planned = trainer.max_epochs
        if planned is None or planned < 0 or next_round < planned:
            rank_zero_info(f"privacy: the budget is spent after {next_round} rounds; training ends")
        trainer.should_stop = True


class PrivateStage(AroundFit):
    """A stage that makes a run private and counts its privacy cost, with that of earlier fits.

    Attributes:
        ledger: the privacy budget and what was spent of it.
        aggregator: aggregates a round's updates; None if updates are private by themselves.
        draws: draws clients' batches; None for passes over shards.
    """

    key = "privacy"
    ledger: PrivacyLedger[Any]
    aggregator: Aggregator | None
    draws: DrawsBatches | None

    @abstractmethod
    def say_cost(self, trainer: Trainer) -> None:
        """Log the run's privacy cost before training, and what ε does not cover."""

    def state_dict(self) -> dict[str, Any]:
        """Return the privacy spent."""
        return self.ledger.state_dict()

    def load_state_dict(self, state: dict[str, Any], model: GlobalModel | None = None) -> None:
        """Restore the privacy spent of a checkpoint or an earlier fit."""
        self.ledger.load_state_dict(state)

    def fit_begins(self, trainer: Trainer, earlier: Sequence[Stage] | None) -> None:
        """Count the privacy spent by earlier fits of the same Trainer or of the same model."""
        if earlier is not None:
            self._count_earlier(trainer, next((s for s in earlier if type(s) is type(self)), None))
        note_spent(trainer.lightning_module, self.ledger.total)

    def _count_earlier(self, trainer: Trainer, earlier: Stage | None) -> None:
        if (checkpoint := trainer.ckpt_path) is not None:
            raise ConfigurationError(
                f"ckpt_path: {checkpoint} knows no rounds of a Federation, and what its training has cost "
                "would be missing in ε: leave ckpt_path out. To start from its weights, which ε does not "
                "cover then, give model.init_args.checkpoint_path, or load its state_dict into the module"
            )
        if trainer.current_epoch == 0:
            self.ledger.follow(spent_on(trainer.lightning_module))
            return
        if earlier is None:
            raise ConfigurationError(
                "federation.privacy: this Trainer has trained before, with another Federation or "
                "without privacy, and what that cost is not known here: keep to one Federation, go on "
                "from a private run's checkpoint with ckpt_path, or begin with a new Trainer"
            )
        self.load_state_dict(earlier.state_dict())

    def training_begins(self, trainer: Trainer) -> None:
        """Log the privacy cost and its limits; stop if no budget is left."""
        self.say_cost(trainer)
        self.ledger.stop_within_budget(trainer, trainer.current_epoch)

    def round_ends(self, trainer: Trainer, record: RoundRecord) -> None:
        """Raise if a learning rate follows a number without noise; stop if no budget is left."""
        check_monitors(trainer, record.unprotected_names())
        self.ledger.stop_within_budget(trainer, trainer.current_epoch + 1)
