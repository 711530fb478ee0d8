"""Stages: the interface through which features take part in a round.

    what clients get:      x → down of each stage, in order → training
    what clients send:     Δ → up of each stage, in order → the server
    what the server steps on:  aggregate → on_server of each stage, in reverse → step → stepped

A stage is one feature: corrections, personal models, compression, staleness, privacy, … It overrides
what it needs of `Stage`, whose every method does nothing, and brings its own state, bytes and log
lines. Methods are grouped by the side of a round on which they run.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from inspect import isfunction
from itertools import chain
from typing import Any, NamedTuple, Protocol

from lightning.pytorch import Trainer
from torch import Tensor

from fl_lightning.client.corrections.correction import GradientTerm
from fl_lightning.client.state.round_start import Options as OptimizerOptions
from fl_lightning.client.work import ClientWork, GroupWork
from fl_lightning.core.errors import ClientFailure, ConfigurationError
from fl_lightning.core.space import Space
from fl_lightning.core.traits import Trait, Traits
from fl_lightning.core.update import ClientUpdate, GlobalModel, Updates
from fl_lightning.federation.round_record import RoundRecord
from fl_lightning.federation.run import Run
from fl_lightning.updates.message import bytes_down

# Traits of a stage that says nothing of itself.
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
_NO_TERM = GradientTerm()


class Start(NamedTuple):
    """The start of clients.

    Attributes:
        model: what they are sent.
        present: the server's model when their updates arrive.
        staleness: how many steps the server took between; 0 in a synchronous round.
        num_bytes: of what is sent to one of them; a stage that changes it corrects this.
        options: of their optimizers, as schedules had left them in the round of that model; None for those
            of this round.
    """

    model: GlobalModel
    present: GlobalModel
    staleness: int = 0
    num_bytes: int = 0
    options: OptimizerOptions | None = None


@dataclass
class Turn:
    """One client's turn in the module.

    Attributes:
        work: what it has to do.
        start: what it begins from.
        counts: whether its update will; not where an engine is tried or checked.
        is_corrected: whether its gradients and losses are those of the run's correction.
        masks: which entries it may move, by parameter name; None for the optimizer's masks.
        num_bytes: of what it was sent.
        update: that its steps have made; None before.
    """

    work: ClientWork
    start: Start
    counts: bool = True
    is_corrected: bool = True
    masks: Mapping[str, Tensor] | None = None
    num_bytes: int = 0
    update: ClientUpdate | None = None


class Processes(Protocol):
    """The processes that train clients of a round, see `Ranks`; one alone has size 1."""

    size: int

    def gather(self, value: Any) -> list[Any]:
        """Return every process's value; to be called by all of them."""

    def all_reduce(self, tensor: Tensor) -> None:
        """Replace a tensor by its sum over all processes; to be called by all of them."""


class Upload(NamedTuple):
    """Updates on their way to the server, of clients that began alike.

    Attributes:
        start: what the clients began from.
        made: as the clients made them.
        arrived: what has become of them so far.
        num_bytes: of each one's message; a stage that changes it corrects this.
        error: how far the arrived one is from the one that was made, as a part of it, where it is
            one that was compressed.
    """

    start: Start
    made: Updates
    arrived: Updates
    num_bytes: int = 0
    error: Tensor | None = None


class Missing(NamedTuple):
    """A client whose update cannot be used.

    Attributes:
        start: what the client began from.
        failure: why there is no update.
    """

    start: Start
    failure: ClientFailure


class Stage:
    """One feature of a run's rounds; every method does nothing.

    Attributes:
        key: under which a checkpoint holds its state; None without one.
        hides_clients: whether nothing may be said of single clients.
        is_private: whether only what has noise may leave a round: clients keep their buffers, and checkpoints
            hold no open round.
        one_at_a_time: why slots cannot serve it; None if they can.
        traits: what it needs of a round and breaks. Of a stage that does not say, nothing is known: it needs a
            simulation and breaks privacy.
    """

    key: str | None = None
    hides_clients: bool = False
    is_private: bool = False
    one_at_a_time: str | None = None
    traits: Traits = _UNKNOWN

    def enter(self, run: Run) -> None:
        """Learn in which run it takes part, when a fit starts.

        Raises:
            ConfigurationError: if it does not go together with something in the run. It is raised together
                with those of the other stages.
        """

    def place(self, space: Space, positions: Tensor | None) -> None:
        """Learn which tensors make the vectors that travel from here on.

        Args:
            space: layout of the vectors, shape (k',).
            positions: where each coordinate was before, see `Server.relocate`, shape (k',); None at first.

        Raises:
            ConfigurationError: if it cannot go on in these coordinates.
        """

    def more_bytes(self, model: GlobalModel, num_clients: int) -> tuple[int, int]:
        """Extra bytes that a client uploads and downloads per round because of this stage, about."""
        return 0, 0

    # On the server's side.

    def open(self, round_index: int, model: GlobalModel) -> None:
        """Begin a round; one that is resumed has begun already."""

    def work(self, work: GroupWork, record: RoundRecord) -> GroupWork:
        """Return the work that clients finish, without those whose updates will not come."""
        return work

    def down(self, start: Start, work: GroupWork) -> list[tuple[Start, GroupWork]]:
        """Return the clients' starts, grouped by equal ones."""
        return [(start, work)]

    def up(self, upload: Upload) -> Iterable[Upload]:
        """Return updates as they arrive at the server, together or one by one."""
        return (upload,)

    def settle(self, record: RoundRecord, processes: Processes) -> None:
        """Called after the last update of a round, before the server step.

        Args:
            record: of the round, over all processes.
            processes: that trained clients of the round; what one of them has learnt from its clients, the
                others must be told here.
        """

    def on_server(self, aggregate: Tensor) -> Tensor | None:
        """Return the server's descent direction, shape (k,); None to take no step."""
        return aggregate

    def stepped(self, params: Tensor) -> None:
        """Change, in place, the parameters to which the server has stepped, shape (k,)."""

    def close(self, record: RoundRecord) -> None:
        """End the round; the server has stepped."""

    # On the clients' side, where one trains at a time.

    def around(self, turn: Turn) -> AbstractContextManager[None]:
        """Surrounds a client's turn in the module."""
        return _NOTHING

    def steps(self, turn: Turn) -> AbstractContextManager[None]:
        """Surrounds the local steps of a client; its update is known at the end."""
        return _NOTHING

    # In checkpoints.

    def state_dict(self) -> Any:
        """Return the state for a checkpoint, of a stage with a `key`."""
        return None

    def check(self, state: Any) -> None:
        """Refuse the state of another run, before anything is taken.

        Args:
            state: as `state_dict` returned it; None if the checkpoint has none.

        Raises:
            ConfigurationError: saying what differs.
        """

    def load_state_dict(self, state: Any, model: GlobalModel) -> None:
        """Restore the state of a checkpoint, with the global model as it was."""


class Learning(Stage):
    """A stage through which clients learn from their own updates, if it `learns`."""

    learns: bool = True

    @abstractmethod
    def learn(self, update: ClientUpdate, work: ClientWork, start: Start) -> Callable[[], None]:
        """Find out what a client learns from its own update, and change nothing yet.

        Returns:
            What changes the client's memory, and cannot fail. It is called when the update is sure to
            be used, as nothing else has failed at the client.

        Raises:
            ClientFailure: if it cannot; its update is not used then.
        """


class Correcting(Learning):
    """A stage by which clients add something to their gradients."""

    @abstractmethod
    def term(self, client: int) -> GradientTerm:
        """Return the term that clients in slots add to their gradients in this round."""


class KeepsTensors(Stage):
    """A stage by which clients have tensors of their own in the module."""

    @abstractmethod
    def own(self, client: int) -> Tensor | None:
        """Tensors of a client, shape (o,); None for the global model's."""

    @abstractmethod
    def keep(self, client: int, own: Tensor) -> None:
        """Remember the tensors of a client of slots, whose update is used."""


class AroundFit(Stage):
    """A stage with something to do around the rounds of a fit as well.

    Attributes:
        hides_cohorts: whether nobody may be told who takes part.
    """

    hides_cohorts: bool = False

    @abstractmethod
    def fit_begins(self, trainer: Trainer, earlier: Sequence[Stage] | None) -> None:
        """Begin a fit.

        Args:
            trainer: that fits.
            earlier: the stages of the same Federation's last fit of the module, none if there was none;
                None if a checkpoint's state was taken up.
        """

    @abstractmethod
    def training_begins(self, trainer: Trainer) -> None:
        """Log what users should know before the first round."""

    @abstractmethod
    def round_ends(self, trainer: Trainer, record: RoundRecord, *, is_broken_off: bool) -> None:
        """See a round's record before it is logged; one that was broken off has not been closed."""


class SpansNetwork(Stage):
    """A stage whose two sides tell each other something where clients are remote."""

    def to_sites(self) -> Mapping[str, Tensor]:
        """Return the data that clients need in this round besides the model."""
        return {}

    def from_server(self, told: Mapping[str, Tensor]) -> None:
        """Receive what `to_sites` has returned, before clients of the round train."""

    def to_server(self, client: int) -> Mapping[str, Tensor]:
        """Return the data that the server needs of a client besides its update."""
        return {}

    def from_site(self, client: int, told: Mapping[str, Tensor]) -> None:
        """Receive what `to_server` has returned, when the client's update arrives.

        Raises:
            ValueError: if it cannot be that.
        """


class Stages(Iterable[Stage]):
    """The stages of a run, in the order in which updates pass them.

    Attributes:
        having: those that do something in a method, by the method's name.
    """

    def __init__(self, stages: Iterable[Stage]) -> None:
        self._stages = tuple(stages)
        methods = [name for name, value in vars(Stage).items() if isfunction(value)]
        self.having = {m: [s for s in self._stages if overridden(s, m)] for m in methods}
        self._correcting = [stage for stage in self._stages if isinstance(stage, Correcting)]
        self._learning = [s for s in self._stages if isinstance(s, Learning) and s.learns]
        self._keeping = [stage for stage in self._stages if isinstance(stage, KeepsTensors)]
        self.around_fit = [stage for stage in self._stages if isinstance(stage, AroundFit)]
        self.learns = bool(self._learning)
        self.hides_clients = any(stage.hides_clients for stage in self._stages)
        self.is_private = any(stage.is_private for stage in self._stages)

    def __iter__(self) -> Iterator[Stage]:
        return iter(self._stages)

    @property
    def one_at_a_time(self) -> str | None:
        """Why slots cannot serve one of them."""
        return next((s.one_at_a_time for s in self._stages if s.one_at_a_time is not None), None)

    def after(self, stage: Stage) -> Stages:
        """Return those that follow one."""
        return Stages(self._stages[self._stages.index(stage) + 1 :])

    def before(self, stage: Stage) -> Stages:
        """Return those that come ahead of one."""
        return Stages(self._stages[: self._stages.index(stage)])

    def down(self, model: GlobalModel, work: GroupWork) -> list[tuple[Start, GroupWork]]:
        """Return the clients' starts, made from the server's model."""
        num_bytes = bytes_down(model.params, model.buffers)
        found = [(Start(model, model, num_bytes=num_bytes), work)]
        for stage in self.having["down"]:
            found = [piece for start, some in found for piece in stage.down(start, some)]
        return found

    def up(self, upload: Upload) -> Iterable[Upload]:
        """Return updates as they arrive, each when it is asked for."""
        pieces: Iterable[Upload] = (upload,)
        for stage in self.having["up"]:
            pieces = chain.from_iterable(map(stage.up, pieces))
        return pieces

    def on_server(self, aggregate: Tensor) -> Tensor | None:
        """Return the server's descent direction, stages in reverse order."""
        gradient: Tensor | None = aggregate
        for stage in reversed(self.having["on_server"]):
            if gradient is None:
                break
            gradient = stage.on_server(gradient)
        return gradient

    def learn(self, update: ClientUpdate, work: ClientWork, start: Start) -> Callable[[], None]:
        """Learn from a client's own update; return a function that stores all of it."""
        learnt = [stage.learn(update, work, start) for stage in self._learning]

        def remember() -> None:
            for each in learnt:
                each()

        return remember

    def term(self, client: int) -> GradientTerm:
        """Return the sum of the terms that clients in slots add to their gradients."""
        terms = [stage.term(client) for stage in self._correcting]
        return terms[0] if len(terms) == 1 else sum(terms, _NO_TERM)  # to the bit, if it is one

    def own(self, client: int) -> Tensor | None:
        """Tensors of a client, shape (o,); None for the global model's."""
        found = (stage.own(client) for stage in self._keeping)
        return next((own for own in found if own is not None), None)

    def keep(self, client: int, own: Tensor) -> None:
        """Remember the tensors of a client of slots."""
        for stage in self._keeping:
            stage.keep(client, own)


def overridden(stage: Stage, *names: str) -> list[str]:
    """Return which of some methods a stage has of its own."""
    return [name for name in names if getattr(type(stage), name) is not getattr(Stage, name)]


def check_same(what: str, saved: Any, present: Any) -> None:
    """Refuse a checkpoint of a run that differs in something.

    Raises:
        ConfigurationError: saying in what.
    """
    if saved != present:
        raise ConfigurationError(
            f"the checkpoint belongs to a run with another {what} ({saved} instead of {present}): "
            "resume with the configuration of the run that wrote it, or start without ckpt_path"
        )


def kind_of(state: Mapping[str, Any]) -> str | None:
    """Kind of a stage's state in a checkpoint; None if it has none."""
    kind, names = state.get("kind"), state.get("names")
    return f"{kind} with {len(names)} tensors, from {names[0]}" if names else kind
