"""Calibration of a mask from scores that each client computes on its own examples.

    F_j = Σ_c Σ_{i of c} f_ij / Σ_c n_c        over the clients c of a calibration cohort

Every client sends sums over its examples, the server adds them and ranks the mean. So the mean is
weighted by examples, and equals that of the pooled examples. Each process scores its share of the
clients, and the sums are added over processes, so that all have the same mask. An error in one process is
raised in all.

Sums are added in double precision, so that their order and the number of processes hardly matter.

The owners of examples are the clients, or in a central run one owner of all examples. Examples are read in
the order of their indices, without augmentation if the data set supports it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from lightning.pytorch import Trainer
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.seeds import (
    Integers,
    derive_seed,
    seed_global_generators,
    torch_generator,
)
from fl_lightning.data.cohorts.cohort import AllClients, Cohort
from fl_lightning.data.cohorts.population import Population
from fl_lightning.data.federated import FederatedDataModule
from fl_lightning.data.training_set import TrainingSet
from fl_lightning.federation import Ranks, Visit, shares, training_loader, visiting
from fl_lightning.reports.progress import federation_of, progress_bar
from fl_lightning.sparsity.calibration.calibrate import Calibration
from fl_lightning.sparsity.calibration.plan import CalibrationPlan
from fl_lightning.sparsity.calibration.rules import apportion
from fl_lightning.sparsity.masks.mask import Mask
from fl_lightning.sparsity.sensitivity.fisher import SampledFisher
from fl_lightning.sparsity.sensitivity.protocol import Scores, Sensitivity

_PURPOSE = "calibration"
# Yields the scores of remote clients, in the order of the third argument.
# Arguments: parameter values to score at, (version, round), and the number of examples by client.
RemoteScores: TypeAlias = Callable[
    [Mapping[str, Tensor], tuple[int, int], Mapping[int, int]], Iterator[Scores]
]


@dataclass(frozen=True)
class ExampleOwners:
    """Training examples by owner: a client, or the single owner in a central run.

    Attributes:
        num_examples: number of examples of each owner, shape (owners,).
        indices: function from an owner to the indices of its examples.
        read: function from indices, shape (B,), to a batch, before `Visit.prepared`.
        batch_size: examples per batch.
    """

    num_examples: npt.NDArray[np.int64]
    indices: Callable[[int], Tensor]
    read: Callable[[Tensor], Any]
    batch_size: int

    def batches(self, indices: Tensor) -> Iterator[Any]:
        """Yield the examples at some indices in batches."""
        return (self.read(part) for part in indices.split(self.batch_size) if len(part))


def clients_as_owners(data: FederatedDataModule) -> ExampleOwners:
    """Return the clients of a federation as owners of their examples."""
    clients = data.clients
    return ExampleOwners(
        clients.num_examples,
        clients.__getitem__,
        lambda indices: data.evaluation_batch(indices),  # on access, because remote data have none
        data.batch_size,
    )


def example_owners(trainer: Trainer) -> ExampleOwners:
    """Owners of the training examples of a fit.

    Raises:
        ConfigurationError: in a central run, if the training data are not one `DataLoader` over a
            map-style data set.
    """
    data = trainer.datamodule  # type: ignore[attr-defined]
    if federation_of(trainer) is not None:
        return clients_as_owners(data)
    if isinstance(data, FederatedDataModule):
        size, read, everything = data.batch_size, data.evaluation_batch, data.train_indices
    else:
        training = TrainingSet(_checked(training_loader(trainer)))
        size, read = int(training.option("batch_size") or 32), training.reader()
        everything = torch.arange(len(training))
    return ExampleOwners(np.array([len(everything)]), lambda _: everything, read, size)


def scoring_context(trainer: Trainer) -> AbstractContextManager[None]:
    """Context of forward passes in the Trainer's precision; 16-mixed runs in single precision.

    In half precision the smallest squared gradients, which decide about the mask, would become 0.
    """
    if trainer.precision == "16-mixed":
        return nullcontext()
    return trainer.precision_plugin.forward_context()


def _checked(loader: Any) -> DataLoader[Any]:
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        raise ConfigurationError(
            "MaskCalibration reads one training DataLoader over a map-style data set (with "
            f"__len__ and __getitem__), got {type(loader).__name__}: calibrate by hand with "
            "fl_lightning.sparsity.calibrate, save_mask, and give mask_file"
        )
    return loader


def own_share(trainer: Trainer, owners: Integers, work: Integers) -> Integers:
    """Sorted positions of the owners that this process handles."""
    ranks = Ranks(trainer)
    if ranks.size == 1:
        return np.arange(len(owners))
    return shares(work, ranks.size)[ranks.rank]


def run_everywhere(trainer: Trainer, work: Callable[[], None]) -> None:
    """Run this process's part of the work, and raise in all processes if one fails.

    Raises:
        Exception: the error of this process; or else a `ConfigurationError` with that of another one.
    """
    failure: Exception | None = None
    try:
        work()
    except Exception as error:  # noqa: BLE001 - other processes would wait for this one forever
        failure = error
    failures = Ranks(trainer).gather(
        None if failure is None else f"{type(failure).__name__}: {failure}"
    )
    if failure is not None:
        raise failure
    if others := [words for words in failures if words is not None]:
        raise ConfigurationError(f"another process failed: {others[0]}")


# number of examples to score by owner, for the owners that this process handles
_Visits: TypeAlias = Mapping[int, int]


@dataclass(frozen=True, kw_only=True)
class OwnerScores:
    """Calibrates masks of a Trainer's module on the training data.

    Args:
        sensitivity: estimator of the scores; None for `SampledFisher`.
        cohort: sampler of the clients that score in a federation; None for the federation's sampler.
        max_examples: largest number of examples in a calibration round, over all owners, each in
            proportion to its examples; None for all.
        seed: root of all draws, each a function of (seed, version, round, client).
        remote: returns the scores of remote clients; None if examples are local.
    """

    sensitivity: Sensitivity | None = None
    cohort: Cohort | None = None
    max_examples: int | None = None
    seed: int = 0
    remote: RemoteScores | None = None

    def mask(self, trainer: Trainer, plan: CalibrationPlan, names: list[str], version: int) -> Mask:
        """Calibrate a mask on all owners' examples; every process must call this.

        Args:
            trainer: Trainer whose module is on its device.
            plan: options of the calibration.
            names: names of the maskable parameters.
            version: number of the mask: 0 at the start of a run, then 1, 2, ….

        Returns:
            The mask, on the CPU.
        """
        calibration = self._calibration(trainer, plan, names, version)
        if not calibration.needs_scores:
            calibration.step()
            return calibration.mask.to("cpu")
        owners = example_owners(trainer)
        rounds = range(len(calibration.num_kept))
        visits = [self._visits(trainer, owners, version, number) for number in rounds]
        batches = [-(-n // owners.batch_size) for v in visits for n in v.values()]
        with progress_bar(trainer, "Calibration", sum(batches)) as tick, scoring(trainer) as visit:
            for number in rounds:
                values = calibration.soft_parameters()
                if self.remote is None:
                    score = self.score(visit, owners, values, (version, number), tick)
                else:
                    received = self.remote(values, (version, number), visits[number])
                    score = partial(_next, received)
                calibration.step(_summed(trainer, values, visits[number], score))
        return calibration.mask.to("cpu")

    def num_sent(self, trainer: Trainer, plan: CalibrationPlan, version: int) -> int:
        """Number of clients that score for a mask, summed over the calibration rounds."""
        if not plan.chosen_rule.needs_scores:
            return 0
        owners = example_owners(trainer)
        rounds = range(plan.rounds)
        return sum(len(self._drawn(trainer, owners, version, number)[0]) for number in rounds)

    def mask_of(
        self, trainer: Trainer, plan: CalibrationPlan, names: list[str], owner: int
    ) -> Mask:
        """Calibrate a mask on the examples of one owner.

        Args:
            trainer: Trainer whose module has the values that the owner received.
            plan: options of the calibration.
            names: names of the maskable parameters.
            owner: number of the owner.

        Returns:
            The mask, on the CPU.
        """
        calibration = self._calibration(trainer, plan, names, 0, owner)
        owners = example_owners(trainer)
        most = self.max_examples or int(owners.num_examples[owner])
        count = min(most, int(owners.num_examples[owner]))
        with scoring(trainer) as visit:
            while not calibration.is_done:
                values = calibration.soft_parameters()
                score = self.score(visit, owners, values, (0, calibration.round))
                calibration.step(score(owner, count) if calibration.needs_scores else None)
        return calibration.mask.to("cpu")

    def _calibration(
        self, trainer: Trainer, plan: CalibrationPlan, names: list[str], *ids: int
    ) -> Calibration:
        own = dict(trainer.lightning_module.named_parameters())
        parameters = {name: own[name] for name in names}
        return Calibration(plan, parameters, seed=derive_seed(self.seed, _PURPOSE, *ids))

    def _drawn(
        self, trainer: Trainer, owners: ExampleOwners, version: int, number: int
    ) -> tuple[Integers, Integers]:
        """Draw the owners of a calibration round, and the number of examples that each scores."""
        federation, population = federation_of(trainer), Population(owners.num_examples)
        sampler = AllClients() if federation is None else self.cohort or federation.cohort
        ids = sampler.sample(number, population, derive_seed(self.seed, _PURPOSE, version))
        counts = owners.num_examples[ids]
        if self.max_examples is not None and counts.sum() > self.max_examples:
            counts = np.array(apportion(counts.tolist(), self.max_examples))
        return ids[counts > 0], counts[counts > 0]

    def _visits(
        self, trainer: Trainer, owners: ExampleOwners, version: int, number: int
    ) -> _Visits:
        ids, counts = self._drawn(trainer, owners, version, number)
        mine = own_share(trainer, ids, counts)
        return dict(zip(ids[mine].tolist(), counts[mine].tolist(), strict=True))

    def score(
        self,
        visit: Visit,
        owners: ExampleOwners,
        values: Mapping[str, Tensor],
        ids: tuple[int, int],
        tick: Callable[[], None] = lambda: None,
    ) -> Callable[[int, int], Scores]:
        """Return a function from an owner and a number of its examples to their scores.

        Args:
            visit: access to the module, see `scoring`.
            owners: the owners of all examples.
            values: parameter values to score at, by name.
            ids: version of the mask, and calibration round.
            tick: called after every batch.
        """
        sensitivity = self.sensitivity or SampledFisher()

        def ticking(batches: Iterator[Any]) -> Iterator[Any]:
            for batch in batches:
                yield visit.prepared(batch)
                tick()

        def score(owner: int, num_examples: int) -> Scores:
            indices = owners.indices(owner)
            if num_examples < len(indices):
                generator = torch_generator(self.seed, "calibration examples", *ids, owner)
                drawn = torch.randperm(len(indices), generator=generator)[:num_examples]
                indices = indices[drawn.sort().values]
            own = derive_seed(self.seed, _PURPOSE, *ids, owner)
            seed_global_generators(own)  # for modules that draw in eval mode
            batches = ticking(owners.batches(indices))
            return sensitivity(visit.module, batches, parameters=values, seed=own)

        return score


def _next(received: Iterator[Scores], owner: int, num_examples: int) -> Scores:
    """Return the next scores of remote clients, which arrive in the order of the owners."""
    return next(received)


@contextmanager
def scoring(trainer: Trainer) -> Iterator[Visit]:
    """Yield access to a Trainer's module in this block, in the Trainer's precision."""
    with visiting(trainer) as visit, scoring_context(trainer):
        yield visit


def _summed(
    trainer: Trainer,
    values: Mapping[str, Tensor],
    visits: _Visits,
    score: Callable[[int, int], Scores],
) -> Scores:
    """Return the sum of the scores of all owners, over all processes."""
    # Apple's accelerators have no double precision
    on_mps = trainer.strategy.root_device.type == "mps"
    dtype = torch.float32 if on_mps else torch.float64
    sums = {name: torch.zeros_like(value, dtype=dtype) for name, value in values.items()}
    num_examples = torch.zeros((), dtype=torch.int64, device=trainer.strategy.root_device)

    def visit() -> None:
        for owner, count in visits.items():
            scores = score(owner, count)
            for name, total in sums.items():
                total += scores.sums[name].to(total.device)
            num_examples.add_(scores.num_examples)

    run_everywhere(trainer, visit)
    ranks = Ranks(trainer)
    for total in (*sums.values(), num_examples):
        ranks.all_reduce(total)
    return Scores(sums, int(num_examples))
