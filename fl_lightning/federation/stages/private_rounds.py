"""Differential privacy of clients in a run: clip norm, noise and privacy cost.

    round r:  clip norm S_r → (Σ clip(Δ) + noise) / qN → the server step → ε after r + 1 rounds

Sum and noise are whole steps of a grid, see `Grid`; later processing costs no privacy.

A round counts as released when its noise is drawn; if clients draw the noise, when the round opens. With
several processes, the first one draws the noise.

    cohort of round r:  drawn from BLAKE2b(secret, "cohort", r), where its sampling amplifies

Sampling amplifies privacy only against observers who do not know which clients took part. Such cohorts are
therefore not drawn from ``federation.seed``, which is in checkpoints and configurations, but from a secret of
256 random bits that is not saved. Rounds are independent, so that a resumed run may draw from a new secret at
the same ε. Over a network the secret is saved, see `kept_secret`.
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
from fl_lightning.federation.processes.ranks import Ranks
from fl_lightning.federation.round_record import RoundRecord
from fl_lightning.federation.run import Run
from fl_lightning.federation.stages.privacy_ledger import Covers, PrivateStage
from fl_lightning.privacy.mechanism import AccountedRun, Mechanism, Privacy
from fl_lightning.privacy.noise.grid import Grid, noise_of
from fl_lightning.privacy.private_mean import AdaptiveClip, PrivateMean
from fl_lightning.server.aggregator import PrivateAggregator, TakesNoiseShares
from fl_lightning.server.protected import NoiseShares

# Key of the random stream of the count's noise, and the count's grid: half a client is a whole step.
_COUNT, _COUNT_STEP = 1, 2.0**-20


class PrivateRounds(PrivateStage):
    """Makes every round's aggregate private for whole clients, by clipped updates and noise.

    Args:
        privacy: the rule of privacy.
        run: the properties of the run that determine its ε.
        ranks: the processes of the run.
        exact: whether sums are bit-identical over any number of processes.
        secure: adds up updates with clients' noise; None for sums in the clear.
        has_memory: whether clients have states that last from round to round.
        at_sites: whether clients are remote.

    Raises:
        ConfigurationError: if the run cannot be accounted for, or the budget allows no round.
    """

    is_private = True
    privacy: Privacy
    mechanism: Mechanism[Any]
    aggregator: PrivateAggregator

    def __init__(
        self,
        privacy: Privacy,
        run: AccountedRun,
        ranks: Ranks,
        *,
        exact: bool,
        secure: TakesNoiseShares | None = None,
        has_memory: bool = False,
        at_sites: bool = False,
    ) -> None:
        super().__init__(privacy, run)
        self._ranks, self._has_memory, self._keeps_secret = ranks, has_memory, at_sites
        # remote clients that add noise send updates that are clipped already
        self._are_noisy = at_sites and privacy.clients_add_noise
        self._in_clear: PrivateMean | None = None
        if secure is None:
            self.aggregator = self._in_clear = PrivateMean(self.mechanism.expected, exact=exact)
        else:
            self.aggregator = secure.with_noise_shares(self._shares)
        self._clip_norm, self._has_warned = privacy.clip_norm, False
        self._facts: dict[str, float] = {}

    def _shares(self) -> NoiseShares:
        shares = self.mechanism.shares
        assert shares is not None, "others are refused by their traits"
        return shares

    def enter(self, run: Run) -> None:
        """Draw cohorts from a secret seed if their sampling amplifies privacy."""
        if self.privacy.secure_noise and self.mechanism.amplifies:
            secret = kept_secret(run.trainer) if self._keeps_secret else secret_seed()
            run.cohorts.seed = run.ranks.gather(secret)[0]
            self.hides_cohorts = True

    @override
    def covers(self, trainer: Trainer) -> Covers:
        shown, adaptive = [], ", adaptive" if self.privacy.adaptive_clip else ""
        if self.privacy.log_unprotected:
            shown.append(
                "metrics and norms of clients, cohort sizes and shares of clipped updates in the logs "
                "(log_unprotected: false leaves them out)"
            )
        if self._has_memory:
            shown.append("what clients remember between rounds, in checkpoints")
        clip_norm, most = f"{self._clip_norm:g}{adaptive}", self._accounted.num_clients
        return Covers(clip_norm, "the models", shown, most, "clients", "one client's data")

    @override
    def open(self, round_index: int, model: GlobalModel) -> None:
        super().open(round_index, model)
        if (num_buffers := model.buffers.numel()) and not self._has_warned:
            self._has_warned = True
            rank_zero_warn(
                f"privacy: clients do not send the {num_buffers} entries of buffers that they change (statistics of "
                "batch norm), and the global model keeps its initial ones: use group or layer norm"
            )
        if self.privacy.clients_add_noise:
            self.count_round(round_index)
        self._round_index, self._facts, self._next_norm = round_index, {}, self._clip_norm
        self.aggregator.clip_norm = self._clip_norm
        if (mean := self._in_clear) is not None:
            mean.clips, mean.release, mean.coins = not self._are_noisy, None, None
            if mean.clips:
                mean.release = self.mechanism.client_release(round_index, self._clip_norm)
            if not self.privacy.clients_add_noise and self.mechanism.noise_multiplier > 0:
                mean.coins = partial(self._coins.stream, round_index)

    def on_server(self, aggregate: Tensor) -> Tensor | None:
        """Return the noisy aggregate of a round, shape (k,), which is released.

        None if clients add the noise and no update arrived: nothing is released then.
        """
        mechanism, replies, mean = self.mechanism, self.aggregator.num_replies, self._in_clear
        if self.privacy.clients_add_noise and not replies:
            return None
        if replies < mechanism.fewest_replies:
            raise RoundFailure(
                f"round {self._round_index + 1}: {replies} clients replied, and the sum of their noise is too small: "
                f"federation.privacy.min_shares is {mechanism.fewest_replies}. Use a larger cohort or lower "
                "min_shares"
            )
        if mean is not None and mean.grid is not None:
            total = mean.grid.value(self._with_noise(mean.total, self._round_index))
            aggregate = (total / mechanism.expected).to(aggregate)
        self.count_round(self._round_index)
        noise = mechanism.noise_per_round  # without it the clip norm may be infinite
        stddev = noise * self._clip_norm / mechanism.expected if noise else 0.0
        self._facts = {"privacy/clip_norm": self._clip_norm, "privacy/noise_stddev": stddev}
        if self.privacy.log_unprotected and not self._are_noisy:
            clipped = replies - self.aggregator.num_unclipped
            self._facts["privacy/clip_fraction"] = clipped / replies if replies else 0.0
        if self.privacy.adaptive_clip is not None and mechanism.bits_stddev is not None:
            self._adapt(self.privacy.adaptive_clip, mechanism.bits_stddev, aggregate.device)
        return aggregate

    def _with_noise(self, total: Tensor, round_index: int) -> Tensor:
        """Return the sum of updates plus the round's noise, in whole grid steps, shape (k,); equal in all processes."""
        mechanism, grid = self.mechanism, Grid.of(self._clip_norm, len(total))
        draw = mechanism.source.stream(round_index)
        noise = self._of_first(lambda: mechanism.server_noise(grid, len(total), draw), total)
        return mechanism.released(total, noise)

    def _of_first(self, numbers: Callable[[], Integers], like: Tensor) -> Tensor:
        """Draw random integers in the first process, and return the same integers in every process."""
        found = torch.zeros_like(like)
        if self._ranks.rank == 0:
            found = torch.from_numpy(numbers()).to(like.device)
        self._ranks.all_reduce(found)
        return found

    def _adapt(self, adaptive: AdaptiveClip, stddev: float, device: torch.device) -> None:
        """Compute the next clip norm from the noisy fraction of clipped updates (adaptive clipping)."""
        unclipped, replies = self.aggregator.num_unclipped, self.aggregator.num_replies
        noise = 0.0
        if self._in_clear is not None and self._in_clear.coins is not None and stddev:
            draw = self.mechanism.source.stream(self._round_index, _COUNT)
            nothing = torch.zeros(1, dtype=torch.int64, device=device)
            drawn = self._of_first(lambda: noise_of(stddev / _COUNT_STEP, 1, draw), nothing)
            noise = float(drawn) * _COUNT_STEP
        share = 0.5 + (unclipped - 0.5 * replies + noise) / self.mechanism.expected
        self._facts["privacy/noisy_clip_fraction"] = 1 - share
        self._next_norm = adaptive.next_norm(self._clip_norm, share)

    def close(self, record: RoundRecord) -> None:
        """Adopt the next clip norm and commit the noise that later rounds subtract; record the privacy spent."""
        self.mechanism.commit()
        self._clip_norm = self._next_norm
        self.note(record, self._facts)

    @override
    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"clip_norm": self._clip_norm}

    @override
    def load_state_dict(self, state: dict[str, Any], model: GlobalModel | None = None) -> None:
        super().load_state_dict(state)
        self._clip_norm = state["clip_norm"]


def kept_secret(trainer: Trainer) -> int:
    """Return the secret seed for cohorts of a network run, from a file that only its owner can read.

    A new run gets a new secret. A resumed run needs the old one: sites refuse another cohort for a round that
    they have trained.
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
