"""The options of a federation, each with its meaning.

Values of options are checked here. Conflicts with Trainer, module or data are checked when a fit starts,
see `fl_lightning.federation.checks`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

from lightning.pytorch import Trainer

from fl_lightning.client.clocks import RecordedArrivals
from fl_lightning.client.corrections.correction import Correction
from fl_lightning.client.devices import Devices
from fl_lightning.client.personal import Personalisation
from fl_lightning.core.errors import ConfigurationError, check_range, raise_together
from fl_lightning.core.kinds import check_kinds
from fl_lightning.core.seeds import check_seed, run_seed
from fl_lightning.core.traits import NO_TRAITS, Trait, Traits, check_together
from fl_lightning.data.cohorts.cohort import AllClients, Cohort, UniformCohort
from fl_lightning.engines import SPEEDUPS, Speedup
from fl_lightning.federation.stage import Stage
from fl_lightning.federation.stages.attackers import Attackers
from fl_lightning.privacy.example import ExampleDP
from fl_lightning.privacy.mechanism import Privacy
from fl_lightning.server.aggregator import Aggregator
from fl_lightning.server.server import (
    ServerOptimizer,
    ServerSchedule,
    as_aggregator,
    fedavg_optimizer,
)
from fl_lightning.server.staleness import AsyncRule
from fl_lightning.updates.path import OF_DOWNLOAD, Broadcast, UpdatePath
from fl_lightning.updates.transform import ErrorFeedback, Transform

EngineName = Literal["auto", "sequential", "slots"]
# Default fraction of checked clients; a check takes as long as 5 to 10 clients in slots, 1 to 2 % in all.
SPOT_CHECK = 1 / 500
_SPEEDUPS = Traits(
    breaks={Trait.PRIVATE_EXAMPLES: "takes steps in another way, without noise"},
    instead={Trait.PRIVATE_EXAMPLES: "set engine to sequential and leave speedups out"},
)
_SLOTS = _SPEEDUPS | Traits(
    needs={Trait.SIMULATION: "trains many clients at once in one process"},
    instead={Trait.SIMULATION: "set engine to auto or sequential"},
)
_RANGES = {
    **dict.fromkeys(("local_steps", "local_epochs"), "at least 1"),
    "min_replies": "at least 1 client",
    "client_memory_gb": "at least 0 and finite",
    "slots": "at least 1 client at once",
    "spot_check": "in [0, 1]",
}
_ADVICE = {"spot_check": ": it is the fraction of clients that are trained both ways"}


class Options:
    """The options of a federation; attributes hold the given values, or the defaults that replace None.

    Attributes:
        parts: what each given option needs and breaks (`Traits`), by option and class.
        client_privacy: differential privacy of clients, or None.
        example_privacy: differential privacy of examples, or None.
        is_at_site: whether these are a site's options: its clients train for a server elsewhere.
    """

    is_at_site: bool = False

    def __init__(
        self,
        *,
        cohort: Cohort | None = None,
        local_steps: int | None = None,
        local_epochs: int | None = None,
        correction: Correction | None = None,
        personal: Personalisation | None = None,
        updates: list[Transform | ErrorFeedback] | None = None,
        download: list[Transform] | None = None,
        aggregator: Aggregator | None = None,
        privacy: Privacy | ExampleDP | None = None,
        server_optimizer: ServerOptimizer | None = None,
        devices: Devices | RecordedArrivals | None = None,
        asynchronous: AsyncRule | None = None,
        server_schedule: ServerSchedule | None = None,
        attackers: Attackers | None = None,
        stages: list[Stage] | None = None,
        on_client_failure: Literal["raise", "skip"] = "raise",
        min_replies: int = 1,
        engine: EngineName = "auto",
        slots: int | None = None,
        speedups: list[Speedup] | None = None,
        spot_check: float = SPOT_CHECK,
        pad_batches: bool | None = None,
        client_memory_gb: float = 2.0,
        client_state: list[str] | None = None,
        seed: int | None = None,
    ) -> None:
        """Check and keep the options.

        Args:
            cohort: samples the clients of each round; all clients if None.
            local_steps: optimizer steps of a client per round, in place of passes.
            local_epochs: a client's passes over its shard per round; one if neither is given.
            correction: a term in clients' gradients that keeps clients with different data close:
                `FedProx`, `Scaffold`, `FedDyn`, …; none if None.
            personal: parameters that each client keeps for itself: layers (`Personal`: FedPer, FedBN,
                FedRep), a model beside the shared one (`Ditto`, `APFL`), or the global model, fine-tuned
                before it is evaluated (`FineTuned`); none if None.
            updates: transforms of a client's update on the way to the server, in this order: `TopK`,
                `QSGD`, …, and `ErrorFeedback` around them; none if None.
            download: transforms of the global model on the way to the clients (quantisers); none if None.
            aggregator: combines the updates of a round. A robust rule, like `Krum`, looks at all of them
                together. If None, their mean, weighted by examples; where clients have masks of their own,
                the mean of a parameter is over the clients that train it.
            privacy: differential privacy of clients, `CentralDP`, `LocalDP`, …, or of their single
                examples, `ExampleDP`; none if None.
            server_optimizer: builds the `torch.optim.Optimizer` that takes the aggregate as its
                gradient; SGD with learning rate 1, which is FedAvg, if None.
            devices: speed and reliability of clients' simulated devices, and how long the server waits,
                in virtual time; if None, all clients reply. `RecordedArrivals` replays an asynchronous
                run over a network.
            asynchronous: makes the server step as soon as enough updates have arrived (`FedBuff`,
                `FedAsync`), in the virtual time of ``devices`` or over a network. A round is then a
                server step. If None, the server waits for the cohort.
            server_schedule: builds a schedule of the server optimizer's learning rate over rounds,
                e.g. one of `torch.optim.lr_scheduler`; the rate is constant if None.
            attackers: simulated attackers, to test defences; none if None.
            stages: your own additions to a round: see `fl_lightning.federation.stage.Stage`.
            on_client_failure: what to do with a client whose step raises, whose loss or update is not
                finite, or that has no examples: ``raise`` stops the run and names the client, ``skip``
                leaves it out and counts it.
            min_replies: the run stops if a round has fewer valid updates.
            engine: ``sequential`` trains clients one after the other, ``slots`` many at once, which is
                faster for small models. ``auto`` measures both and logs its choice.
            slots: how many clients train at once; chosen by the model's size if None.
            speedups: faster local steps for clients that train one after the other; updates differ
                by rounding alone. Any of ``direct_layers``, ``channels_last``, ``fused_optimizer``,
                ``math_attention`` and ``compiled``, see
                `fl_lightning.engines.compiler.speedups`. If None, ``engine: auto`` measures which
                are worth it where the run is long; other engines use none.
            spot_check: fraction of the clients in slots that are also trained one after the other,
                to check that both ways give the same update. A difference beyond rounding stops the
                run before the server steps. The check does not change the result. 0 checks none, 1
                all; one client in 500 takes 1 to 2 % of the time.
            pad_batches: ``true`` declares that the loss, and every logged value, is a mean over the
                examples of a batch, so that slots may pad smaller batches; a trial client and the spot
                check verify it. With ``false`` batches train whole: a client's last, smaller batch is
                slower, and clients without a full batch train one after the other. If None, the module's
                attribute ``loss_is_mean`` decides, else false.
            client_memory_gb: gigabytes (1e9 bytes) of client states between rounds (see ``correction``)
                that stay in RAM. The rest is in files. Checkpoints hold up to 64 MB of client states;
                larger ones are in a folder beside each checkpoint (``last.ckpt.client_memory``).
            client_state: names of buffers and frozen parameters that clients change while they train, as
                patterns (``*``, ``?``). They are sent and averaged. You need this only for tensors that
                change later than in the first local steps of the run: others are found, and so are
                statistics of batch and instance norm. Buffers that never change are not sent.
            seed: root seed of all random draws (cohorts, shuffling, dropout, augmentation); the run's
                seed, as given to `lightning.seed_everything`, if None.

        Raises:
            ConfigurationError: for values out of range, and for what does not go together; all of
                them at once.
        """
        check_kinds(Options.__init__, locals())
        super().__init__()
        self.cohort = AllClients() if cohort is None else cohort
        self.local_steps, self.local_epochs = local_steps, local_epochs
        self.correction, self.personal = correction, personal
        self.updates, self.download = list(updates or []), list(download or [])
        self.aggregator, self.privacy = aggregator, privacy
        self.server_optimizer = server_optimizer or fedavg_optimizer
        self.server_schedule = server_schedule
        self.devices, self.asynchronous = devices, asynchronous
        self.attackers, self.stages = attackers, list(stages or [])
        self.handed: list[Stage] = []  # stages of other callbacks, for one fit
        self.clients_side: Callable[..., Any] | None = None  # where clients are remote
        self.on_client_failure, self.min_replies = on_client_failure, min_replies
        self.engine: EngineName = engine
        self.slots, self.spot_check = slots, spot_check
        self.pad_batches = pad_batches
        self.speedups = None if speedups is None else tuple(speedups)
        self.client_memory_gb, self.client_state = client_memory_gb, list(client_state or [])
        self.parts = parts_of(self, cohort)
        self._check(seed)
        self.seed = run_seed(seed)
        if asynchronous is not None:  # for other users of the cohort, e.g. calibration
            self.cohort = UniformCohort(size=asynchronous.buffer_size)
        if self.example_privacy is not None:
            self.engine = "sequential"  # it has a local step of its own
        if not local_steps and not local_epochs:
            self.local_epochs = 1

    def add(self, stage: Stage) -> None:
        """Add a `Stage` (a feature of rounds) to this fit; other callbacks call this in their `setup`."""
        self.handed.append(stage)

    def _check(self, seed: int | None) -> None:
        """Check all options, and raise all errors together."""
        raise_together(
            self._check_pairs,
            *(
                partial(
                    check_range,
                    f"federation: {name}",
                    getattr(self, name),
                    allowed,
                    _ADVICE.get(name, ""),
                )
                for name, allowed in _RANGES.items()
            ),
            partial(check_seed, "federation", seed),
            self._check_speedups,
            self._check_privacy,
            partial(check_together, self.parts),
            partial(UpdatePath, self.updates, 0),  # these raise if transforms conflict
            partial(Broadcast, self.download, 0),
        )

    def _check_pairs(self) -> None:
        if self.local_steps is not None and self.local_epochs is not None:
            raise ConfigurationError(
                "federation: give either local_steps or local_epochs, not both: set the other to null"
            )
        if isinstance(self.devices, RecordedArrivals) and self.asynchronous is None:
            raise ConfigurationError(
                "federation.devices RecordedArrivals replays an asynchronous run: set federation.asynchronous as "
                "well"
            )

    def _check_privacy(self) -> None:
        # with an asynchronous server privacy is refused, and there are no cohorts
        if self.privacy is not None and self.asynchronous is None:
            self.privacy.check_cohort(self.cohort)

    def _check_speedups(self) -> None:
        given = self.speedups or ()
        if not set(given) <= set(SPEEDUPS) or len(set(given)) < len(given):
            raise ConfigurationError(
                f"federation: speedups must be some of {', '.join(SPEEDUPS)}, each once, or null "
                f"to have them measured, got {list(given)}"
            )

    @property
    def clients_remember(self) -> bool:
        """True if clients keep states between rounds: personal tensors, correction states or error feedback."""
        correction = self.correction
        return (
            self.personal is not None
            or (correction is not None and correction.remembers)
            or UpdatePath(self.updates, 0).has_memory
        )

    @property
    def example_privacy(self) -> ExampleDP | None:
        """Option for differential privacy of single examples; None if it is not set."""
        return self.privacy if isinstance(self.privacy, ExampleDP) else None

    @property
    def client_privacy(self) -> Privacy | None:
        """Option for differential privacy of whole clients; None if it is not set."""
        return None if isinstance(self.privacy, ExampleDP) else self.privacy

    @property
    def hides_clients(self) -> bool:
        """True if the server cannot read a single client's update: clients add noise, or secure aggregation hides it."""
        private, aggregator = self.client_privacy, as_aggregator(self.aggregator)
        adds_noise = private is not None and private.clients_add_noise
        return adds_noise or aggregator.protection is not None


def federation_options(trainer: Trainer) -> Options | None:
    """Return the federation's options from a Trainer's callbacks (`Federation` or a remote site's); None without any.

    The callback of a site has the options as an attribute ``federation``.
    """
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        found = callback if isinstance(callback, Options) else getattr(callback, "federation", None)
        if isinstance(found, Options):
            return found
    return None


def parts_of(options: Options, cohort: Cohort | None) -> dict[str, Traits]:
    """Return what each given option needs and breaks (its `Traits`), keyed by option name and class.

    Args:
        options: the options of a federation.
        cohort: the given cohort; None for the default, which conflicts with nothing.
    """
    names = ("aggregator", "correction", "personal", "privacy", "attackers")
    parts = {"cohort": cohort, **{name: getattr(options, name) for name in names}}
    given: list[tuple[str, object, Traits]] = [
        *(("updates", step, step.traits) for step in options.updates),
        *(("download", step, OF_DOWNLOAD) for step in options.download),
        *(("stages", stage, stage.traits) for stage in options.stages),
        *((name, part, traits_of(part)) for name, part in parts.items() if part is not None),
    ]
    if options.asynchronous is not None:
        given.append(("asynchronous", options.asynchronous, options.asynchronous.traits))
    if (devices := options.devices) is not None:
        traits = devices.traits
        if options.asynchronous is not None and not devices.is_recorded:
            traits = traits.without(Trait.SIMULATION)  # over a network simulated ones are not used
        given.append(("devices", devices, traits))
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
    """Return what an option or stage declares to need and break (its `Traits`); empty if it declares nothing."""
    traits = getattr(part, "traits", NO_TRAITS)
    return traits if isinstance(traits, Traits) else NO_TRAITS
