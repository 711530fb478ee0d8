"""A site's fit: each epoch of Lightning follows one order to train, until the server orders to stop.

Model, data, precision, devices and hooks are those of the site's Trainer; cohorts, validation, checkpoints and
schedules are the server's.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, NamedTuple

from lightning.pytorch import Callback, LightningModule, Trainer

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.seeds import derive_seed, seed_global_generators
from fl_lightning.data.cohorts.cohort import AllClients
from fl_lightning.data.federated import STATISTICS
from fl_lightning.federation import (
    Calendar,
    Options,
    begin_at_site,
    check_begun,
    plan_rounds,
    prepare,
    recalled_models,
    set_round,
    take_over,
    visiting,
)
from fl_lightning.flower.messages import ClientAnswer, Order, OrderRefused
from fl_lightning.flower.packing import (
    SUMS,
    Recalibrates,
    RunMask,
    copy_model,
    examples_of,
    mask_of,
)
from fl_lightning.flower.policy import Policy
from fl_lightning.flower.site.ledger import Ledger
from fl_lightning.flower.site.memory import Calibrates, ClientSums, SiteMemory
from fl_lightning.flower.site.order_queue import OrderQueue, OrderResult
from fl_lightning.flower.site.privacy import hidden_at_site
from fl_lightning.flower.site.rounds import SiteRounds, evaluated
from fl_lightning.flower.site.sums import SiteSums
from fl_lightning.server.server import as_aggregator
from fl_lightning.sparsity.masks.mask import Mask


class Fit(NamedTuple):
    """All that a site's fit needs for one run: configuration, orders, client state, secure sums, privacy ledger.

    Attributes:
        configuration: configuration with the site's own options.
        queue: queue of orders and results.
        memory: client state on disk.
        sums: hidden sums of the run.
        ledger: records the privacy that the clients have spent, in this run and others.
    """

    configuration: Mapping[str, Any]
    queue: OrderQueue
    memory: SiteMemory
    sums: SiteSums
    ledger: Ledger

    @property
    def num_rounds(self) -> int | None:
        """Planned number of rounds; None if the run has no planned end."""
        rounds = (self.configuration.get("trainer") or {}).get("max_epochs")
        return None if rounds is None or rounds < 0 else int(rounds)


class AtSite(Callback):
    """Callback that makes a site's fit follow the orders of the server.

    Args:
        options: options of the federation.
        fit: configuration, queue, client state, sums and ledger of the run.
        policy: policy of the site.
        calibrates: calibration of masks in the configuration; None without one.
    """

    def __init__(
        self, options: Options, fit: Fit, policy: Policy, calibrates: Calibrates | None = None
    ) -> None:
        self._given, self._fit, self._policy, self._calibrates = options, fit, policy, calibrates
        self.federation = options_at_site(options)  # see `federation_options`
        self._queue, self._memory = fit.queue, fit.memory
        self._cleanup = ExitStack()
        self._applier: Callable[[Mask], None] | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Prepare Lightning's fit loop, so that each of its epochs follows an order."""
        plan_rounds(trainer, self._fit.num_rounds)  # for schedules of rates, which are built next
        self._calendar: Calendar = prepare(trainer, pl_module, self.federation, self._cleanup)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Set up the training of clients on the module and its optimizers."""
        if getattr(trainer.precision_plugin, "scaler", None) is not None:
            raise ConfigurationError(
                "trainer.precision: 16-mixed has a loss scale that all clients share, which sites do "
                "not exchange: use bf16-mixed or 32-true"
            )
        plan_rounds(trainer, None)  # the server says when it is over
        options, calendar = self.federation, self._calendar
        greeting = self._first_mask(trainer)
        check_begun(trainer, options)
        trainer.strategy.lr_scheduler_configs.clear()  # rates come with orders
        run, stages = begin_at_site(trainer, options, calendar)
        sums, privacy = hidden_at_site(
            self._given, run, self._fit.num_rounds, self._policy, self._fit.ledger
        )
        self._rounds = SiteRounds(run, options, stages, self._allows, sums, privacy)
        self._memory.load_into(run.memory)
        take_over(trainer, self._rounds.train, run, self._cleanup)
        if greeting is not None:
            self._follow_mask(trainer, greeting)

    def _first_mask(self, trainer: Trainer) -> Order | None:
        """Answer orders to calibrate until an order brings a mask; apply the mask, and return that order.

        Client state on disk belongs to the mask on disk: if there is one, it is applied first.
        """
        if self._calibrates is None:
            return None
        self._applier = self._calibrates.mask_applier(trainer)
        while (order := self._queue.next_order()) is not None and order.kind == "calibrate":
            self._calibrate(trainer, order)
        mask = None if order is None else mask_of(order)
        if order is None or mask is None:
            raise OrderRefused("stopped", "the run ended before the server sent a mask")
        self._apply(trainer, order, self._memory.mask or mask)
        return order

    def _apply(self, trainer: Trainer, order: Order, mask: RunMask) -> None:
        """Load an order's model into the module, and make only the entries of a mask trainable."""
        assert self._applier is not None
        copy_model(trainer.lightning_module, order.tensors)
        self._applier(mask.mask)

    def _calibrate(self, trainer: Trainer, order: Order) -> None:
        """Answer an order to calibrate: put each client's sums over its examples into the answer."""
        done = OrderResult()
        for client, num_examples, sums in self._client_sums(trainer, order):
            done.answers.append(ClientAnswer(client=client, num_examples=num_examples))
            done.tensors |= {f"{client}/{SUMS}{name}": own.cpu() for name, own in sums.items()}
        self._queue.answer(done)

    def _client_sums(self, trainer: Trainer, order: Order) -> Iterator[ClientSums]:
        """Yield each client's sums over its examples, computed with the order's model; the module does not change.

        Raises:
            OrderRefused: if the run needs no such sums, or they may not leave.
        """
        is_of_norms = order.options.get("what") == STATISTICS
        calibrates: Any = trainer.lightning_module if is_of_norms else self._calibrates
        answers = isinstance(calibrates, Recalibrates) if is_of_norms else calibrates is not None
        if not answers or self._given.hides_clients:
            raise OrderRefused(
                "policy", "this run needs no such sums, or hides single clients from the server"
            )
        if not is_of_norms:
            yield from calibrates.sums(trainer, order)
            return
        if not self._allows(STATISTICS):
            raise OrderRefused("policy", f"metrics of site.yaml do not allow {STATISTICS}")
        counts = examples_of(order)
        with visiting(trainer, "validation", mode="eval"):
            copy_model(calibrates, order.tensors)
            of_each = zip(counts.items(), calibrates.client_sums(counts), strict=True)
            yield from ((client, number, sums) for (client, number), sums in of_each)

    def _follow_mask(self, trainer: Trainer, order: Order) -> None:
        """Switch training and client state to the mask of an order."""
        mask = mask_of(order)
        if self._applier is None or mask is None:
            raise OrderRefused(
                "policy", "the order has no mask, or the configuration no MaskCalibration"
            )
        if mask != self._memory.mask:
            self._memory.check_mask(mask)
            self._memory.begin(replace(order, clients=tuple(sorted(self._policy.clients))))
        self._apply(trainer, order, mask)
        self._rounds.follow_mask()
        self._memory.follow_mask(mask)
        self._queue.answer(OrderResult())

    def _allows(self, name: str) -> bool:
        """Return True if a metric may leave the site; `log_unprotected` must be set if updates have noise."""
        private, policy = self._given.client_privacy, self._policy
        is_bare = private is None or not private.clients_add_noise or policy.log_unprotected
        return is_bare and policy.allows_metric(name)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Wait for the next order to train; answer orders of other kinds meanwhile."""
        while (order := self._queue.next_order()) is not None and order.kind != "train":
            if order.kind == "evaluate":
                self._evaluate(trainer, order)
            elif order.kind == "calibrate":
                self._calibrate(trainer, order)
            else:
                self._follow_mask(trainer, order)
        self._rounds.set_order(order)
        if order is None:
            trainer.should_stop = True
            return
        set_round(trainer, order.round)
        plan_rounds(trainer, order.options.get("num_rounds"))  # which the module may read
        self._memory.begin(order)
        seed_global_generators(derive_seed(self.federation.seed, "round", order.round))

    def _evaluate(self, trainer: Trainer, order: Order) -> None:
        """Answer an order to evaluate clients."""
        self._memory.begin(order)
        self._rounds.load_model(order)
        own = self._rounds.run.local.personal.names, self._rounds.run.memory
        models = recalled_models(trainer, self.federation.personal, self.federation.seed, own, {})
        self._queue.answer(evaluated(trainer, order, models, self._allows))

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Answer the order with the round's updates."""
        plan_rounds(trainer, None)
        if (order := self._rounds.order) is not None:
            self._rounds.charge()
            done = self._rounds.done
            self._memory.end(order, [answer.client for answer in done.answers])
            self._fit.sums.keep(self._rounds.vectors, self._rounds.rules, order)
            self._queue.answer(done)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Restore Trainer, module and data module as they were before the fit."""
        self._cleanup.close()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Restore Trainer, module and data module as they were before the fit."""
        self._cleanup.close()


def options_at_site(options: Options) -> Options:
    """Return a copy of a federation's options for a site, without those that only the server uses."""
    own = copy.copy(options)
    own.cohort = AllClients()  # orders name the clients
    own.on_client_failure, own.min_replies = "skip", 1
    own.devices = own.asynchronous = own.attackers = own.privacy = None
    own.engine, own.slots, own.speedups = "sequential", None, None
    own.pad_batches = None
    own.handed, own.is_at_site = [], True
    if as_aggregator(options.aggregator).protection is not None:
        own.aggregator = None
    return own
