"""Differential privacy at work in a run: clip norm, noise, what was spent, and what is left.

    round r:  clip norm S_r → Σ clip(Δ) / qN → + noise → the server's step → ε after r + 1 rounds

A round counts as released the moment its noise is drawn. Of several processes the first draws.
"""

from __future__ import annotations

import math
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from fl_lightning.core.errors import ConfigurationError, RoundFailure
from fl_lightning.data.cohort import CohortSampler
from fl_lightning.federation.privacy_checks import check_one_mask
from fl_lightning.federation.ranks import Ranks
from fl_lightning.federation.round_record import RoundRecord
from fl_lightning.server.privacy.accountant import most_rounds
from fl_lightning.server.privacy.mechanism import Mechanism, Privacy
from fl_lightning.server.privacy.noise_source import noise_source
from fl_lightning.server.privacy.private_mean import PrivateMean
from fl_lightning.server.privacy.run import Run

# Where no end is planned, rounds are counted up to here to find those that a budget allows.
_NO_END = 1_000_000


class PrivateRounds:
    """Makes the aggregate of every round private.

    Args:
        privacy: what the user asked for.
        run: who takes part when.
        ranks: the processes.
        exact: have the same bits over any number of processes.

    Raises:
        ConfigurationError: if the run cannot be accounted for, or the budget allows no round.

    Attributes:
        aggregator: the fold over the round's updates.
        released: rounds whose result was released, in all.
    """

    def __init__(self, privacy: Privacy, run: Run, ranks: Ranks, *, exact: bool) -> None:
        self._privacy, self._run, self._ranks = privacy, run, ranks
        self._source = noise_source(run.seed, secure=privacy.secure_noise)
        self._use(privacy.mechanism(run, self._source))
        self.aggregator = PrivateMean(self._mechanism.expected, exact=exact)
        self.released = 0
        self._clip_norm = privacy.clip_norm
        self._round_index = 0
        self._facts: dict[str, float] = {}

    def _use(self, mechanism: Mechanism) -> None:
        self._mechanism = mechanism
        self._allowed = self._allowed_rounds()
        end = self._run.num_rounds if self._allowed is None else self._allowed
        self._end = end if end is None else (end, mechanism.epsilon(end))

    def _allowed_rounds(self) -> int | None:
        """Return how many rounds the budget allows, of those planned; None without a budget."""
        budget, planned = self._privacy.epsilon, self._run.num_rounds
        if budget is None:
            return None
        epsilon = self._mechanism.epsilon
        if planned is not None and epsilon(planned) <= budget:
            return planned
        allowed = most_rounds(epsilon, budget, planned or _NO_END)
        if allowed == 0:
            raise ConfigurationError(
                f"federation.privacy: one round costs ε = {epsilon(1):.3f}, more than the budget of "
                f"epsilon={budget:g}: raise noise_multiplier, or leave it out to have it found"
            )
        return allowed

    @property
    def shows_clients(self) -> bool:
        """Whether what no noise covers may be logged."""
        return self._privacy.log_unprotected

    @property
    def is_spent(self) -> bool:
        """Whether another round would exceed the budget."""
        return self._allowed is not None and self.released >= self._allowed

    def announce(self) -> None:
        """Say, before training, what the run will have cost."""
        privacy, mechanism = self._privacy, self._mechanism
        cost = "no end of rounds is planned"
        if self._end is not None:
            rounds, epsilon = self._end
            cost = f"ε = {epsilon:.4g} at δ = {privacy.delta:g} after {rounds} rounds"
        if privacy.epsilon is not None:
            cost += f", budget {privacy.epsilon:g}"
            if self._run.num_rounds is not None and rounds < self._run.num_rounds:
                cost += f" (of {self._run.num_rounds} planned: the next would exceed it)"
        rank_zero_info(
            f"privacy: {cost}; {mechanism}; noise multiplier {mechanism.noise_multiplier:.6g}, "
            f"clip norm {self._clip_norm:g}{', adaptive' if privacy.adaptive_clip else ''}"
        )

    def open_round(self, round_index: int) -> None:
        """Set the round's clip norm.

        Raises:
            RoundFailure: if the round would exceed the budget.
        """
        if self.is_spent:
            raise RoundFailure(
                f"round {round_index} would exceed the privacy budget of "
                f"epsilon={self._privacy.epsilon:g}: {self.released} rounds were released"
            )
        self._round_index = round_index
        self.aggregator.clip_norm = self._clip_norm
        self.aggregator.release = self._mechanism.client_release(round_index, self._clip_norm)

    def pseudo_gradient(self, aggregate: Tensor) -> Tensor:
        """Return the aggregate with the round's noise, shape (k,): what is released."""
        mechanism, clip_norm = self._mechanism, self._clip_norm
        self._check_shares()
        normals = self._normals(aggregate)
        noise = None
        if mechanism.noise_multiplier > 0 and mechanism.server_draws:
            noise = mechanism.server_noise(normals[:-1], self._round_index)
        if noise is not None:
            aggregate = aggregate + noise * (clip_norm / mechanism.expected)
        self.released += 1
        self._facts = self._spent() | {
            "privacy/clip_norm": clip_norm,
            "privacy/noise_stddev": self._noise_stddev(),
        }
        self._count_unclipped(normals[-1])
        return aggregate

    def _check_shares(self) -> None:
        replies, wanted = self.aggregator.num_replies, self._mechanism.fewest_replies
        if replies < wanted:
            raise RoundFailure(
                f"round {self._round_index}: {replies} clients replied, whose shares of noise are "
                f"too little together: federation.privacy.min_shares is {wanted}"
            )

    def _normals(self, like: Tensor) -> Tensor:
        """Return one normal number for each coordinate and one for the count, everywhere the same."""
        if self._mechanism.noise_multiplier == 0 or not self._mechanism.server_draws:
            return like.new_zeros(1)
        if self._ranks.rank == 0:
            normals = self._source.normal(len(like) + 1, self._round_index).to(like)
        else:
            normals = like.new_zeros(len(like) + 1)
        self._ranks.all_reduce(normals)
        return normals

    def _noise_stddev(self) -> float:
        stddev = self._mechanism.noise_per_round
        return stddev * self._clip_norm / self._mechanism.expected if stddev else 0.0

    def _count_unclipped(self, normal: Tensor) -> None:
        """Note the share of clipped updates, and have the clip norm follow it."""
        unclipped, replies = self.aggregator.num_unclipped, self.aggregator.num_replies
        if self._privacy.log_unprotected:
            self._facts["privacy/clip_fraction"] = 1 - unclipped / replies if replies else 0.0
        stddev, adaptive = self._mechanism.bits_stddev, self._privacy.adaptive_clip
        if adaptive is None or stddev is None:
            return
        noise = float(normal) * stddev if self._mechanism.noise_multiplier else 0.0
        share = 0.5 + (unclipped - 0.5 * replies + noise) / self._mechanism.expected
        self._facts["privacy/noisy_clip_fraction"] = 1 - share
        self._clip_norm = adaptive.next_norm(self._clip_norm, share)

    def _spent(self) -> dict[str, float]:
        epsilon = self._mechanism.epsilon(self.released, quick=True)
        if self._end is not None and self.released <= self._end[0]:
            epsilon = min(epsilon, self._end[1])  # the quick one is a little too high
        facts = {"privacy/epsilon": epsilon}
        if self._privacy.epsilon is not None:
            facts["privacy/budget_left"] = max(0.0, self._privacy.epsilon - epsilon)
        return {name: value for name, value in facts.items() if math.isfinite(value)}

    def note(self, record: RoundRecord) -> None:
        """Put what was spent into a round's record, and take out what may not be seen."""
        if not self._privacy.log_unprotected:
            record.withhold()
        record.privacy = dict(self._facts)

    def state_dict(self) -> dict[str, Any]:
        """Return what was spent and what later rounds depend on."""
        return {
            "kind": type(self._privacy).__name__,
            "setting": str(self._mechanism),
            "noise_multiplier": self._mechanism.noise_multiplier,
            "released": self.released,
            "clip_norm": self._clip_norm,
            "mechanism": self._mechanism.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint, with the noise of the run that wrote it.

        Raises:
            ConfigurationError: if that run had another kind of privacy, or another noise.
        """
        given = getattr(self._privacy, "noise_multiplier", None)
        saved = state["noise_multiplier"]
        same = state["kind"] == type(self._privacy).__name__ and given in (None, saved)
        if not same or state["setting"] != str(self._mechanism):
            raise ConfigurationError(
                f"federation.privacy: the checkpoint is of a run with {state['kind']}, noise "
                f"multiplier {saved:g} ({state['setting']}), whose rounds cost something else: "
                "resume with that, or start without ckpt_path"
            )
        if saved != self._mechanism.noise_multiplier:
            self._use(self._privacy.mechanism(self._run, self._source, saved))
        self.released, self._clip_norm = state["released"], state["clip_norm"]
        self._mechanism.load_state_dict(state["mechanism"])

    def stop_within_budget(self, trainer: Trainer) -> None:
        """Have training end once another round would exceed the budget."""
        if not self.is_spent:
            return
        planned = trainer.max_epochs
        if planned is None or planned < 0 or self.released < planned:
            rank_zero_info(
                f"privacy: the budget is spent after {self.released} rounds; training ends"
            )
        trainer.should_stop = True


def private_rounds(
    trainer: Trainer, privacy: Privacy, cohort: CohortSampler, seed: int, *, exact: bool
) -> PrivateRounds:
    """Return privacy at work in a Trainer's run.

    Args:
        trainer: set up for fitting.
        privacy: what the user asked for.
        cohort: who takes part.
        seed: the run's.
        exact: have the same bits over any number of processes.

    Raises:
        ConfigurationError: if the run cannot be accounted for.
    """
    check_one_mask(trainer)
    rounds, params = trainer.max_epochs, trainer.lightning_module.parameters()
    run = Run(
        cohort,
        num_clients=len(trainer.datamodule.clients),  # type: ignore[attr-defined]
        num_rounds=None if rounds is None or rounds < 0 else rounds,
        seed=seed,
        num_coordinates=sum(p.numel() for p in params if p.requires_grad),
    )
    return PrivateRounds(privacy, run, Ranks(trainer), exact=exact)
