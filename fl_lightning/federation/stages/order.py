"""The stages of a run, in their order, and the run's aggregator.

devices, older models    whose updates will arrive, and from which model these clients start
fp16 scale, masks, personal models, corrections    how clients train
the user's own stages
transport                compression, error feedback, bytes
staleness                how the server weighs updates
secure sums, privacy     what the server may see; noise is added to the aggregate before anything else
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from lightning.pytorch import Trainer

from fl_lightning.client.corrections.correction import Correction
from fl_lightning.client.devices import Fleet
from fl_lightning.core.errors import ConfigurationError, raise_together
from fl_lightning.federation.options import Options
from fl_lightning.federation.run import Run
from fl_lightning.federation.stage import Stage, Stages
from fl_lightning.federation.stages.asynchrony import Arrivals, StaleUpdates, Versions
from fl_lightning.federation.stages.attackers import Attackers
from fl_lightning.federation.stages.client_masks import AdapterRounds, MaskedClients, client_masks
from fl_lightning.federation.stages.client_scale import ClientScale
from fl_lightning.federation.stages.corrector import Corrector, StepCounts
from fl_lightning.federation.stages.devices import SimulatedDevices
from fl_lightning.federation.stages.personaliser import Personaliser
from fl_lightning.federation.stages.transport import SecureRounds, Transport
from fl_lightning.server.adapters import AdapterAggregator
from fl_lightning.server.aggregator import Aggregator
from fl_lightning.server.means.fair_means import ByLosses
from fl_lightning.server.means.mean import OverlapMean
from fl_lightning.server.server import as_aggregator


def stages_of(
    run: Run,
    options: Options,
    aggregator: Aggregator,
    fleet: Fleet | None,
    arrivals: Arrivals | None,
    private: Stage | None,
) -> Stages:
    """Return the stages of a run, in the order in which updates pass them.

    Raises:
        ConfigurationError: if stages conflict with the run or with each other.
    """
    stages: list[Stage] = []
    if arrivals is not None:
        stages.append(Versions(arrivals))
    elif fleet is not None:
        stages.append(SimulatedDevices(fleet, run.plan))
    stages += _parts_of_models(run, options)
    if options.personal is not None:
        stages.append(Personaliser(options.personal, is_corrected=options.correction is not None))
    transport = Transport.of(options.updates, options.download, options.seed)
    stages += stages_of_steps(options.correction, aggregator, is_lossy=transport.is_lossy)
    own = [*options.handed, *options.stages]
    run.local.counts_steps = (
        options.correction is not None or aggregator.needs_effective_steps or bool(own)
    )
    given = as_aggregator(options.aggregator)  # `aggregator` may wrap it
    run.local.check_loss = given.check_loss if isinstance(given, ByLosses) else None
    stages += [*own, transport]
    if options.asynchronous is not None:
        stages.append(StaleUpdates(options.asynchronous))
    if aggregator.protection is not None:
        stages.append(SecureRounds(aggregator.protection, run))
    if private is not None:
        stages.append(private)
    raise_together(
        *(partial(stage.enter, run) for stage in stages), partial(_check_own, stages, own)
    )
    return Stages(stages)


def _parts_of_models(run: Run, options: Options) -> Iterator[Stage]:
    """Yield the stages for fp16 loss scaling, for clients' own masks and for adapters, if the run uses these."""
    if run.local.round_start.scaler is not None:
        yield ClientScale(run.local.round_start, run.ranks)
    if (masks := client_masks(run.trainer)) is not None:
        yield MaskedClients(masks)
    if isinstance(options.aggregator, AdapterAggregator):
        yield AdapterRounds(options.aggregator, options)


def stages_of_steps(
    correction: Correction | None, aggregator: Aggregator, *, is_lossy: bool
) -> list[Stage]:
    """Return the stage of a correction, and a stage that counts gradient steps if the aggregator needs them."""
    stages: list[Stage] = []
    if correction is not None:
        # rules that keep all updates are bit-identical over any number of processes as well
        exact = aggregator.exact or aggregator.exchanges
        stages.append(Corrector(correction, exact=exact, is_lossy=is_lossy))
    if aggregator.needs_effective_steps:
        stages.append(StepCounts(correction))
    return stages


def _check_own(stages: Sequence[Stage], own: Sequence[Stage]) -> None:
    """Raise if a user's own stage has a key that is taken, or derives from a class that only options may make."""
    ids = set(map(id, own))
    taken = {stage.key for stage in stages if id(stage) not in ids}
    for stage in own:
        name = type(stage).__name__
        if stage.key is not None and stage.key in taken:
            raise ConfigurationError(
                f"federation.stages: the key {stage.key!r} of {name} is already used by another stage in "
                f"checkpoints: give {name} another key"
            )
        taken.add(stage.key)
        if isinstance(stage, (Corrector, Personaliser)):
            raise ConfigurationError(
                f"federation.stages: {name} derives from Corrector or Personaliser, which only the options "
                "federation.correction and federation.personal make: derive from Correction or Personalisation, "
                "and set it there"
            )


def run_aggregator(
    trainer: Trainer, given: Aggregator | None, attackers: Attackers | None
) -> Aggregator:
    """Return the run's aggregator: the given or default rule, adapted to masks, optimizer and simulated attackers.

    Raises:
        ConfigurationError: for an aggregator that does not fit the clients' optimizer.
    """
    aggregator, masks_differ = as_aggregator(given), client_masks(trainer) is not None
    if aggregator.protection is not None:
        return aggregator
    if masks_differ and given is None:
        aggregator = OverlapMean()
    for optimizer in trainer.optimizers[:1]:
        aggregator = aggregator.of_clients(optimizer)
    if attackers is None:
        return aggregator
    num_clients = len(trainer.datamodule.clients)  # type: ignore[attr-defined]
    return attackers.wrap(aggregator, num_clients)
