"""Differential privacy of clients in a run: clip norm, noise and privacy cost.

    round r:  clip norm S_r → (Σ clip(Δ) + noise) / qN → the server step → ε after r + 1 rounds

Sum and noise are whole steps of a grid, see `Grid`; later processing costs no privacy.

A round counts as released when its noise is drawn. If clients draw it, that is when the round opens,
because they send one after the other. Of several processes, the first draws the noise.

    cohort of round r:  drawn from BLAKE2b(secret, "cohort", r), where its sampling amplifies

Sampling amplifies privacy only towards those who do not know which clients took part. Such cohorts are
therefore not drawn from ``federation.seed``, which is in checkpoints and configurations, but from 256
bits of the operating system that are not saved. Rounds are independent, so that a resumed run draws from
a new secret at the same ε. Over a network the secret is saved, see `kept_secret`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from typing_extensions import override

from fl_lightning.core.errors import RoundFailure
from fl_lightning.core.seeds import Integers, secret_seed
from fl_lightning.core.update import GlobalModel
from fl_lightning.federation.checkpoints.run_folder import own_run_folder
from fl_lightning.federation.checks.privacy import warn_of_releases
from fl_lightning.federation.processes.ranks import Ranks
from fl_lightning.federation.round_record import RoundRecord
from fl_lightning.federation.run import Run
from fl_lightning.federation.stages.privacy_ledger import PrivacyLedger, PrivateStage
from fl_lightning.privacy.mechanism import AccountedRun, Mechanism, Privacy
from fl_lightning.privacy.noise.grid import Grid, noise_of
from fl_lightning.privacy.noise.noise_source import coins, noise_source
from fl_lightning.privacy.private_mean import PrivateMean
from fl_lightning.server.aggregator import PrivateAggregator, TakesNoiseShares
from fl_lightning.server.protected import NoiseShares

# Key of the random stream of the count's noise, and the count's grid: half a client is a whole step.
_COUNT, _COUNT_STEP = 1, 2.0**-20


class PrivateRounds(PrivateStage):
    """Makes the aggregate of every round private.

    Raises:
        ConfigurationError: if the run cannot be accounted for, or the budget allows no round.

    Attributes:
        aggregator: aggregates the round's updates.
        draws: None, as clients' batches are those of a run without privacy.
    """

    is_private = True
    draws: None = None

    def __init__(
        self,
        privacy: Privacy,
        run: AccountedRun,
        ranks: Ranks,
        *,
        exact: bool,  # bit-identical sums over any number of processes
        # adds up updates with clients' noise; None for sums in the clear
        secure: TakesNoiseShares | None = None,
        has_memory: bool = False,
        at_sites: bool = False,
    ) -> None:
        self._privacy, self._ranks, self._has_memory = privacy, ranks, has_memory
        source = self._source = noise_source(run.seed, secure=privacy.secure_noise)
        self._coins = coins(run.seed)
        self.ledger: PrivacyLedger[Mechanism] = PrivacyLedger(
            privacy, run, lambda noise: privacy.mechanism(run, source, noise)
        )
        self.aggregator: PrivateAggregator
        self._in_clear: PrivateMean | None = None
        if secure is None:
            self.aggregator = self._in_clear = PrivateMean(self._mechanism.expected, exact=exact)
        else:
            self.aggregator = secure.with_noise_shares(self._shares)
        self.hides_clients = not privacy.log_unprotected
        self._clip_norm = privacy.clip_norm
        self._round_index = 0
        # clients that add the noise are clipped by their sites, and come as they count
        self._at_sites = at_sites and privacy.clients_add_noise
        self._keeps_secret = at_sites
        self._has_warned = False
        self._facts: dict[str, float] = {}

    @property
    def _mechanism(self) -> Mechanism:
        return self.ledger.mechanism

    def _shares(self) -> NoiseShares:
        shares = self.ledger.mechanism.shares
        assert shares is not None, "others are refused, see `check_private`"
        return shares

    def enter(self, run: Run) -> None:
        """Set a secret seed for cohorts whose sampling amplifies privacy."""
        if self._privacy.secure_noise and self.ledger.mechanism.amplifies:
            secret = kept_secret(run.trainer) if self._keeps_secret else secret_seed()
            run.cohorts.seed = run.ranks.gather(secret)[0]
            self.hides_cohorts = True

    def say_cost(self, trainer: Trainer) -> None:
        """Log the run's privacy cost before training, and what ε does not cover."""
        adaptive = ", adaptive" if self._privacy.adaptive_clip else ""
        self.ledger.announce(f"{self._clip_norm:g}{adaptive}")
        warn_of_releases(
            trainer,
            self._privacy,
            num_clients=len(trainer.datamodule.clients),  # type: ignore[attr-defined]
            has_memory=self._has_memory,
        )

    def open(self, round_index: int, model: GlobalModel) -> None:
        """Set the round's clip norm; warn once of buffers that clients change."""
        if (num_buffers := model.buffers.numel()) and not self._has_warned:
            self._has_warned = True
            rank_zero_warn(
                f"privacy: {num_buffers} numbers in buffers that clients change (statistics of batch "
                "norm) are not sent; the global model keeps those it began with: use group or layer norm"
            )
        self.ledger.check_open(round_index)
        if self._privacy.clients_add_noise:
            self.ledger.count_round(round_index)
        self._round_index, self._facts = round_index, {}
        self._next_norm = self._clip_norm
        self.aggregator.clip_norm = self._clip_norm
        if (mean := self._in_clear) is not None:
            mean.clips, mean.release = not self._at_sites, None
            if not self._at_sites:
                mean.release = self._mechanism.client_release(round_index, self._clip_norm)
            mean.coins = None
            if self._has_server_noise:
                mean.coins = partial(self._coins.stream, round_index)

    def on_server(self, aggregate: Tensor) -> Tensor | None:
        """Return the noisy aggregate of a round, shape (k,), which is released.

        None if clients add the noise and no update arrived: nothing is released then.
        """
        mechanism, clip_norm = self._mechanism, self._clip_norm
        if self._privacy.clients_add_noise and not self.aggregator.num_replies:
            return None
        self._check_shares()
        mean = self._in_clear
        if mean is not None and mean.grid is not None:
            steps = self._with_noise(mean.total, self._round_index)
            total = mean.grid.value(steps)
            aggregate = (total / mechanism.expected).to(aggregate)
        self.ledger.count_round(self._round_index)
        self._facts = {
            "privacy/clip_norm": clip_norm,
            "privacy/noise_stddev": mechanism.noise_per_round * clip_norm / mechanism.expected
            if mechanism.noise_per_round
            else 0.0,
        }
        self._count_unclipped(aggregate)
        return aggregate

    def _check_shares(self) -> None:
        replies, wanted = self.aggregator.num_replies, self._mechanism.fewest_replies
        if replies < wanted:
            raise RoundFailure(
                f"round {self._round_index + 1}: {replies} clients replied, whose shares of noise are "
                f"too little together: federation.privacy.min_shares is {wanted}"
            )

    @property
    def _has_server_noise(self) -> bool:
        return not self._privacy.clients_add_noise and self._mechanism.noise_multiplier > 0

    def _with_noise(self, total: Tensor, round_index: int) -> Tensor:
        """Return a sum with a round's noise, in grid steps, shape (k,); the same in all processes."""
        grid, size = Grid.of(self._clip_norm, len(total)), len(total)

        def noise() -> Integers:
            return self._mechanism.server_noise(grid, size, self._source.stream(round_index))

        return self._mechanism.released(total, self._of_first(noise, total))

    def _of_first(self, numbers: Callable[[], Integers], like: Tensor) -> Tensor:
        """Return whole numbers that the first process draws, in all processes."""
        found = torch.zeros_like(like)
        if self._ranks.rank == 0:
            found = torch.from_numpy(numbers()).to(like.device)
        self._ranks.all_reduce(found)
        return found

    def _count_noise(self, stddev: float, like: Tensor) -> float:
        """Return the noise on the count of unclipped updates, a multiple of `_COUNT_STEP`."""
        if not (self._has_server_noise and stddev):
            return 0.0
        draw = self._source.stream(self._round_index, _COUNT)
        nothing = torch.zeros(1, dtype=torch.int64, device=like.device)
        drawn = self._of_first(lambda: noise_of(stddev / _COUNT_STEP, 1, draw), nothing)
        return float(drawn) * _COUNT_STEP

    def _count_unclipped(self, like: Tensor) -> None:
        """Note the fraction of clipped updates, and adapt the next clip norm to it."""
        unclipped, replies = self.aggregator.num_unclipped, self.aggregator.num_replies
        if self._privacy.log_unprotected and not self._at_sites:
            self._facts["privacy/clip_fraction"] = 1 - unclipped / replies if replies else 0.0
        stddev, adaptive = self._mechanism.bits_stddev, self._privacy.adaptive_clip
        if adaptive is None or stddev is None:
            return
        noise = self._count_noise(stddev, like)
        share = 0.5 + (unclipped - 0.5 * replies + noise) / self._mechanism.expected
        self._facts["privacy/noisy_clip_fraction"] = 1 - share
        self._next_norm = adaptive.next_norm(self._clip_norm, share)

    def stepped(self, params: Tensor) -> None:
        """Set the clip norm of the next round."""
        self._clip_norm = self._next_norm

    def close(self, record: RoundRecord) -> None:
        """Record the privacy spent in a round; drop numbers that no noise protects."""
        self.ledger.note(record, self.ledger.spent() | self._facts)

    @override
    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"clip_norm": self._clip_norm}

    @override
    def load_state_dict(self, state: dict[str, Any], model: GlobalModel | None = None) -> None:
        super().load_state_dict(state)
        self._clip_norm = state["clip_norm"]


def kept_secret(trainer: Trainer) -> int:
    """Return a run's secret seed, from a file that only its owner can read; new runs get a new one.

    Only over a network: a site refuses another cohort of a round that it has trained.
    """
    folder = own_run_folder(trainer)
    file = Path("." if "://" in folder else folder, "cohorts.secret")
    if trainer.ckpt_path is not None and file.exists():
        return int(file.read_text(), 16)
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished, secret = file.with_suffix(".unfinished"), secret_seed()
    unfinished.unlink(missing_ok=True)
    with open(os.open(unfinished, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as to:
        to.write(f"{secret:x}\n")
        to.flush()
        os.fsync(to.fileno())  # else the file is empty after a power failure
    os.replace(unfinished, file)
    return secret
