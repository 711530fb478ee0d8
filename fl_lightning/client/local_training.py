"""One client's round: start from the global model, take local steps, return the difference.

    y ← x;   for each local step: y ← y - η_l g(y);   Δ = x - y

Source: McMahan et al. 2017, Algorithm 1, ClientUpdate. The delta is the pseudo-gradient of
Reddi et al. 2021 with the sign that lets the server optimizer descend it.

All clients train in the same module and optimizers. No value is copied from the device before a client has
finished.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from fl_lightning.client.local_step import LocalStep, SizedBatch
from fl_lightning.client.log_collector import LogCollector, weighted_mean
from fl_lightning.client.optimizers import OptimizerMasks, OptimizerSteps
from fl_lightning.client.state.attributes import Appended, Attributes, append
from fl_lightning.client.state.round_start import LocalSchedules, RoundStart
from fl_lightning.client.state.tensors import (
    Constants,
    ModuleTensors,
    is_number,
    state_space,
    whole_numbers,
)
from fl_lightning.core.errors import ClientFailure, ConfigurationError, help_with_one_example
from fl_lightning.core.space import Space
from fl_lightning.core.update import ClientUpdate, GlobalModel, check_finite


class LocalTrainer:
    """Trains clients one after the other in one module.

    Args:
        module: the model; after a client's training it keeps the client's values until `restore`.
        optimizers: one or several optimizers over the module's parameters; their state is empty when a
            client starts.
        step: function that takes one local step.
        collector: collects the values that the step logs.
        schedules: learning-rate schedules, see `RoundStart`.
        by_step: schedules that count local steps, or None.
        scaler: gradient scaler of fp16, or None.
        by_hand: whether the local step itself steps the optimizers, any number of times, and may freeze
            parameters temporarily.
        ignore: names of the module's attributes that are not restored, see `Attributes`.

    Attributes:
        space: layout of the trainable shared parameters.
        buffers: layout of the shared state, see `GlobalModel`.
        state_names: names of the tensors in the shared state; None for all floating-point buffers.
        keeps_lists: whether `show_lists` includes the items that the last client appended to the module's
            lists; set for clients whose updates are used, and reset by `restore`.
        personal: layout of the personal tensors, see `set_personal`.
        personal_end: personal tensors of the last client after its training, shape (o,).
        round_start: options of the optimizers at the start of the round, and the scale of fp16 losses.
        tensors: record of the module's tensors and their memory.
        masks: masks of the optimizers, which define `space`.
        counts_steps: whether to count `ClientUpdate.optimizer_steps`, which plain means do not need.
        check_loss: raises ClientFailure for an update whose loss the server cannot use; None if the server
            uses no loss.

    Example:
        >>> from torch import nn
        >>> module = nn.Linear(1, 1, bias=False)
        >>> _ = nn.init.constant_(module.weight, 2.0)
        >>> optimizer = torch.optim.SGD(module.parameters(), lr=0.25)
        >>> def step(batches, index):  # minimise w² / 2
        ...     optimizer.zero_grad()
        ...     loss = module.weight.square().sum() / 2
        ...     loss.backward()
        ...     optimizer.step()
        ...     return loss.detach()
        >>> trainer = LocalTrainer(module, optimizer, step)
        >>> start = trainer.read()
        >>> update = trainer.train(start, client_id=0, num_examples=1, batches=[[(None, 1)]] * 2)
        >>> update.delta, update.metrics["train/loss"]
        (tensor([0.8750]), tensor(1.5625))
    """

    def __init__(
        self,
        module: nn.Module,
        optimizers: Optimizer | Sequence[Optimizer],
        step: LocalStep,
        collector: LogCollector | None = None,
        schedules: Sequence[LRScheduler] = (),
        by_step: LocalSchedules | None = None,
        scaler: GradScaler | None = None,
        *,
        by_hand: bool = False,
        ignore: Collection[str] = (),
    ) -> None:
        self.collector = collector if collector is not None else LogCollector()
        self._module = module
        self._integer_buffers = whole_numbers(module)
        self.tensors = ModuleTensors(module)
        self._ignore = {*ignore, "log"}  # which the collector puts there
        self._attributes, self._in_round = Attributes(module, ignore=self._ignore), False
        self.state_names: list[str] | None = None
        self.keeps_lists, self._appended = False, Appended()
        one = isinstance(optimizers, Optimizer)
        self._optimizers: list[Optimizer] = [optimizers] if one else list(optimizers)  # type: ignore[list-item, arg-type]
        self.masks = OptimizerMasks(module, self._optimizers)
        self._optimizer_steps = OptimizerSteps(self._optimizers, by_hand=by_hand)
        self.round_start = RoundStart(self._optimizers, schedules, by_step, scaler)
        self._step = step
        self._in_hand: Sequence[SizedBatch] = ()  # the current step's, for messages
        self.counts_steps = True
        self.check_loss: Callable[[ClientUpdate], None] | None = None
        self.set_personal(())

    def set_personal(self, names: Sequence[str], *, beside: bool = False) -> None:
        """Set which tensors are personal: each client keeps its own values and never sends them.

        Args:
            names: names of parameters and buffers.
            beside: whether the personal tensors are a second model beside the shared one; if not, they
                are no part of the shared model, and the global model keeps the module's current values.
        """
        tensors = dict(self._module.named_parameters()) | dict(self._module.named_buffers())
        self.personal = Space({name: tensors[name] for name in names})
        self._apart = frozenset(() if beside else names)
        self._loaded: Tensor | None = None
        self.personal_end = torch.empty(0)
        self.buffers = self._state_space()
        self.renew_space()
        self.start_round()

    def set_state(self, names: Sequence[str]) -> None:
        """Set the shared state: buffers and frozen parameters that clients change and the server averages."""
        self.state_names = list(names)
        self.buffers = self._state_space()
        self.start_round()

    def _state_space(self) -> Space:
        if self.state_names is None:
            return Space.of_buffers(self._module, without=self._apart)
        return state_space(self._module, self.state_names, without=self._apart)

    @property
    def integer_start(self) -> dict[str, Tensor]:
        """Values of the integer buffers at the start of the round, by buffer name."""
        named = self._module.named_buffers()
        names = [name for name, buffer in named if not is_number(buffer)]
        return dict(zip(names, self._integers, strict=False))  # frozen parameters follow

    @property
    def personal_start(self) -> Tensor:
        """Values of the personal tensors at the start of the round, shape (o,), for clients without their own."""
        return torch.empty(0) if self._personal_start is None else self._personal_start

    @property
    def keeps_apart(self) -> bool:
        """True if personal tensors are left out of the shared model; false if they are a second, complete model."""
        return bool(self._apart)

    def load_personal(self, personal: Tensor | None) -> None:
        """Set the personal tensors with which the next client starts, shape (o,); None for `personal_start`."""
        self._loaded = personal

    def renew_space(self) -> None:
        """Recompute `space`, the layout of the shared parameters, from the current masks."""
        self.space = Space.of_parameters(self._module, self.masks.active(), without=self._apart)
        self.masks.note()

    def read(self) -> GlobalModel:
        """Return the module's current shared parameters and buffers as a global model."""
        return GlobalModel(self.space.read(), self.buffers.read())

    def start_round(self, number: int = 0) -> None:
        """Record optimizers, integer buffers and attributes, to which `restore` resets the module before each client.

        Args:
            number: number of the round.

        Raises:
            ConfigurationError: if a parameter was frozen or unfrozen since the run started.
        """
        self.tensors.restore_memory()
        self.tensors.note()
        present = [name for name in self.tensors.trainable if name not in self._apart]
        if present != self.space.names:
            changed = sorted(set(present) ^ set(self.space.names))
            raise ConfigurationError(
                f"{changed[0]} was frozen or unfrozen during the run, but clients and server exchange the same "
                "parameters in every round: freeze it before the run, or start another run"
            )
        self.round_start.note(number)
        self._integers = [buffer.clone() for buffer in self._integer_buffers]
        self._personal_start = self.personal.read() if self.personal.size else None
        elsewhere = {*self.buffers.names, *self._apart}
        fixed = self.tensors.fixed.items()
        constant = {n: t for n, t in fixed if is_number(t) and n not in elsewhere}
        self._constants, self._round = Constants(constant), number
        if not self._attributes.is_same():  # else the last snapshot still holds
            self._attributes = Attributes(self._module, ignore=self._ignore)
        self._in_round, self._appended = True, []

    def show_lists(self) -> None:
        """Append to the module's lists all items that this round's clients appended; `restore` removes them again."""
        if self._appended:
            append(self._appended)

    def end_round(self, model: GlobalModel) -> None:
        """End a round: restore the global model, and advance the learning-rate schedules."""
        self.restore(model)
        self.round_start.end()
        self.show_lists()
        self._in_round = False

    def check_constants(self) -> None:
        """Raise ConfigurationError if a client changed a tensor that the run's first local steps left unchanged."""
        if changed := self._constants.changed():
            raise ConfigurationError(
                f"round {self._round + 1}: a client's training changes {changed[0]}, which the first local "
                "steps of the run did not change, so that it counts as a constant: name it in "
                f"federation.client_state, e.g. client_state: [{changed[0]}]"
            )

    def check_one_rate(self) -> None:
        """Raise ConfigurationError if the learning rate changed while the last client trained."""
        self._optimizer_steps.check_one_rate()

    def restore(self, model: GlobalModel) -> None:
        """Reset the module before a client: global model, personal tensors, attributes, optimizers, fp16 loss scale.

        Attributes are reset only inside a round, from `start_round` to `end_round`.
        """
        if self._in_round and not self._attributes.is_same():
            appended = self._attributes.put_back()
            self._appended += appended if self.keeps_lists else []
        self.keeps_lists = False
        if self._loaded is None and self._personal_start is not None:
            # before the shared entries: a second model has those as well, and others that a mask freezes
            self.personal.write(self._personal_start)
        self.space.write(model.params)
        self.buffers.write(model.buffers)
        if self._integers:
            with torch.no_grad():
                torch._foreach_copy_(self._integer_buffers, self._integers)
        if self._loaded is not None:
            self.personal.write(self._loaded)
        self.round_start.put_back()

    def train(
        self,
        start: GlobalModel,
        *,
        client_id: int,
        num_examples: int,
        batches: Iterable[Sequence[SizedBatch]],
        masks: Mapping[str, Tensor] | None = None,
    ) -> ClientUpdate:
        """Train one client and return the update.

        Args:
            start: the global model.
            client_id: client id.
            num_examples: aggregation weight of the client.
            batches: for every local step one batch, or several to accumulate, with their sizes.
            masks: the client's own masks by parameter name, subsets of the optimizer's masks; None for the
                optimizer's masks.

        Raises:
            ClientFailure: if a step raised (the cause), if there was no step, or if a loss, the delta or a
                personal tensor is not finite.
        """
        self.restore(start)
        active = None
        if masks is not None:  # they hold until the next `restore`
            active = self.space.coordinates(masks)
            self.masks.set(masks)
        try:
            num_steps, losses, sizes = self._take_steps(batches)
            self.tensors.freeze_again()
        except BaseException as error:
            self.tensors.put_back()
            if isinstance(error, ConfigurationError) or not isinstance(error, Exception):
                raise
            self.collector.discard()
            sizes = [size for _, size in self._in_hand]
            help_ = help_with_one_example(error, sizes)
            raise ClientFailure(client_id, f"{type(error).__name__}: {error}{help_}") from error
        if num_steps == 0:
            raise ClientFailure(client_id, "it took no local step: its shard is empty")
        logged = self.collector.collect()
        metrics = {"train/loss": weighted_mean(losses, sizes)} if losses else {}
        if self.personal.size:
            self.personal_end = self.personal.read()
        update = ClientUpdate(
            client_id=client_id,
            delta=self.space.moved_from(start.params),
            buffers=self.buffers.read(),
            num_examples=num_examples,
            num_steps=num_steps,
            optimizer_steps=self._optimizer_steps.taken if self.counts_steps else None,
            metrics=metrics,
            active=active,
        )
        try:
            check_finite(update)
        except ClientFailure as failure:
            bad = [n for n, loss in zip(sizes, losses, strict=True) if not bool(loss.isfinite())]
            help_ = help_with_one_example(None, bad[:1])
            raise ClientFailure(client_id, failure.reason + help_) from None
        if self.personal_end.numel() and not bool(self.personal_end.isfinite().all()):
            raise ClientFailure(client_id, "its personal parameters contain NaN or infinite values")
        update.metrics.update(logged)  # a module may log a train/loss of its own
        return update

    def _take_steps(
        self, steps: Iterable[Sequence[SizedBatch]]
    ) -> tuple[int, list[Tensor], list[int]]:
        num_steps, losses, sizes = 0, [], []
        step = self._step
        by_step = self.round_start.counts_steps and bool(self.round_start.by_step)
        taken = self._optimizer_steps if self.counts_steps else None
        with taken or nullcontext():
            for step_batches in steps:
                if by_step:
                    self.round_start.begin_step(num_steps)
                self._in_hand = step_batches
                loss = step(step_batches, num_steps)
                self._in_hand = ()
                num_steps += 1
                if taken is not None:
                    taken.end_step(loss)
                if loss is not None:
                    losses.append(loss)
                    one = len(step_batches) == 1
                    size = step_batches[0][1] if one else sum(size for _, size in step_batches)
                    sizes.append(size)
        return num_steps, losses, sizes
