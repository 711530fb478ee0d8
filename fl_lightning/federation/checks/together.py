"""Parts of a run by name, and what a Trainer, a module or a network adds: do they go together?

Each part says its own traits; see `fl_lightning.core.traits`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lightning.pytorch import LightningModule, Trainer

from fl_lightning.core.errors import ConfigurationError, raise_together
from fl_lightning.core.traits import NO_TRAITS, Trait, Traits, check_together
from fl_lightning.data.cohorts.cohort import Cohort, CohortSampler, as_cohort
from fl_lightning.federation.checks.options import check_cohort_size, check_shards, check_trusted
from fl_lightning.federation.stages.client_masks import OWN_MASKS, client_masks
from fl_lightning.server.aggregator import Aggregator
from fl_lightning.server.server import as_aggregator
from fl_lightning.server.staleness import ASYNCHRONOUS
from fl_lightning.updates.path import OF_DOWNLOAD
from fl_lightning.updates.transform import as_step

if TYPE_CHECKING:
    from fl_lightning.data.federated import FederatedDataModule
    from fl_lightning.federation.options import Options
    from fl_lightning.federation.stage import Stage

_SPEEDUPS = Traits(
    breaks={Trait.PRIVATE_EXAMPLES: "takes steps in another way, without noise"},
    instead={Trait.PRIVATE_EXAMPLES: "set engine to sequential and leave speedups out"},
)
_SLOTS = _SPEEDUPS | Traits(
    needs={Trait.SIMULATION: "trains many clients at once in one process"},
    instead={Trait.SIMULATION: "set engine to auto or sequential"},
)
BY_HAND = Traits(
    breaks={Trait.RETURNED_LOSS: "steps its optimizers by hand (automatic_optimization = False)"}
)
SEVERAL = Traits(breaks={Trait.ONE_OPTIMIZER: "takes steps of different lengths"})
RATES_BY_STEP = Traits(
    breaks={Trait.ONE_RATE: "has a learning-rate schedule that changes it from step to step"},
    instead={Trait.ONE_RATE: "set the schedule's interval to 'epoch'"},
)
_SHARED_SCALE = Traits(
    needs={
        Trait.SIMULATION: "has a loss scale that all clients share, which sites do not exchange"
    },
    instead={Trait.SIMULATION: "use bf16-mixed or 32-true"},
)
NETWORK = {"a network": Traits(breaks={Trait.SIMULATION: "has its clients at sites"})}


def parts_of(options: Options, cohort: CohortSampler | None) -> dict[str, Traits]:
    """Return the traits of all options that were given, by option and class.

    Args:
        options: of a federation.
        cohort: as it was given; None for the default, which every server can do without.
    """
    given: list[tuple[str, object, Traits]] = [
        *(("updates", step, as_step(step).traits) for step in options.updates),
        *(("download", step, OF_DOWNLOAD) for step in options.download),
        *(("stages", stage, stage.traits) for stage in options.stages),
    ]
    if cohort is not None:
        given.append(("cohort", cohort, as_cohort(cohort).traits))
    if options.aggregator is not None:
        given.append(("aggregator", options.aggregator, as_aggregator(options.aggregator).traits))
    if options.asynchronous is not None:
        given.append(("asynchronous", options.asynchronous, ASYNCHRONOUS))
    if options.devices is not None:
        traits = (
            options.devices.traits
        )  # over a network an asynchronous run needs no simulated ones
        is_idle = options.asynchronous is not None and not options.devices.is_recorded
        given.append(
            ("devices", options.devices, traits.without(Trait.SIMULATION) if is_idle else traits)
        )
    parts = (options.correction, options.personal, options.privacy, options.attackers)
    names = ("correction", "personal", "privacy", "attackers")
    given += [
        (name, part, traits_of(part)) for name, part in zip(names, parts, strict=True) if part
    ]
    named: dict[str, Traits] = {}
    for name, part, traits in given:  # of one class there may be several
        key = f"federation.{name} {type(part).__name__}"
        named[key] = named.get(key, NO_TRAITS) | traits
    if options.engine == "slots":
        named["federation.engine slots"] = _SLOTS
    if options.speedups:
        named["federation.speedups"] = _SPEEDUPS
    return named


def traits_of(part: object) -> Traits:
    """Return the traits that a part says it has; none for one that says nothing."""
    traits = getattr(part, "traits", NO_TRAITS)
    return traits if isinstance(traits, Traits) else NO_TRAITS


def check_module_together(module: LightningModule, options: Options) -> None:
    """Refuse options that need a loss from a module that steps its optimizers by hand.

    Raises:
        ConfigurationError: with a line for each conflict.
    """
    check_together({**options.parts, **_of_module(module)})


def check_trainer_together(trainer: Trainer, options: Options) -> None:
    """Refuse options that conflict with the optimizers and masks of a Trainer that is set up.

    Raises:
        ConfigurationError: with a line for each conflict.
    """
    parts = {**options.parts, **_of_module(trainer.lightning_module), **_of_masks(trainer)}
    if len(trainer.optimizers) > 1:
        name = f"the model with {len(trainer.optimizers)} optimizers"
        parts[name] = SEVERAL
    configs = (
        trainer.lr_scheduler_configs if trainer.lightning_module.automatic_optimization else ()
    )
    if any(config.interval == "step" for config in configs):
        parts["the model's optimizer"] = RATES_BY_STEP
    check_together(parts)


def check_simple(
    module: Any,
    data: FederatedDataModule,
    stages: Sequence[Stage],
    cohort: Cohort,
    aggregator: Aggregator,
) -> None:
    """Refuse for rounds without a Trainer what a Trainer's are refused.

    Raises:
        ConfigurationError: with a line for each conflict.
    """
    if aggregator.protection is not None:
        raise ConfigurationError(
            f"{type(aggregator).__name__} hides what clients send, which needs a Trainer: use Federation"
        )
    parts = {type(part).__name__: traits_of(part) for part in (cohort, aggregator, *stages)}
    most = len(data.clients)
    if cohort.has_fixed_size:
        most = cohort.expected_size(most)
    raise_together(
        lambda: check_together(parts | _of_module(module)),
        lambda: check_shards(data, "raise"),
        lambda: check_cohort_size(most, 0, aggregator),
        lambda: check_trusted(aggregator, cohort, len(data.clients)),
    )


def network_parts(trainer: Trainer, module: Any, options: Options) -> dict[str, Traits]:
    """Return the traits of a run whose clients are at sites."""
    parts = {**options.parts, **_of_module(module), **_of_masks(trainer), **NETWORK}
    if trainer.precision == "16-mixed":
        parts["trainer.precision 16-mixed"] = _SHARED_SCALE
    return parts


def _of_module(module: Any) -> dict[str, Traits]:
    traits = getattr(module, "federation_traits", NO_TRAITS)
    by_hand = not getattr(module, "automatic_optimization", True)
    return {f"model {type(module).__name__}": traits | BY_HAND if by_hand else traits}


def _of_masks(trainer: Trainer) -> dict[str, Traits]:
    return {} if client_masks(trainer) is None else {"a callback": OWN_MASKS}
