"""A mask from scores that the owners of the examples compute, each on its own.

    F_j = Σ_c Σ_{i of c} f_ij / Σ_c n_c        over the clients c of a calibration cohort

Every client sends sums over its examples; the server adds them and ranks the mean, which so is
weighted by examples and equals the mean over all of them in one place. In several processes each
scores its share of the clients and the sums are added over processes: all find the same mask.

Sums are added in double precision: in which order, and in how many processes, then shows in
nothing but ties to the sixteenth digit.

A central run is a federation with one client: everything that scores, sums and fits is written
once, over owners of examples. They are read in the order of their indices, without augmentation
where the data set knows how. Each process visits its share of the owners; an error in one is raised in all.
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
from fl_lightning.data.training_set import example_reader, loader_option
from fl_lightning.federation import Ranks, Visit, shares, training_loader, visiting
from fl_lightning.reports.progress import RoundProgressBar, federation_of
from fl_lightning.sparsity.calibration.calibrate import Calibration
from fl_lightning.sparsity.calibration.plan import CalibrationPlan
from fl_lightning.sparsity.calibration.rules import apportion
from fl_lightning.sparsity.masks.mask import Mask
from fl_lightning.sparsity.sensitivity.fisher import SampledFisher
from fl_lightning.sparsity.sensitivity.protocol import Scores, Sensitivity

_PURPOSE = "calibration"
# Scores owners who are elsewhere: yields, in the order asked, the scores of so many examples of each.
# Arguments: the values at which, (version, round), and the number of examples by owner.
ScoresElsewhere: TypeAlias = Callable[
    [Mapping[str, Tensor], tuple[int, int], Mapping[int, int]], Iterator[Scores]
]


@dataclass(frozen=True)
class ExampleOwners:
    """Training examples by owner.

    Attributes:
        num_examples: of each owner, shape (owners,).
        indices: an owner's examples.
        read: from indices, shape (B,), to a batch, as it is ahead of `Visit.prepared`.
        batch_size: examples per batch.
    """

    num_examples: npt.NDArray[np.int64]
    indices: Callable[[int], Tensor]
    read: Callable[[Tensor], Any]
    batch_size: int

    def batches(self, indices: Tensor) -> Iterator[Any]:
        """Yield these examples."""
        return (self.read(part) for part in indices.split(self.batch_size) if len(part))


def clients_as_owners(data: FederatedDataModule) -> ExampleOwners:
    """Return the clients of a federation as owners of their examples."""
    clients = data.clients
    return ExampleOwners(
        clients.num_examples,
        clients.__getitem__,
        lambda indices: data.evaluation_batch(indices),  # not asked for where clients are elsewhere
        data.batch_size,
    )


def example_owners(trainer: Trainer) -> ExampleOwners:
    """Return the owners of the examples that a fit trains on.

    Raises:
        ConfigurationError: in a central run whose training data are not one `DataLoader` over a
            map-style data set.
    """
    data = trainer.datamodule  # type: ignore[attr-defined]
    if federation_of(trainer) is not None:
        return clients_as_owners(data)
    if isinstance(data, FederatedDataModule):
        size, read, everything = data.batch_size, data.evaluation_batch, data.train_indices
    else:
        loader = _checked(training_loader(trainer))
        size, read = int(loader_option(loader, "batch_size") or 32), example_reader(loader)
        everything = torch.arange(len(loader.dataset))  # type: ignore[arg-type]
    return ExampleOwners(np.array([len(everything)]), lambda _: everything, read, size)


def scoring_context(trainer: Trainer) -> AbstractContextManager[None]:
    """Return the context of forward passes: the Trainer's precision.

    Half precision with scaled gradients (16-mixed) is computed in single precision instead: squares
    of gradients are not scaled, and the least of them, which a mask is about, would be lost.
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
    """Return the sorted positions of the clients that this process handles."""
    ranks = Ranks(trainer)
    if ranks.size == 1:
        return np.arange(len(owners))
    return shares(work, ranks.size)[ranks.rank]


def visit_together(trainer: Trainer, visit: Callable[[], None]) -> None:
    """Do this process's part; to be called by all of them.

    Raises:
        Exception: what went wrong here; in the other processes a `ConfigurationError` that says it.
    """
    failure: Exception | None = None
    try:
        visit()
    except Exception as error:  # noqa: BLE001 - a process that ended here would leave others waiting
        failure = error
    told = Ranks(trainer).gather(
        None if failure is None else f"{type(failure).__name__}: {failure}"
    )
    if failure is not None:
        raise failure
    if elsewhere := [words for words in told if words is not None]:
        raise ConfigurationError(f"another process failed: {elsewhere[0]}")


@contextmanager
def progress_bar(trainer: Trainer, what: str, total: int) -> Iterator[Callable[[], None]]:
    """Show a bar inside this block, and give the function that moves it by one.

    It is part of a `RoundProgressBar`; a Trainer with another bar, or none, shows nothing.
    """
    own = trainer.progress_bar_callback
    if isinstance(own, RoundProgressBar):
        with own.counting(what, total) as tick:
            yield tick
    else:
        yield lambda: None


# the owners that this process visits in a round of calibration, each with its number of examples
_Visits: TypeAlias = Mapping[int, int]


@dataclass(frozen=True, kw_only=True)
class OwnerScores:
    """Calibrates a Trainer's module on its training data; everything drawn belongs to the seed.

    Args:
        sensitivity: how entries are scored; None is `SampledFisher`.
        cohort: who scores in a federation; None is the federation's own sampler.
        max_examples: at most so many in a round of calibration, over all owners together, of each
            in proportion to its examples; None is all.
        seed: root of all draws, each a function of (seed, version, round, client).
        elsewhere: scores owners whose examples are not here; None if they are.
    """

    sensitivity: Sensitivity | None = None
    cohort: Cohort | None = None
    max_examples: int | None = None
    seed: int = 0
    elsewhere: ScoresElsewhere | None = None

    def mask(self, trainer: Trainer, plan: CalibrationPlan, names: list[str], version: int) -> Mask:
        """Return the mask of a version, on the CPU; to be called by all processes.

        Args:
            trainer: with a module on its device.
            plan: how scores become a mask.
            names: of the parameters that it covers.
            version: 0 at the start of a run, then 1, 2, ….
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
                if self.elsewhere is None:
                    score = self.score(visit, owners, values, (version, number), tick)
                else:
                    told = self.elsewhere(values, (version, number), visits[number])
                    score = partial(_next, told)
                calibration.step(_summed(trainer, values, visits[number], score))
        return calibration.mask.to("cpu")

    def num_sent(self, trainer: Trainer, plan: CalibrationPlan, version: int) -> int:
        """Number of clients that send scores for a mask, summed over the rounds of calibration."""
        if not plan.chosen_rule.needs_scores:
            return 0
        owners = example_owners(trainer)
        rounds = range(plan.rounds)
        return sum(len(self._drawn(trainer, owners, version, number)[0]) for number in rounds)

    def mask_of(
        self, trainer: Trainer, plan: CalibrationPlan, names: list[str], owner: int
    ) -> Mask:
        """Return the mask that one owner finds on its own examples, on the CPU.

        Args:
            trainer: whose module holds the model that the owner was sent.
            plan: how scores become a mask.
            names: of the parameters that it covers.
            owner: who.
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
        """Return the owners that score in a round of calibration, and on how many examples."""
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
        """Return the function that scores a given number of an owner's examples.

        Args:
            visit: to the module, see `scoring`.
            owners: of the examples.
            values: at which entries are scored, by name.
            ids: version of the mask, and round of its calibration.
            tick: told of every batch.
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


def _next(told: Iterator[Scores], owner: int, num_examples: int) -> Scores:
    """Return the next scores of remote owners, in their order."""
    return next(told)


@contextmanager
def scoring(trainer: Trainer) -> Iterator[Visit]:
    """Scores a Trainer's module inside this block, in the Trainer's precision."""
    with visiting(trainer) as visit, scoring_context(trainer):
        yield visit


def _summed(
    trainer: Trainer,
    values: Mapping[str, Tensor],
    visits: _Visits,
    score: Callable[[int, int], Scores],
) -> Scores:
    """Return the sum of the scores of all owners, also of those that other processes visit."""
    # Apple's accelerators know no double precision
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

    visit_together(trainer, visit)
    ranks = Ranks(trainer)
    for total in (*sums.values(), num_examples):
        ranks.all_reduce(total)
    return Scores(sums, int(num_examples))
