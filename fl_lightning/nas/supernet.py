"""`Supernet`: one network that contains all architectures of a space of cells, for searches by α.

    w ← optimizer(w, ∇_w L_train(w, α))    on a batch of one half of the training data
    α ← optimizer(α, ∇_α L_search(w, α))   on a batch of the other half

The rule of relaxation decides how many architectures run in a step. The data are a `FederatedDataModule`
with a ``search_fraction``. A `Supernet` is an ordinary LightningModule: with a ``federation`` block each
client runs the two steps above, without one it is the published central search. A client's update contains
w and α; the server steps α with the optimizer of a central search, see `ServerSearchStep`.

Sources: Liu et al. 2019, DARTS, Algorithm 1; He et al. 2020, FedNAS, for the halves at clients.
Differs: both gradients are taken before either step, so that N clients with one step on a full batch each
take the step of the pooled data; DARTS computes the gradient of w after the step of α. FedNAS tunes α on
test data, and its server returns the α of the first client.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial, reduce
from typing import Any, Literal

import torch
from lightning.pytorch import Callback
from lightning.pytorch.cli import OptimizerCallable
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional
from torch.optim import Optimizer
from typing_extensions import override

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.seeds import derive_seed, torch_generator
from fl_lightning.core.traits import Trait, Traits
from fl_lightning.federation import federation_options
from fl_lightning.models.schedule import Schedule
from fl_lightning.nas.alpha_gradients import (
    TRIES_CELLS,
    AlphaGradient,
    Gradient,
    Penalty,
    Reward,
    Tensors,
    WeightStep,
    architecture_gradient,
    gradients_of,
    leaves,
)
from fl_lightning.nas.alpha_optimizer import (
    NO_MASK,
    GradientSignal,
    check_steps_once,
    check_weights_optimizer,
    keep,
    num_kept,
    recall,
)
from fl_lightning.nas.mixture import CellMixture, Selection, check_rule
from fl_lightning.nas.relaxation import (
    EdgeWeights,
    Relaxation,
    SearchStep,
    Softmax,
    drawn_operations,
)
from fl_lightning.nas.report import SearchReport
from fl_lightning.nas.search.proxy_scores import ZeroCostStart
from fl_lightning.nas.shared_weights import Batch, accuracy, check_image_size
from fl_lightning.nas.spaces.cells import CellSpace
from fl_lightning.nas.spaces.nas_bench_201 import NASBench201Table
from fl_lightning.nas.spaces.space import Networks

Place = Literal["server", "clients", "none"]
WarmUp = Literal["rule", "all"]

# no defaults of the arguments: YAML that names another class would be merged with them
_DARTS_SGD = partial(torch.optim.SGD, lr=0.025, momentum=0.9, weight_decay=3e-4)
_DARTS_ADAM = partial(torch.optim.Adam, lr=3e-4, betas=(0.5, 0.999), weight_decay=1e-3)

_TRAITS = Traits(
    needs={Trait.ALL_PARAMETERS: NO_MASK},
    instead={Trait.ALL_PARAMETERS: "search without MaskCalibration, then mask what was found"},
)


class Supernet(CellMixture):
    """Architecture search in a space of cells: trains weights w, shared by all architectures, and parameters α.

    Args:
        space: space of the architectures.
        rule: rule of relaxation, which weighs the operations of an edge by α; `Softmax` (DARTS) if None.
        num_classes: length of the output, at least 2.
        in_channels: channels of the images.
        image_size: height and width in pixels, for costs.
        channels: channels of the network's first cells.
        cells: number of cells, per stage or in all, as the space defines.
        learn: estimator of α's gradient; `Gradient` if None.
        penalty: penalty on the expected cost in the loss of α; no penalty if None.
        measure: cost that the penalty uses: ``flops``, ``params``, ``activations``, or the path of a file
            written by ``fl-lightning latency``, for milliseconds on that device.
        optimizer: optimizer of the weights; if None that of DARTS, SGD with rate 0.025, momentum 0.9 and
            weight decay 3e-4. A class named in YAML has its own defaults.
        architecture_optimizer: optimizer of α; if None that of DARTS, Adam with rate 3e-4, betas of 0.5
            and 0.999 and weight decay 1e-3.
        architecture_state: place of the state of α's optimizer in a federation. ``server``: the server
            steps α, as in a central search. ``clients``: clients step α and send the optimizer's state
            with their buffers; it is averaged, or personal if ``federation.personal`` names
            ``kept_state``. ``none``: clients step α with a new optimizer in every round, as in FedNAS.
        schedule: schedule of the weights' learning rate over rounds (epochs); constant if None.
        alpha_start: initial α by a score without training; random numbers near 0 if None.
        alpha_from: fraction of the search, in [0, 1], after which α moves; that of the rule if None.
        alpha_every: number of steps from one step of α to the next, at least 1; 5 in ProxylessNAS.
        alpha_draws: number of draws per step of α whose gradients are averaged, at least 1, for rules that
            draw operations: one draw of GDAS has a tenth of the signal-to-noise ratio of DARTS; ENAS
            averages 20.
        alpha_held: whether gradients are always taken at α = 0, where all operations have equal weights.
            α is then the sum of its steps: with `torch.optim.SGD` the mean gradient decides.
        warm_up: operations that run before α moves: those of the ``rule``, or ``all`` with equal weights,
            which trains the weights in fewer steps if the rule runs one operation per edge.
        selection: how the architecture is selected when the search ends. ``alpha``: by the largest α (or
            the most accurate of drawn ones, see `Reward`). ``perturbation``: an edge keeps the operation
            without which the mixture is least accurate on training examples; for rules that run all.
        clip_norm: largest norm of the weights' gradient, > 0.
        table: path of a file with the results of NAS-Bench-201, see `NASBench201Table`. The results of the
            current cell are logged; the search does not use them.
        recalibration_examples: number of training examples, over all clients, for the batch norm
            statistics of an evaluation; None for all.
        same_draws: whether all clients draw the same operations in the same local step.
        seed: seed of draws that are equal for all clients, and of the initial α; the run's seed if None.

    Raises:
        ConfigurationError: if a value is out of range, or batches have no half for the search.

    Example:
        >>> from fl_lightning.nas import NASBench201
        >>> net = Supernet(NASBench201(), num_classes=10, channels=4, cells=1, seed=0)
        >>> str(net.architecture)[:20], net.alpha.shape
        ('|...', torch.Size([6, 5]))
    """

    federation_traits: Traits = _TRAITS
    baseline: Tensor
    kept_state: Tensor

    def __init__(
        self,
        space: CellSpace,
        rule: Relaxation | None = None,
        *,
        num_classes: int,
        in_channels: int = 3,
        image_size: int = 32,
        channels: int = 16,
        cells: int = 5,
        learn: AlphaGradient | None = None,
        penalty: Penalty | None = None,
        measure: str = "flops",
        optimizer: OptimizerCallable | None = None,
        architecture_optimizer: OptimizerCallable | None = None,
        architecture_state: Place = "server",
        schedule: Schedule | None = None,
        alpha_start: ZeroCostStart | None = None,
        alpha_from: float | None = None,
        alpha_every: int = 1,
        alpha_draws: int = 1,
        alpha_held: bool = False,
        warm_up: WarmUp = "rule",
        selection: Selection = "alpha",
        clip_norm: float = 5.0,
        table: str | None = None,
        recalibration_examples: int | None = 512,
        same_draws: bool = False,
        seed: int | None = None,
    ) -> None:
        rule, self._learn, self._penalty = rule or Softmax(), learn or Gradient(), penalty
        check_rule(rule, space, self._learn, penalty, alpha_draws, table, selection)
        shape = {"num_classes": num_classes, "in_channels": in_channels}
        super().__init__(
            Networks(space, image_size, {**shape, "channels": channels, "cells": cells}),
            rule,
            measure,
            alpha_held,
            alpha_start,
            schedule=schedule,
            recalibration_examples=recalibration_examples,
            seed=seed,
            ranges={
                "clip_norm": (clip_norm, "above 0 or inf"),
                "alpha_from": (alpha_from, "in [0, 1]"),
                "alpha_every": (alpha_every, "at least 1"),
                "alpha_draws": (alpha_draws, "at least 1"),
            },
        )
        self.automatic_optimization = False
        self.alpha_from = rule.alpha_from if alpha_from is None else alpha_from
        self.alpha_every = alpha_every
        self._alpha_draws, self._warm_up = alpha_draws, warm_up
        self.register_buffer("baseline", torch.zeros(int(isinstance(self._learn, Reward))))
        self.best_of = self._learn.best_of if isinstance(self._learn, Reward) else 1
        self.selection = selection
        if self.best_of > 1 or selection == "perturbation":
            self.federation_traits = _TRAITS | TRIES_CELLS
        self._architecture_optimizer = architecture_optimizer or _DARTS_ADAM
        kept = 0
        if architecture_state == "clients":
            kept = num_kept(self.new_architecture_optimizer, list(self.alphas.values()))
        self.register_buffer("kept_state", torch.zeros(kept))
        self.architecture_state = architecture_state
        self.signal = GradientSignal()
        self._optimizer = optimizer or _DARTS_SGD
        self._clip_norm, self._same_draws = clip_norm, same_draws
        self.table = None if table is None else NASBench201Table.read(table)

    # When α learns, and what clients send.

    def progress(self, round_index: int) -> float:
        """Return the fraction of the search before a round (epoch), in [0, 1]: 0 in the first, 1 in the last round.

        It is 1 in a search of a single round, so that α moves.
        """
        last = (self.trainer.max_epochs or 1) - 1
        return min(1.0, round_index / last) if last > 0 else 1.0

    def moves_alpha(self, round_index: int) -> bool:
        """True if α learns in this round; in earlier rounds only the weights learn."""
        return self.progress(round_index) >= self.alpha_from

    @property
    def is_federated(self) -> bool:
        """True if the run is federated: clients train, in this process or at remote sites."""
        return federation_options(self.trainer) is not None

    @property
    def is_stepped_by_server(self) -> bool:
        """True if the server steps α, with sums of gradients that clients send."""
        return self.is_federated and self.architecture_state == "server"

    @property
    def changes_at_clients(self) -> list[str]:
        """Names of the module's buffers that clients change and send to the server."""
        return [name for name in ("baseline", "kept_state") if getattr(self, name).numel()]

    def new_architecture_optimizer(self, params: Any) -> Optimizer:
        """Return a new optimizer of α, with the settings of a central search."""
        optimizer = self._architecture_optimizer(params)
        check_steps_once("model.architecture_optimizer", optimizer)
        return optimizer

    # Training: α on one half of a batch, then w on the other.

    @override
    def checked(self, batch: Any) -> Batch:
        if not (isinstance(batch, Mapping) and batch.keys() == {"train", "search"}):
            raise ConfigurationError(
                "a search needs two halves of the training data, one for the weights and one for the "
                "architecture: wrap the data in fl_lightning.FederatedDataModule (num_clients: 1 in a "
                "central run) and set its search_fraction, e.g. to 0.5"
            )
        check_image_size(self.networks.side, batch["train"][0])
        return batch["train"]  # type: ignore[no-any-return]

    def training_step(self, batch: Mapping[str, Batch], batch_idx: int) -> Tensor:
        """Compute the gradients of weights and α, then step both; return the loss of the weights."""
        self.checked(batch)
        optimizers: Any = self.optimizers()
        weights_optimizer, alpha_optimizer = optimizers
        draws = self._draws(batch_idx)
        is_turn = (batch_idx + 1) % self.alpha_every == 0
        moves_alpha = is_turn and self.moves_alpha(self.current_epoch)
        of_alpha = self._alpha_gradients(batch, draws, weights_optimizer) if moves_alpha else {}
        loss = self._move_weights(batch["train"], draws, weights_optimizer)
        if moves_alpha:
            self._move_alpha(of_alpha, draws, alpha_optimizer)
        return loss

    def _move_weights(self, batch: Batch, draws: int, optimizer: Any) -> Tensor:
        images, labels = batch
        step = self._search_step(draws, "weights", moves_alpha=False)
        mixed = self.mixed(self.point, step)
        if self._warm_up == "all" and not self.moves_alpha(self.current_epoch):
            equal = self.space.masked(torch.zeros_like(self.alpha)).softmax(1)
            mixed = EdgeWeights(equal, edges=mixed.edges)
        logits = self.network(images, mixed)
        loss = functional.cross_entropy(logits, labels)
        optimizer.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(optimizer, self._clip_norm, "norm")
        optimizer.step()
        right = accuracy(logits, labels)
        self.log("train/accuracy", right, on_step=False, on_epoch=True, batch_size=len(labels))
        return loss.detach()

    def _draws(self, batch_idx: int) -> int:
        """Return the seed of a training step's random draws: the same for all clients, or one per client."""
        if self._same_draws or not self.is_federated:
            return derive_seed(self.seed, "architecture", self.current_epoch, batch_idx)
        return int(torch.randint(2**62, ()))  # a client's stream is a function of round and client

    def _search_step(self, draws: int, purpose: str, *, moves_alpha: bool) -> SearchStep:
        generator = torch_generator(draws, purpose)
        progress = self.progress(self.current_epoch)
        return SearchStep(progress, generator, moves_alpha, self.space.none)

    def _move_alpha(self, gradients: Tensors, draws: int, optimizer: Any) -> None:
        step = self._search_step(draws, "alpha", moves_alpha=True)
        with torch.no_grad():
            before, weights = self.alpha.clone(), self.mixed(self.alphas, step)
        for name, param in self.alphas.items():
            param.grad = gradients[name]
        if not self.is_federated:
            self.signal.add(gradients["alpha"])
        recall(optimizer.optimizer, self.kept_state)
        optimizer.step()
        keep(optimizer.optimizer, self.kept_state)
        if not (self.is_stepped_by_server or self.alpha_held):  # there α is a sum of gradients
            self.alpha.data.copy_(self.rule.stepped(before, self.alpha.detach(), weights))

    def _alpha_gradients(
        self, batch: Mapping[str, Batch], draws: int, optimizer: Any
    ) -> dict[str, Tensor]:
        """Return the gradient of α, averaged over several draws of operations, by name."""
        seeds = [draws, *(derive_seed(draws, "draw", n) for n in range(1, self._alpha_draws))]
        drawn = [self._drawn_gradients(batch, seed, optimizer) for seed in seeds]
        return {
            name: reduce(torch.add, (one[name] for one in drawn)) / len(seeds) for name in drawn[0]
        }

    def _drawn_gradients(
        self, batch: Mapping[str, Batch], draws: int, optimizer: Any
    ) -> dict[str, Tensor]:
        if isinstance(self._learn, Reward):
            return self._reward_gradients(batch["search"], draws, self._learn)
        assert isinstance(self._learn, Gradient)
        of_weights: Optimizer = optimizer.optimizer
        here = partial(self._search_step, draws, "alpha", moves_alpha=True)
        params = dict(self.network.named_parameters())

        def loss(half: str, weights: Tensors, alphas: Tensors) -> Tensor:
            images, labels = batch[half]
            mixed = self.mixed(alphas, here())
            logits = functional_call(self.network, dict(weights), (images, mixed))
            return functional.cross_entropy(logits, labels)

        def search(weights: Tensors, alphas: Tensors) -> Tensor:
            found = loss("search", weights, alphas)
            penalty = self._penalty
            return penalty(found, self.expected_cost(alphas)) if penalty else found

        buffers = {n: of_weights.state[p].get("momentum_buffer") for n, p in params.items()}
        return architecture_gradient(
            partial(loss, "train"),
            search,
            {name: p.detach() for name, p in params.items()},
            self.point,
            WeightStep.of(of_weights),
            velocities={name: v for name, v in buffers.items() if v is not None},
            order=self._learn.order,
        )

    def _reward_gradients(self, batch: Batch, draws: int, learn: Reward) -> dict[str, Tensor]:
        """Return the gradient of α by REINFORCE, from the accuracy of a drawn architecture."""
        (images, labels), alphas = batch, leaves(self.point)
        logs = self.space.masked(alphas["alpha"]).log_softmax(1)
        drawn = drawn_operations(logs, 1, torch_generator(draws, "reward"))
        with torch.no_grad():
            logits = self.network(images, self.one_each(drawn[:, 0].tolist()))
        # a NaN would silently count as a wrong answer
        reward = torch.where(logits.isfinite().all(), accuracy(logits, labels), torch.nan)
        loss = learn.loss(
            float(reward),
            logs.gather(1, drawn.to(logs.device)).sum(),
            -(logs.exp() * logs).sum(),
            self.baseline,
        )
        return gradients_of(loss, alphas)

    def on_train_start(self) -> None:
        """Set this round's learning rate; drop an architecture that an earlier end of the search selected."""
        self.chosen = None
        self._schedule_to(self.current_epoch)

    def on_train_epoch_end(self) -> None:
        """Set the learning rate of the next round."""
        self._schedule_to(self.current_epoch + 1)

    def _schedule_to(self, round_index: int) -> None:
        schedule: Any = self.lr_schedulers()  # None at a site, which gets its rates from the server
        while schedule is not None and schedule.last_epoch < round_index:
            schedule.step()

    # Set up.

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Return the optimizers of weights and α; clients use plain SGD for α if the server steps it."""
        weights = self._optimizer(list(self.network.parameters()))
        check_weights_optimizer(weights)
        order = self._learn.order if isinstance(self._learn, Gradient) else "first"
        if order != "first" and WeightStep.of(weights) is None:
            raise ConfigurationError(
                f"model.learn with order {order} computes the next step of plain SGD, and model.optimizer is "
                f"{type(weights).__name__}: use torch.optim.SGD without dampening and nesterov, or "
                "order: first"
            )
        alphas = list(self.alphas.values())
        own: Optimizer = self.new_architecture_optimizer(alphas)
        if self.is_stepped_by_server:
            own = torch.optim.SGD(alphas, lr=self.local_lr)
        return [weights, own], [self._scheduler(weights)]

    @property
    def local_lr(self) -> float:
        """Learning rate of the clients' plain SGD on α; the server divides their updates by it to get gradients."""
        return float(self.new_architecture_optimizer(list(self.alphas.values())).defaults["lr"])

    def configure_callbacks(self) -> list[Callback]:
        """Return the callback that reports the search and adds the server's step of α; return none at a site."""
        options = federation_options(self.trainer)
        return [] if options is not None and options.is_at_site else [SearchReport()]
