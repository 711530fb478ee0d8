"""Calibration of a mask from scores that each client computes on its own examples.

    F_j = Σ_c Σ_{i of c} f_ij / Σ_c n_c        over the clients c of a calibration cohort

f_ij is the score of entry j on example i, and n_c the number of examples of client c. Every client sends sums
over its examples. The server adds the sums and ranks the means F_j, which equal those of the pooled examples.

Each process scores a part of the clients. The sums are added over processes, so that all processes find the
same mask, and in double precision, so that the order of the clients and the number of processes hardly matter.
An error in one process is raised in all.

The owners of examples are the clients, or in a central run one owner of all examples. Examples are read in
the order of their indices, without augmentation if the data set supports it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
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
from fl_lightning.data.shards import FlatShards
from fl_lightning.data.training_set import TrainingSet
from fl_lightning.federation import (
    ExampleOwners,
    Ranks,
    Visit,
    clients_as_owners,
    shares,
    training_loader,
    visiting,
)
from fl_lightning.reports.progress import federation_of, progress_bar
from fl_lightning.sparsity.calibration.calibrate import Calibration
from fl_lightning.sparsity.calibration.plan import CalibrationPlan
from fl_lightning.sparsity.calibration.rules import apportion
from fl_lightning.sparsity.masks.mask import Mask
from fl_lightning.sparsity.sensitivity.fisher import SampledFisher
from fl_lightning.sparsity.sensitivity.protocol import Scores, Sensitivity

_PURPOSE = "calibration"
SCORES = "scores"  # name of the sums that remote clients send


def example_owners(trainer: Trainer) -> ExampleOwners:
    """Return who owns which training examples: each client its own, or in central training one owner all.

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
        loader = training_loader(trainer)
        if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
            raise ConfigurationError(
                "MaskCalibration reads one training DataLoader over a map-style data set (with "
                f"__len__ and __getitem__), got {type(loader).__name__}: calibrate by hand with "
                "fl_lightning.sparsity.calibrate, save_mask, and give mask_file"
            )
        training = TrainingSet(loader)
        size, read = int(training.option("batch_size") or 32), training.reader()
        everything = torch.arange(len(training))
    return ExampleOwners(FlatShards.of([everything.numpy()]), read, size)


@contextmanager
def scoring(trainer: Trainer) -> Iterator[Visit]:
    """Inside a ``with`` block, give access to a Trainer's module, in eval mode and the Trainer's precision.

    In a run with 16-mixed, the precision is single: in half precision the smallest squared gradients, which
    decide which entries train, would become 0.
    """
    is_half = trainer.precision == "16-mixed"
    context = nullcontext() if is_half else trainer.precision_plugin.forward_context()
    with visiting(trainer, mode="eval") as visit, context:
        yield visit


def of_each(
    trainer: Trainer, owners: Integers, counts: Integers, work: Callable[[int, int], None]
) -> None:
    """Call a function once per owner (client), with owners divided among processes, all of which call this.

    Args:
        trainer: the Trainer.
        owners: numbers of the owners.
        counts: numbers of their examples, by which the work is divided.
        work: function of an owner and the number of its examples.

    Raises:
        Exception: the error of this process, or a `ConfigurationError` with the error of another process.
    """
    ranks = Ranks(trainer)
    mine = shares(counts, ranks.size)[ranks.rank]
    failure: Exception | None = None
    try:
        for owner, count in zip(owners[mine].tolist(), counts[mine].tolist(), strict=True):
            work(owner, count)
    except Exception as error:  # noqa: BLE001 - other processes would wait for this one forever
        failure = error
    failures = ranks.gather(None if failure is None else f"{type(failure).__name__}: {failure}")
    if failure is not None:
        raise failure
    if others := [words for words in failures if words is not None]:
        raise ConfigurationError(f"another process failed: {others[0]}")


@dataclass(frozen=True, kw_only=True)
class OwnerScores:
    """Calibrates masks: scores the entries of a Trainer's module on its training data.

    Args:
        sensitivity: estimator of the scores; None for `SampledFisher`.
        cohort: sampler of the clients that score in a federation; None for the federation's sampler.
        max_examples: largest number of examples in a calibration round, over all owners. If there are more,
            each owner scores examples in proportion to its number; None scores all.
        seed: root of all draws, each a function of (seed, version, round, client).
    """

    sensitivity: Sensitivity | None = None
    cohort: Cohort | None = None
    max_examples: int | None = None
    seed: int = 0

    def mask(
        self, trainer: Trainer, plan: CalibrationPlan, names: list[str], version: int
    ) -> tuple[Mask, int]:
        """Calibrate a mask on the examples of all owners (the clients); every process must call this.

        Args:
            trainer: Trainer whose module is on its device.
            plan: options of the calibration.
            names: names of the maskable parameters.
            version: number of the mask: 0 at the start of a run, then 1, 2, ….

        Returns:
            The mask, on the CPU, and the number of scores that owners sent, over all rounds.
        """
        if not plan.chosen_rule.needs_scores:
            return self._calibrated(trainer, plan, names, (version,), None), 0
        owners = example_owners(trainer)
        remote = getattr(trainer.datamodule, "summed_by", None)  # type: ignore[attr-defined]
        draws = [self._drawn(trainer, owners, version, r) for r in range(plan.rounds)]
        num_batches = sum(owners.num_batches(counts) for _, counts in draws) / trainer.world_size
        with (
            progress_bar(trainer, "Calibration", num_batches) as tick,
            scoring(trainer) as visit,
        ):
            owners = replace(owners, tick=tick)

            def scored(values: Mapping[str, Tensor], number: int) -> Scores:
                ids, (clients, counts) = (version, number), draws[number]
                if remote is None:
                    score = self.score(visit, owners, values, ids)
                else:  # scores arrive in the order of the clients
                    asked = dict(zip(clients.tolist(), counts.tolist(), strict=True))
                    options = {"version": version, "round": number}
                    read = partial(_checked, values)
                    received = remote(SCORES, asked, read, options=options, values=values)
                    score = lambda *_: next(received)
                return _summed(trainer, values, clients, counts, score)

            mask = self._calibrated(trainer, plan, names, (version,), scored)
        return mask, sum(len(clients) for clients, _ in draws)

    def mask_of(
        self, trainer: Trainer, plan: CalibrationPlan, names: list[str], owner: int
    ) -> Mask:
        """Calibrate a mask on the examples of one owner (a client), at the module's current weights.

        Only one process calls this. The mask is on the CPU.
        """
        owners = example_owners(trainer)
        total = int(owners.shards.num_examples[owner])
        with scoring(trainer) as visit:

            def scored(values: Mapping[str, Tensor], number: int) -> Scores:
                score = self.score(visit, owners, values, (0, number))
                return score(owner, min(self.max_examples or total, total))

            return self._calibrated(trainer, plan, names, (0, owner), scored)

    def _calibrated(
        self,
        trainer: Trainer,
        plan: CalibrationPlan,
        names: list[str],
        ids: tuple[int, ...],
        scored: Callable[[Mapping[str, Tensor], int], Scores] | None,
    ) -> Mask:
        """Run all rounds of a calibration, each of which scores and drops entries, and return the mask."""
        own = dict(trainer.lightning_module.named_parameters())
        seed = derive_seed(self.seed, _PURPOSE, *ids)
        calibration = Calibration(plan, {name: own[name] for name in names}, seed=seed)
        while not calibration.is_done:
            scores = None
            if calibration.needs_scores and scored is not None:
                scores = scored(calibration.soft_parameters(), calibration.round)
            calibration.step(scores)
        return calibration.mask.to("cpu")

    def _drawn(
        self, trainer: Trainer, owners: ExampleOwners, version: int, number: int
    ) -> tuple[Integers, Integers]:
        """Draw the owners (clients) of a calibration round; return their ids, and how many examples each scores."""
        federation, sizes = federation_of(trainer), owners.shards.num_examples
        sampler = AllClients() if federation is None else self.cohort or federation.cohort
        ids = sampler.sample(number, Population(sizes), derive_seed(self.seed, _PURPOSE, version))
        counts = sizes[ids]
        if self.max_examples is not None and counts.sum() > self.max_examples:
            counts = np.array(apportion(counts.tolist(), self.max_examples))
        return ids[counts > 0], counts[counts > 0]

    def score(
        self,
        visit: Visit,
        owners: ExampleOwners,
        values: Mapping[str, Tensor],
        ids: tuple[int, int],
    ) -> Callable[[int, int], Scores]:
        """Return a function of (owner, n) that scores the module's entries on n examples of that owner.

        Args:
            visit: access to the module, see `scoring`.
            owners: owners of all examples.
            values: values of the parameters at which examples are scored, by name.
            ids: version of the mask, and calibration round.
        """
        sensitivity = self.sensitivity or SampledFisher()

        def score(owner: int, num_examples: int) -> Scores:
            indices = owners.shards[owner]
            if num_examples < len(indices):
                generator = torch_generator(self.seed, "calibration examples", *ids, owner)
                drawn = torch.randperm(len(indices), generator=generator)[:num_examples]
                indices = indices[drawn.sort().values]
            own = derive_seed(self.seed, _PURPOSE, *ids, owner)
            seed_global_generators(own)  # for modules that draw in eval mode
            batches = owners.batches(visit, indices)
            return sensitivity(visit.module, batches, parameters=values, seed=own)

        return score


def _checked(values: Mapping[str, Tensor], sent: Mapping[str, Tensor], num_examples: int) -> Scores:
    """Check the scores that a remote client has sent, and return them.

    Raises:
        ValueError: if names or shapes are not those of the values, or a score is negative or not finite.
    """
    if {n: own.shape for n, own in sent.items()} != {n: own.shape for n, own in values.items()}:
        raise ValueError("its scores are not of these entries")
    reals = (torch.float32, torch.float64)
    if not all(own.dtype in reals and (own.isfinite() & (own >= 0)).all() for own in sent.values()):
        raise ValueError("its scores are no finite numbers ≥ 0")
    return Scores(sent, num_examples)


def _summed(
    trainer: Trainer,
    values: Mapping[str, Tensor],
    owners: Integers,
    counts: Integers,
    score: Callable[[int, int], Scores],
) -> Scores:
    """Return the sum of all owners' scores, added over all processes."""
    device = trainer.strategy.root_device
    # Apple's accelerators have no double precision
    dtype = torch.float32 if device.type == "mps" else torch.float64
    sums = {name: torch.zeros_like(value, dtype=dtype) for name, value in values.items()}
    num_examples = torch.zeros((), dtype=torch.int64, device=device)

    def add(owner: int, count: int) -> None:
        scores = score(owner, count)
        for name, total in sums.items():
            total += scores.sums[name].to(total.device)
        num_examples.add_(scores.num_examples)

    of_each(trainer, owners, counts, add)
    for total in (*sums.values(), num_examples):
        Ranks(trainer).all_reduce(total)
    return Scores(sums, int(num_examples))
