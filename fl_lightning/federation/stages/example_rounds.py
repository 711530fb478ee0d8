"""Differential privacy of examples in a run: clients' batches, noise and privacy cost.

    local step:  Poisson batch → Σ clip(∇ℓ_i) + noise → ÷ expected batch size → the client's optimizer

Updates are private by themselves: the aggregate gets no noise. A round counts as spent for its whole
cohort when it opens, whether or not updates arrive.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor
from typing_extensions import override

from fl_lightning.client.optimizers import needs_closure
from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.seeds import Draw
from fl_lightning.core.space import Space
from fl_lightning.core.update import GlobalModel
from fl_lightning.data.shards import poisson_batches
from fl_lightning.engines import ExampleGradients, zero_gradient
from fl_lightning.federation.hooks import NOT_THE_USERS
from fl_lightning.federation.round_record import RoundRecord
from fl_lightning.federation.run import Run
from fl_lightning.federation.stage import LocalTraining
from fl_lightning.federation.stages.privacy_ledger import Covers, PrivateStage
from fl_lightning.federation.visits.visiting import takes_index
from fl_lightning.privacy.example import ExampleDP, ExampleGaussian
from fl_lightning.privacy.mechanism import AccountedRun
from fl_lightning.privacy.noise.grid import Grid, noise_of

# Key that separates the random stream of a step's noise from that of its batch.
_NOISE = 1


class ExampleRounds(PrivateStage):
    """Makes clients' local steps differentially private per example, as in DP-SGD, and draws their Poisson batches.

    Raises:
        ConfigurationError: if the run cannot be accounted for, or the budget allows no round.
    """

    privacy: ExampleDP
    mechanism: ExampleGaussian

    def __init__(self, privacy: ExampleDP, run: AccountedRun) -> None:
        super().__init__(privacy, run)
        self._whose = 0, 0  # the client whose steps come next, and its round
        self.draws = self

    @override
    def covers(self, trainer: Trainer) -> Covers:
        shown = ["how many examples each client has"]
        if self.privacy.log_unprotected:
            shown.insert(0, "training loss, metrics and norms in the logs (log_unprotected: false)")
        clip_norm = f"{self.privacy.clip_norm:g} of an example's gradient"
        most = int(self.mechanism.local.num_examples.max())
        covered = "updates and models"
        return Covers(clip_norm, covered, shown, most, "examples of a client", "one of them")

    def enter(self, run: Run) -> None:
        """Make local steps use private gradients: clipped per example, summed, and with noise."""
        if needs_closure(optimizer := run.trainer.optimizers[0]):
            raise ConfigurationError(
                "federation.privacy ExampleDP accounts for one gradient per step, and "
                f"{type(optimizer).__name__} computes several by a closure: use SGD or Adam"
            )
        self._run = run
        self._collector = run.collector if self.privacy.log_unprotected else None
        self._gradients = ExampleGradients(
            run.module,
            run.step.loss,
            takes_index=takes_index(run.module.training_step),
            collector=self._collector,
            ignore=NOT_THE_USERS,
        )
        run.step.examples = self.gradient

    @contextmanager
    def steps(self, training: LocalTraining) -> Iterator[None]:
        """Note the client and round of the local steps inside the block, which determine their noise."""
        self._whose = training.work.client_id, training.work.round_index
        yield

    @override
    def open(self, round_index: int, model: GlobalModel) -> None:
        super().open(round_index, model)
        self.count_round(round_index)  # of the whole cohort, whether or not updates arrive

    def close(self, record: RoundRecord) -> None:
        """Write the privacy spent into the round's metrics; remove metrics that no noise protects."""
        facts = {"privacy/clip_norm": self.privacy.clip_norm}
        if noise := self.mechanism.noise_of_gradients:
            facts["privacy/noise_stddev"] = noise * self.privacy.clip_norm
        self.note(record, facts)

    def batches(
        self, shard: Tensor, batch_size: int, num_steps: int, client: int, round_index: int
    ) -> tuple[Tensor, list[int]]:
        """Draw the Poisson batches of a client's local steps: example indices and batch sizes, see `poisson_batches`.

        Raises:
            ConfigurationError: if there are more steps than the ledger counts.
        """
        counted = int(self.mechanism.local.num_steps[client])
        if num_steps > counted:
            raise ConfigurationError(
                f"federation.privacy: client {client} would take {num_steps} local steps, and its ε counts "
                f"{counted}: its shard or the batch size has changed since the fit began. Keep them "
                "fixed, or start a new fit"
            )
        return poisson_batches(
            shard,
            batch_size,
            num_steps,
            lambda step: self.mechanism.source.stream(round_index, client, step)(len(shard)),
        )

    def gradient(self, batch: Any, size: int, index: int) -> Tensor | None:
        """Set the private gradient of a client's batch; return the mean loss, or None if it may not be logged.

        Args:
            batch: a batch ready for the training step; ignored if it is empty.
            size: examples in the batch.
            index: index of the client's local step in the round.
        """
        client, round_index = self._whose
        mechanism, clip_norm = self.mechanism, self.privacy.clip_norm
        expected = max(1, int(mechanism.local.expected[client]))
        if self.privacy.is_off:
            return self._plain(batch, size, index, size / expected)
        space, grid, to_steps = self._run.local.space, None, None
        if mechanism.noise_multiplier > 0:
            grid = Grid.of(clip_norm, space.size)
            to_steps = partial(_to_steps, grid, self._coins.stream(round_index, client, index))
        total, losses = zero_gradient(space, as_integers=grid is not None), None
        if size:
            before = self._gradients.num_clipped
            total, losses = self._gradients(space, batch, index, clip_norm, to_steps)
            if self._collector is not None:
                self._collector.batch_size = size
                share = (self._gradients.num_clipped - before) / size
                self._collector.log("privacy/clip_fraction", share)
        if grid is not None:
            # the words of (round, client, step) have drawn the batch
            draw = mechanism.source.stream(round_index, client, index, _NOISE)
            stddev = mechanism.noise_multiplier * clip_norm
            noise = torch.from_numpy(noise_of(stddev / grid.step, space.size, draw))
            total = grid.value(total + noise.to(total.device)).to(space.device, space.dtype)
        _set_gradients(space, total / expected)
        return None if losses is None or self._collector is None else losses.mean()

    def _plain(self, batch: Any, size: int, index: int, scale: float) -> Tensor | None:
        """Set the gradient without clipping and noise, scaled to the expected batch size, and return the loss."""
        loss = self._run.step.loss(batch, index) if size else None
        if loss is None:
            return None
        (loss if scale == 1 else loss * scale).backward()
        return loss.detach()


def _to_steps(grid: Grid, draw: Draw, gradient: Tensor) -> Tensor:
    return torch.from_numpy(grid.to_steps(gradient, draw)).to(gradient.device)


@torch.no_grad()
def _set_gradients(space: Space, vector: Tensor) -> None:
    """Set the parameters' gradients from a vector, shape (k,); 0 where entries are frozen."""
    for param, index, part in space.entries(vector):
        part = part.to(param.dtype)
        if index is None:
            param.grad = part.clone()
        else:
            param.grad = torch.zeros_like(param)
            param.grad.view(-1).index_copy_(0, index, part)
