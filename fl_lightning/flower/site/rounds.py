"""Training rounds at a site: an order names clients, and the answer has their updates.

Clients train as in a simulation, by the same `FitClients` and stages. The order has the number of the round, the
clients, the model and the options. Updates pass through the stages before `Transport`, and are then packed.

Clients are evaluated on the examples that they hold out.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
from lightning.pytorch import Trainer
from torch import Tensor
from torch.optim import Optimizer

from fl_lightning.core.errors import ClientFailure
from fl_lightning.core.update import ClientUpdate, GlobalModel
from fl_lightning.federation import (
    CohortBatch,
    FitClients,
    Missing,
    Options,
    PersonalModels,
    Run,
    SpansNetwork,
    Stages,
    Start,
    StepOf,
    Transport,
    Upload,
    evaluate_clients,
)
from fl_lightning.flower.messages import ClientAnswer, Order, OrderRefused
from fl_lightning.flower.packing import (
    OPTION,
    SUMS,
    Packing,
    Recalibrates,
    constants_digest,
    metric_tensors,
    of_stage,
    pop_metrics,
)
from fl_lightning.flower.site.order_queue import OrderResult
from fl_lightning.flower.site.privacy import SitePrivacy
from fl_lightning.flower.sums import rules_of
from fl_lightning.server.protected import Protected, Terms

log = logging.getLogger(__name__)
# facts that are sent beside an update, with the names under which the server logs them
NORM, ERROR = "round/client_update_norm", "round/compression_error"


class SiteRounds:
    """Trains the clients of the server's orders inside Lightning's loop.

    Args:
        run: run of the site.
        options: options of the federation.
        stages: stages of the run.
        allows: returns True if a metric of this name may leave.
        sums: makes the vectors of hidden sums; None if updates are sent in clear.
        privacy: adds noise before updates leave; None without noise at clients.

    Attributes:
        run: run of the site.
        order: current order; None in a round without training.
        done: result of the current order.
        vectors: vectors of the clients for a hidden sum, which stay at the site.
    """

    def __init__(
        self,
        run: Run,
        options: Options,
        stages: Stages,
        allows: Callable[[str], bool],
        sums: Protected | None = None,
        privacy: SitePrivacy | None = None,
    ) -> None:
        self.run, self._stages, self._allows = run, stages, allows
        self._seed = options.seed
        self._sums, self._privacy = sums, privacy
        self._clients = FitClients(run, options, stages)
        self._transport = next(stage for stage in stages if isinstance(stage, Transport))
        self._ahead, _ = stages.around(self._transport)
        for stage in stages:
            stage.place(run.local.space, None)
        self._talking = [stage for stage in stages if isinstance(stage, SpansNetwork)]
        self._constants_agree = False
        self.set_order(None)

    def set_order(self, order: Order | None) -> None:
        """Set the order that the next round of training follows; None for a round without training."""
        self.order = order
        self.done = OrderResult()
        self.vectors: dict[int, npt.NDArray[Any]] = {}

    @property
    def rules(self) -> dict[str, Any]:
        """Options of the secure or encrypted sum that the run uses, as plain JSON; empty if it uses none."""
        return {} if self._sums is None else rules_of(self._sums.agreed_sum)

    def train(self, cohort: CohortBatch) -> None:
        """Train the clients that the server's last message names, if any. The batch of Lightning's loop is ignored."""
        if self.order is not None:
            self._train(self.order)

    def _train(self, order: Order) -> None:
        model = self._begin(order)
        try:
            with self._clients.metrics_kept_apart():
                work = self.run.plan.of(order.clients, self.run.round_index)
                for sent in self._clients.train(Start(model, model), work):
                    if isinstance(sent, Missing):
                        self._answer_failure(sent.failure)
                    else:
                        self._pack(sent)
                sums = pop_metrics(self.run.collector, self.run.module, self._allows)
            self.done.tensors |= metric_tensors(sums)
            reductions = self.run.collector.reductions.items()
            self.done.options = {
                OPTION: [list(entry) for entry in sums.logged],
                "reductions": {name: how for name, how in reductions if self._allows(name)},
            }
            self.run.local.check_constants()
        finally:
            self._clients.restore(model)

    def load_model(self, order: Order) -> None:
        """Load the model of an order into the module, for evaluation."""
        self._check_state(order)
        model = self._packing.opened_model(order.tensors["model"], order.round, whole=True)
        self._clients.restore(model)
        if isinstance(self.run.module, Recalibrates):
            self.run.module.use_statistics(of_stage(SUMS, order.tensors))

    def follow_mask(self) -> None:
        """Convert updates and client state to the coordinates of a new mask; do nothing if the mask is the same."""
        local = self.run.local
        if not local.masks.are_new:
            return
        before = local.space
        self._clients.renew_space()
        positions = local.space.positions_in(before)
        for stage in self._stages:
            stage.place(local.space, positions)
        local.start_round(self.run.round_index)  # what a client starts from has the new masks
        self._constants_agree = False

    def _check_state(self, order: Order) -> None:
        """Set which tensors clients send, and raise if frozen weights or constants differ from the server's."""
        local, options = self.run.local, order.options
        if local.state_names != options["state"]:
            local.set_state(options["state"])
        if not self._constants_agree:
            if constants_digest(self.run.module, local) != options["constants"]:
                raise OrderRefused(
                    "model",
                    "frozen weights or constants of the module are not the server's: both sides need the "
                    "same seed, and the same file of weights",
                )
            self._constants_agree = True
        num_up = 0 if options["buffers_stay"] else local.buffers.size
        self._packing = Packing(self._transport, local.space, local.buffers.size, num_up)

    def _begin(self, order: Order) -> GlobalModel:
        """Load an order's model and options, open the stages of its round, and return the model."""
        self._check_state(order)
        if self._privacy is not None:
            self._privacy.check_order(order)
        options = order.options
        if self._sums is not None:
            terms = Terms(most_clients=options["most_clients"], seed=self._seed)
            self._sums.begin(terms)
            self._sums.start_round(order.round)
        model = self._packing.opened_model(order.tensors["model"], order.round)
        self._clients.restore(model)  # which puts back the options of the round before
        _set_options(self.run.trainer.optimizers, options["optimizers"])
        self.run.local.start_round(self.run.round_index)
        self.run.local.round_start.set_by_step(options.get("by_step", ()))
        for stage in self._stages:
            stage.open(order.round, model)
        for stage in self._talking:
            stage.from_server(of_stage(f"stage/{stage.key}/", order.tensors))
        return model

    def _pack(self, sent: Upload) -> None:
        """Pass updates through the stages before `Transport`, then pack them, or keep them for a hidden sum."""
        pairs = (zip(u.made, u.arrived, strict=True) for u in self._ahead.up(sent))
        for made, update in chain.from_iterable(pairs):
            if self._sums is None:
                if self._privacy is not None:
                    update = self._privacy.noisy(update, self.run.round_index)
                payload, error = self._packing.update(update, self.run.round_index)
                self.done.tensors[f"{update.client_id}/payload"] = payload
                self._answer(made, update, {NORM: float(made.norm), ERROR: error})
            else:
                self.vectors[update.client_id] = self._sums.vector_of(update)
                self._answer(made, update, {})

    def _answer(self, made: ClientUpdate, update: ClientUpdate, facts: dict[str, float]) -> None:
        client = update.client_id
        for stage in self._talking:
            told = stage.to_server(client)
            if told and self._privacy is not None:
                raise OrderRefused("policy", f"the stage {stage.key} would send data without noise")
            for name, tensor in told.items():
                self.done.tensors[f"{client}/stage/{stage.key}/{name}"] = tensor.cpu()
        self.done.answers.append(
            ClientAnswer(
                client=client,
                num_examples=update.num_examples,
                num_steps=update.num_steps,
                optimizer_steps=update.optimizer_steps,
                effective_steps=update.effective_steps,
                metrics={n: v.detach().cpu() for n, v in made.metrics.items() if self._allows(n)},
                facts={n: v for n, v in facts.items() if self._allows(n)},
            )
        )

    def charge(self) -> None:
        """Charge the privacy budget of the clients whose updates are about to leave."""
        if self._privacy is not None:
            self._privacy.charge(
                answer.client for answer in self.done.answers if not answer.failure
            )

    def _answer_failure(self, failure: ClientFailure) -> None:
        """Put a client's failure into the answer as a category; the reason stays in the site's log."""
        log.warning("round %d, %s", self.run.round_index, failure, exc_info=failure.__cause__)
        self.done.answers.append(ClientAnswer(client=failure.client_id, failure=_category(failure)))


def _category(failure: ClientFailure) -> str:
    """Return the category of a client's failure, which is sent instead of its text, as this may hold data."""
    if failure.__cause__ is not None:
        return "memory" if isinstance(failure.__cause__, MemoryError) else "training"
    return "examples" if "no local step" in failure.reason else "not_finite"


def options_of(optimizers: Sequence[Optimizer]) -> list[list[dict[str, Any]]]:
    """Return the current options of optimizers, such as learning rates, as plain values."""
    return [[_plain(group) for group in optimizer.param_groups] for optimizer in optimizers]


def _plain(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers and texts of an optimizer's parameter group, without parameters and masks."""
    items = ((n, v.item() if isinstance(v, Tensor) else v) for n, v in group.items())
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in items
        if name != "params"
        and all(
            isinstance(each, bool | int | float | str | None)
            for each in (value if isinstance(value, tuple | list) else [value])
        )
    }


def _set_options(
    optimizers: Sequence[Optimizer], told: Sequence[Sequence[Mapping[str, Any]]]
) -> None:
    """Set the options of clients' optimizers, such as learning rates, to those of an order."""
    for optimizer, groups in zip(optimizers, told, strict=True):
        for group, options in zip(optimizer.param_groups, groups, strict=True):
            for name, value in options.items():
                if isinstance(group.get(name), Tensor):
                    group[name].fill_(value)
                elif name in group:
                    group[name] = tuple(value) if isinstance(group[name], tuple) else value


def evaluated(
    trainer: Trainer,
    order: Order,
    models: PersonalModels | None,
    allows: Callable[[str], bool],
) -> OrderResult:
    """Evaluate the module's model, and personal models, on the held-out examples of an order's clients.

    Args:
        trainer: Trainer of the site.
        order: order with clients and a stage.
        models: personal models; None without any.
        allows: returns True if a metric of this name may leave.
    """
    data: Any = trainer.datamodule  # type: ignore[attr-defined]
    stage: StepOf = "test" if order.options.get("stage") == "test" else "validation"
    clients = np.array(order.clients, np.int64)
    found = evaluate_clients(trainer, data, stage, clients, models=models)

    def leaving(metrics: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: value for name, value in metrics.items() if allows(name)}

    return OrderResult(
        [ClientAnswer(client=c, metrics=leaving(found.get(c, {}))) for c in order.clients]
    )
