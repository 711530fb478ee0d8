"""Stages: the interface through which features take part in a round.

    to clients:    x → down of each stage, in order → training
    to the server: Δ → up of each stage, in order → aggregation
    at the server: aggregate → on_server of each stage, in reverse order → step → stepped → close

A stage is one feature, such as a correction, compression or privacy. It overrides methods of `Stage`,
which do nothing by default, and has its own state, bytes and metrics. Methods are grouped by the side
of a round on which they run.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from inspect import isfunction
from itertools import chain
from typing import Any, NamedTuple, TypeVar

from lightning.pytorch import Trainer
from torch import Tensor

from fl_lightning.client.state.round_start import Options as OptimizerOptions
from fl_lightning.client.work import ClientWork, GroupWork
from fl_lightning.core.errors import ClientFailure, ConfigurationError
from fl_lightning.core.space import Space
from fl_lightning.core.traits import Trait, Traits
from fl_lightning.core.update import ClientUpdate, GlobalModel, Updates
from fl_lightning.federation.round_record import RoundRecord
from fl_lightning.federation.run import Run
from fl_lightning.updates.message import bytes_down

# Traits of a stage that declares none.
_UNKNOWN = Traits(
    needs={Trait.SIMULATION: "does not say which side of a network it runs on"},
    breaks={
        Trait.PRIVATE_CLIENTS: "does not say what it shows of single clients",
        Trait.PRIVATE_EXAMPLES: "does not say what it shows of single examples",
    },
    instead={
        Trait.SIMULATION: "leave it out, or drop this from its traits if its methods for the two sides share "
        "nothing but to_sites and to_server",
        Trait.PRIVATE_CLIENTS: "leave it out, or drop this from its traits if it neither reads single updates "
        "nor changes what clients do",
        Trait.PRIVATE_EXAMPLES: "leave it out, or drop this from its traits if it changes no local step",
    },
)
_NOTHING: AbstractContextManager[None] = nullcontext()
Kind = TypeVar("Kind")


class Start(NamedTuple):
    """Model and optimizer options with which clients start local training in a round.

    Attributes:
        model: the model that clients receive.
        present: the server's model when their updates arrive.
        staleness: number of server steps between the two; 0 in a synchronous round.
        num_bytes: bytes sent to one client; a stage that changes the message corrects this number.
        options: optimizer options, such as learning rates, of the round in which the clients started;
            None for those of the current round.
    """

    model: GlobalModel
    present: GlobalModel
    staleness: int = 0
    num_bytes: int = 0
    options: OptimizerOptions | None = None


@dataclass
class LocalTraining:
    """One client's local training, as each `Stage` sees it: work, start, masks and, at the end, the update.

    Attributes:
        work: the client's batches.
        start: the model and options from which the client starts.
        counts: whether the update is aggregated; False in trials and checks of engines.
        is_corrected: whether the run's correction changes gradients and losses.
        masks: entries that the client may change, by parameter name; None for the optimizer's masks.
        num_bytes: bytes sent to the client.
        update: the client's update; None until its local steps end.
    """

    work: ClientWork
    start: Start
    counts: bool = True
    is_corrected: bool = True
    masks: Mapping[str, Tensor] | None = None
    num_bytes: int = 0
    update: ClientUpdate | None = None


class Upload(NamedTuple):
    """Updates on their way to the server, from clients that started from the same model.

    Attributes:
        start: the clients' start.
        made: updates as the clients computed them.
        arrived: updates after the stages that they have passed.
        num_bytes: bytes of each client's message; a stage that changes the message corrects this number.
        error: relative error ‖arrived - made‖ / ‖made‖ of a single compressed update; None for others.
    """

    start: Start
    made: Updates
    arrived: Updates
    num_bytes: int = 0
    error: Tensor | None = None


class Missing(NamedTuple):
    """A client whose update cannot be used.

    Attributes:
        start: the client's start.
        failure: why there is no update.
    """

    start: Start
    failure: ClientFailure


class Stage:
    """One feature of a federated round, such as compression; its methods are hooks that do nothing by default.

    Attributes:
        key: key of the stage's state in checkpoints; None if it has no state.
        hides_clients: whether logs may show nothing about single clients.
        is_private: whether only noisy aggregates may leave a round: clients send no buffers, and checkpoints
            hold nothing of an open round.
        one_at_a_time: reason why clients must train one after the other; None if slots work as well.
        traits: what the stage needs of a run, and what it breaks. A stage that declares nothing is taken to
            need a simulation and to break privacy.
    """

    key: str | None = None
    hides_clients: bool = False
    is_private: bool = False
    one_at_a_time: str | None = None
    traits: Traits = _UNKNOWN

    def enter(self, run: Run) -> None:
        """Receive the run's shared objects (module, data, optimizers, …) when a fit starts.

        Raises:
            ConfigurationError: if the stage conflicts with the run; errors of all stages are raised together.
        """

    def place(self, space: Space, positions: Tensor | None) -> None:
        """Receive the layout of the vectors that clients and server exchange from now on.

        Args:
            space: layout of the vectors, shape (k',).
            positions: previous position of each coordinate, shape (k',), see `Server.relocate`; None at first.

        Raises:
            ConfigurationError: if the stage cannot change its layout.
        """

    def more_bytes(self, model: GlobalModel, num_clients: int) -> tuple[int, int]:
        """Return the approximate extra bytes that a client uploads and downloads per round because of this stage."""
        return 0, 0

    # On the server's side.

    def open(self, round_index: int, model: GlobalModel) -> None:
        """Called at the start of a round, with its index and the server's model."""

    def work(self, work: GroupWork, record: RoundRecord) -> GroupWork:
        """Return the work of those clients in a cohort whose updates will arrive; leave out the others."""
        return work

    def down(self, start: Start, work: GroupWork) -> list[tuple[Start, GroupWork]]:
        """Return groups of clients by what they download: pairs of a start (model, options) and the group's work."""
        return [(start, work)]

    def up(self, upload: Upload) -> Iterable[Upload]:
        """Return clients' updates as they arrive at the server after this stage, together or one by one."""
        return (upload,)

    def before_step(self, record: RoundRecord) -> None:
        """Called after the last update of a round, before the server step.

        The record is over all processes. State that a stage has in one process is exchanged here, through
        the ranks of the run.
        """

    def on_server(self, aggregate: Tensor) -> Tensor | None:
        """Return the direction of the server step, given the aggregate, shape (k,); None to take no step."""
        return aggregate

    def stepped(self, params: Tensor) -> None:
        """Called after the server step; may change the new parameters, shape (k,), in place.

        An error undoes the step.
        """

    def close(self, record: RoundRecord) -> None:
        """Called once the server step is final; new state of the stage takes effect here.

        By then the module has the new model. An error keeps no other stage from its new state.
        """

    # On the clients' side, where one trains at a time.

    def around(self, training: LocalTraining) -> AbstractContextManager[None]:
        """Return a context manager around all that the module does for one client: local steps and new client states."""
        return _NOTHING

    def steps(self, training: LocalTraining) -> AbstractContextManager[None]:
        """Return a context manager around a client's local steps; `training.update` is set before it exits."""
        return _NOTHING

    # In checkpoints.

    def state_dict(self) -> Any:
        """Return the stage's state for a checkpoint; called if the stage has a `key`."""
        return None

    def check(self, state: Any) -> None:
        """Raise if the stage's state in a checkpoint is of another configuration; called before anything is loaded.

        Args:
            state: the stage's state in the checkpoint; None if there is none.

        Raises:
            ConfigurationError: saying what differs.
        """

    def load_state_dict(self, state: Any, model: GlobalModel) -> None:
        """Restore the stage's state from a checkpoint; ``model`` is the checkpoint's global model."""


class Learning(Stage):
    """A stage with client states: it computes a client's new state from its update, if `learns` is true."""

    learns: bool = True

    @abstractmethod
    def learn(self, update: ClientUpdate, work: ClientWork, start: Start) -> Callable[[], None]:
        """Compute a client's new state from the client's update, without storing it.

        Returns:
            A function that stores the new state and cannot fail. It is called once nothing else has failed at
            the client, so that the update is sure to be used.

        Raises:
            ClientFailure: if there is no such state; the client's update is not used then.
        """


class AroundFit(Stage):
    """A stage that also acts when a fit starts and when an epoch ends.

    Attributes:
        hides_cohorts: whether nobody may learn which clients take part.
    """

    hides_cohorts: bool = False

    @abstractmethod
    def fit_begins(self, trainer: Trainer, earlier: Sequence[Stage] | None) -> None:
        """Called when a fit starts.

        Args:
            trainer: the Trainer that fits.
            earlier: stages of the Federation's last fit of this module, empty without one; None if a checkpoint
                was loaded.
        """

    @abstractmethod
    def training_begins(self, trainer: Trainer) -> None:
        """Log what users should know before the first round."""

    @abstractmethod
    def round_ends(self, trainer: Trainer, record: RoundRecord) -> None:
        """Called at a round's end, before its counts and metrics are logged."""


class SpansNetwork(Stage):
    """A stage that sends data of its own between server and remote clients."""

    def to_sites(self) -> Mapping[str, Tensor]:
        """Return the data that remote clients need in this round besides the model (called at the server)."""
        return {}

    def from_server(self, told: Mapping[str, Tensor]) -> None:
        """Receive what the server's `to_sites` returned, before the round's clients train (called at a remote site)."""

    def to_server(self, client: int) -> Mapping[str, Tensor]:
        """Return the data that the server needs from a client besides its update (called at a remote site)."""
        return {}

    def from_site(self, client: int, told: Mapping[str, Tensor]) -> None:
        """Receive what a remote client's `to_server` returned, when its update arrives (called at the server).

        Raises:
            ValueError: if the data is invalid.
        """


class Stages(Iterable[Stage]):
    """The stages (features) of a run, in the order in which updates pass them.

    Attributes:
        having: for each method of `Stage`, by name, the stages that override it.
        around_fit: stages that also act when a fit starts and when an epoch ends.
    """

    def __init__(self, stages: Iterable[Stage]) -> None:
        self._stages = tuple(stages)
        methods = [name for name, value in vars(Stage).items() if isfunction(value)]
        self.having = {m: [s for s in self._stages if overridden(s, m)] for m in methods}
        self._learning = [s for s in self._stages if isinstance(s, Learning) and s.learns]
        self.around_fit = [stage for stage in self._stages if isinstance(stage, AroundFit)]
        self.learns = bool(self._learning)
        self.hides_clients = any(stage.hides_clients for stage in self._stages)
        self.is_private = any(stage.is_private for stage in self._stages)
        reasons = (stage.one_at_a_time for stage in self._stages)
        self.one_at_a_time = next((reason for reason in reasons if reason is not None), None)

    def __iter__(self) -> Iterator[Stage]:
        return iter(self._stages)

    def first(self, kind: type[Kind]) -> Kind | None:
        """Return the run's first stage of a given class; None if it has none."""
        return next((stage for stage in self._stages if isinstance(stage, kind)), None)

    def around(self, stage: Stage) -> tuple[Stages, Stages]:
        """Return the stages before a given stage, and the stages after it."""
        place = self._stages.index(stage)
        return Stages(self._stages[:place]), Stages(self._stages[place + 1 :])

    def down(self, model: GlobalModel, work: GroupWork) -> list[tuple[Start, GroupWork]]:
        """Return groups of clients by what they download after all stages: pairs of a start and the group's work."""
        num_bytes = bytes_down(model.params, model.buffers)
        found = [(Start(model, model, num_bytes=num_bytes), work)]
        for stage in self.having["down"]:
            found = [piece for start, some in found for piece in stage.down(start, some)]
        return found

    def up(self, upload: Upload) -> Iterable[Upload]:
        """Return an iterable over clients' updates as they arrive at the server after all stages."""
        pieces: Iterable[Upload] = (upload,)
        for stage in self.having["up"]:
            pieces = chain.from_iterable(map(stage.up, pieces))
        return pieces

    def on_server(self, aggregate: Tensor) -> Tensor | None:
        """Pass the aggregate through all stages in reverse; return the server step's direction, None for no step."""
        gradient: Tensor | None = aggregate
        for stage in reversed(self.having["on_server"]):
            if gradient is None:
                break
            gradient = stage.on_server(gradient)
        return gradient

    def learn(self, update: ClientUpdate, work: ClientWork, start: Start) -> Callable[[], None]:
        """Compute a client's new state in every stage from its update; return a function that stores these states."""
        learnt = [stage.learn(update, work, start) for stage in self._learning]

        def remember() -> None:
            for each in learnt:
                each()

        return remember


def overridden(stage: Stage, *names: str) -> list[str]:
    """Return the methods of `Stage`, among the named ones, that a stage overrides."""
    return [name for name in names if getattr(type(stage), name) is not getattr(Stage, name)]


def check_same(what: str, saved: Any, present: Any) -> None:
    """Raise if a setting in a checkpoint differs from the present setting.

    Raises:
        ConfigurationError: with the setting and both values.
    """
    if saved != present:
        raise ConfigurationError(
            f"the checkpoint belongs to a run with another {what} ({saved} instead of {present}): "
            "resume with the configuration of the run that wrote it, or start without ckpt_path"
        )


def kind_of(state: Mapping[str, Any]) -> str | None:
    """Describe a stage's saved state by its class and, if it has any, its tensors; None if there is no state."""
    kind, names = state.get("kind"), state.get("names")
    return f"{kind} with {len(names)} tensors, from {names[0]}" if names else kind
