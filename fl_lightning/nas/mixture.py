"""`CellMixture`: a network of all architectures of a space of cells, with architecture parameters α.

A rule of relaxation weighs the operations of every edge by α (`mixed`); an architecture runs one operation
per edge in the same weights (`fixed`). Training is in `Supernet`, which inherits from this class.

Batch norm uses the statistics of the batch during the search, because running statistics would mix
architectures. An evaluation uses statistics of training examples, or those of its own batch if updates are
protected, because clients then send no sums.

Instead of the largest α the accuracy of the shared weights can select an architecture when a search ends: that
of drawn architectures (`choose_best`), or that of the mixture without an operation (`choose_by_perturbation`):

    in random order of the edges:   keep o* = argmin_o accuracy(mixture without o on the edge), remove the others
    in a space with fewer edges:    keep the edges of a node without which the accuracy is lowest

Source: Wang et al. 2021, ICLR, "Rethinking architecture selection in differentiable NAS", Algorithm 1 (DARTS-PT).
Differs: accuracy is on training examples, as sums over clients; weights do not train between decisions; of
edges none is removed before all are judged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.seeds import torch_generator
from fl_lightning.nas.alpha_gradients import AlphaGradient, Penalty, Reward, Tensors
from fl_lightning.nas.cost.latency import latency_of_search
from fl_lightning.nas.relaxation import (
    EdgeWeights,
    PartialChannels,
    Relaxation,
    SearchStep,
    SinglePath,
    gumbel_noise,
    weights_of,
)
from fl_lightning.nas.sampled_paths import BinaryGates
from fl_lightning.nas.search.proxy_scores import ZeroCostStart
from fl_lightning.nas.shared_weights import Batch, SharedWeights
from fl_lightning.nas.spaces.cells import CellSpace, RowCosts, RowSpace, cost_table
from fl_lightning.nas.spaces.nas_bench_201 import NASBench201
from fl_lightning.nas.spaces.space import Architecture, Networks
from fl_lightning.nas.sub_networks.evaluation import batch_norms, training_accuracies
from fl_lightning.reports.progress import federation_of
from fl_lightning.server.server import as_aggregator

Selection = Literal["alpha", "perturbation"]


class CellMixture(SharedWeights):
    """Base of `Supernet`: one network holds all architectures of a cell space in shared weights, and evaluates them.

    Args:
        networks: networks of the space of the search.
        rule: rule of relaxation; this and the next three are arguments of `Supernet`.
        options: arguments of `SharedWeights`.

    Attributes:
        alpha: logits of the operations, shape (num_rows, num_operations).
        beta: logits of the edges, shape (num_rows,), for PC-DARTS; None for other rules.
        choice: index of the option of every decision, of the architecture that accuracy has chosen; all -1
            if α selects it.
        latency: latency table that the penalty uses; None if it uses a counted cost.
        started_from: architecture of the zero-cost start; None for a random start.

    Raises:
        ConfigurationError: for both `alpha_start` and `alpha_held`.
    """

    choice: Tensor

    def __init__(
        self,
        networks: Networks,
        rule: Relaxation,
        measure: str,
        alpha_held: bool,
        alpha_start: ZeroCostStart | None,
        **options: Any,
    ) -> None:
        super().__init__(networks=networks, **options)
        space: Any = networks.space
        self.space: CellSpace = space
        self.rule, self.alpha_held = rule, alpha_held
        self.latency = latency_of_search(measure, networks)
        self._measure = measure if self.latency is None else "latency_ms"
        self.network = space.network(rule.edge, affine=False, **networks.shape)
        for _, norm in batch_norms(self.network):
            norm.track_running_stats = False
            norm.running_mean = norm.running_var = norm.num_batches_tracked = None
        start = 1e-3 * torch.randn(
            space.num_rows, len(space.operations), generator=torch_generator(self.seed, "alpha")
        )
        self.started_from: Architecture | None = None
        if alpha_start is not None:
            if alpha_held:
                raise ConfigurationError(
                    "model.alpha_start sets alpha, and model.alpha_held keeps networks at alpha 0, where only "
                    "gradients decide: leave one of them out"
                )
            start = start + alpha_start.alpha(networks, rule.edge, self.seed)
            self.started_from = space.derive(start)
        self.alpha = nn.Parameter(start)
        self.beta = nn.Parameter(torch.zeros(space.num_rows)) if rule.has_beta else None
        # a buffer: it comes back from the process that trained
        self.register_buffer("choice", torch.full((len(space.decisions),), -1))
        self._measured: dict[str, Tensor] = {}  # α and β of the networks with statistics

    @property
    def alphas(self) -> dict[str, Tensor]:
        """Architecture parameters by name: logits α of operations, and logits β of edges if the rule has them."""
        both = {"alpha": self.alpha, "beta": self.beta}
        return {name: tensor for name, tensor in both.items() if tensor is not None}

    @property
    def point(self) -> dict[str, Tensor]:
        """Values of α and β, by name and detached, that the search uses in a step; zeros if ``alpha_held``."""
        values = {name: tensor.detach() for name, tensor in self.alphas.items()}
        if self.alpha_held:
            return {name: torch.zeros_like(value) for name, value in values.items()}
        return values

    @property
    def chosen(self) -> Architecture | None:
        """Architecture selected by accuracy at the end of the search; None if the largest α selects it."""
        options = self.choice.tolist()
        return None if min(options) < 0 else self.space.architecture(options)

    @chosen.setter
    def chosen(self, architecture: Architecture | None) -> None:
        self.choice[:] = -1 if architecture is None else torch.tensor(architecture.choices)

    @property
    def architecture(self) -> Architecture:
        """Current architecture: the one selected by accuracy if there is one, otherwise the one of the largest α."""
        beta = None if self.beta is None else self.beta.detach()
        return self.chosen or self.space.derive(self.alpha.detach(), beta)

    @property
    def shares(self) -> Tensor:
        """Probability of each operation on each edge (softmax of α), shape (num_rows, num_operations)."""
        return self.space.masked(self.alpha.detach()).softmax(1)

    @cached_property
    def costs(self) -> dict[str, RowCosts]:
        """Cost tables of this space's networks, by measure (``flops``, …; ``latency_ms`` with a latency file)."""
        costs: dict[str, RowCosts] = {**cost_table(self.networks)}
        return costs if self.latency is None else {**costs, "latency_ms": self.latency.rows}

    @property
    def shown(self) -> dict[str, EdgeWeights]:
        """Edge weights to evaluate: the current cell's, and the mixture's unless the rule draws operations."""
        mixed = {} if self.rule.draws else {"mixed": self.mixed(self.point, SearchStep())}
        return {**mixed, "cell": self.fixed(self.architecture)}

    def forward(self, images: Tensor, architecture: Architecture | None = None) -> Tensor:
        """Return logits (B, num_classes) of one architecture in the shared weights; the current one by default."""
        logits: Tensor = self.network(images, self.fixed(architecture or self.architecture))
        return logits

    def fixed(self, architecture: Architecture) -> EdgeWeights:
        """Return edge weights under which the network runs a single architecture."""
        return self.one_each(self.space.operations_of(architecture))

    def one_each(self, operations: Sequence[int]) -> EdgeWeights:
        """Return one-hot edge weights: each edge runs one operation, given by its index."""
        edges = None if self.beta is None else self.space.edge_shares(self.beta.detach())
        return replace(weights_of(operations, self.alpha), edges=edges)

    def mixed(self, alphas: Tensors, step: SearchStep) -> EdgeWeights:
        """Return the edge weights that the relaxation rule computes from α (and β)."""
        weights = self.rule.weights(self.space.masked(alphas["alpha"]), step)
        beta = alphas.get("beta")
        return weights if beta is None else replace(weights, edges=self.space.edge_shares(beta))

    def expected_cost(self, alphas: Tensors) -> Tensor:
        """Return the expected cost, a scalar, of an architecture drawn with probabilities softmax(α)."""
        shares = self.space.masked(alphas["alpha"]).softmax(1)
        return self.costs[self._measure].expected(shares)

    def choose_best(self, count: int) -> str:
        """Draw architectures with probabilities softmax(α), and select the most accurate as `chosen`.

        All processes call this.

        Args:
            count: number of draws; with 1 nothing is chosen.

        Returns:
            Description of the choice; empty if nothing is chosen, e.g. without training examples.
        """
        if count == 1:
            return ""
        generator, alpha = torch_generator(self.seed, "best of"), self.alpha.detach()
        draws = (alpha + gumbel_noise(alpha, generator) for _ in range(count))
        drawn = list(dict.fromkeys(self.space.derive(logits) for logits in draws))
        found = self._accuracies([self.fixed(one) for one in drawn])
        if found is None:
            return ""
        accuracy, number = max((value, -n) for n, value in enumerate(found))
        self.chosen = drawn[-number]
        return f"the best drawn one (accuracy {accuracy:.3f})"

    def choose_by_perturbation(self) -> str:
        """Select, edge by edge, the operation whose removal lowers the mixture's accuracy most, and set `chosen`."""
        space, alpha, mixed = self.space, self.alpha.detach(), self.mixed(self.point, SearchStep())
        factors, rows = mixed.operations.clone(), range(space.num_rows)
        is_choice = space.masked(torch.zeros_like(alpha)) == 0
        keeps_all_edges = isinstance(space, RowSpace)
        if not keeps_all_edges and space.none >= 0:
            is_choice[:, space.none] = False
        order = torch.randperm(len(rows), generator=torch_generator(self.seed, "perturbation"))
        for row in order.tolist():
            options = is_choice[row].nonzero()[:, 0].tolist()
            without = factors.repeat(len(options), 1, 1)
            without[range(len(options)), row, options] = 0
            found = self._accuracies([replace(mixed, operations=one) for one in without])
            if found is None:
                return ""
            # of operations whose removal costs the same accuracy, the one with the largest α
            missed = zip(found, (-alpha[row, options]).tolist(), options, strict=True)
            factors[row] = functional.one_hot(torch.tensor(min(missed)[2]), alpha.shape[1])
        logits = factors
        if not keeps_all_edges:
            edges = torch.ones(len(rows)).to(factors) if mixed.edges is None else mixed.edges
            others = 1 - torch.eye(len(rows)).to(factors)
            found = self._accuracies(
                [EdgeWeights(factors * kept[:, None], edges=edges * kept) for kept in others]
            )
            assert found is not None, "the examples are those of before"
            # of edges whose removal costs the same accuracy, those with the largest weights
            weights = ((space.masked(alpha).softmax(1) * factors).sum(1) * edges).tolist()
            least_missed = sorted(rows, key=lambda row: (-found[row], weights[row]))
            places = torch.zeros(len(rows))
            places[least_missed] = torch.arange(len(rows)).to(places) / len(rows)
            logits = factors * (1 + places).to(factors)[:, None]
        self.chosen = space.derive(logits)
        return "of the operations that the mixture misses most"

    def _accuracies(self, networks: Sequence[EdgeWeights]) -> list[float] | None:
        """Return each network's accuracy on training examples of all clients; None if there are no examples."""
        if (examples := self._training_examples()) is None:
            return None
        return training_accuracies(self.trainer, self.network, networks, examples)

    # Evaluation.

    @property
    def is_protected(self) -> bool:
        """True if updates are private or securely summed, so that clients send no batch norm statistics."""
        federation = federation_of(self.trainer)
        return federation is not None and protector(federation) is not None

    def recalibrate(self) -> None:
        """Recompute batch norm statistics for the networks to evaluate, unless updates are protected."""
        self._measured = {name: tensor.detach().clone() for name, tensor in self.alphas.items()}
        self._sums = {}
        if not self.is_protected:
            super().recalibrate()

    def statistics(self) -> dict[str, Tensor]:
        """Return the sums for batch norm statistics, and the values of α and β at which they were computed."""
        return super().statistics() | {f"at/{n}": own for n, own in self._measured.items()}

    def use_statistics(self, told: Mapping[str, Tensor]) -> None:
        """Use, in the next evaluation, sums for batch norm statistics from the `statistics` of another process."""
        at = {name: own for name, own in told.items() if name.startswith("at/")}
        self._measured = {n.removeprefix("at/"): own.to(self.device) for n, own in at.items()}
        super().use_statistics({name: own for name, own in told.items() if name not in at})

    def normalised(self, name: str) -> AbstractContextManager[None]:
        """Return a context in which batch norms use the statistics of one evaluated network, by its name in `shown`.

        They use those of the batch if α is not the one at which statistics were computed: a personal α
        selects another network.
        """
        known, now = self._measured, self.alphas
        is_measured = known.keys() == now.keys() and all(
            torch.equal(known[key], tensor.detach()) for key, tensor in now.items()
        )
        return super().normalised(name) if is_measured else nullcontext()

    def on_predict_epoch_start(self) -> None:
        """Recompute batch norm statistics before predictions, because a search keeps no running statistics."""
        self.recalibrate()

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return class probabilities (B, num_classes) of the current architecture."""
        with self.normalised("cell"):
            logits: Tensor = self(batch[0])
        return logits.softmax(dim=1)


def protector(federation: Any) -> Any:
    """Return the privacy method or secure aggregator that hides single updates from the server; None if neither."""
    given = federation.aggregator
    if federation.privacy is not None or given is None:
        return federation.privacy
    return given if as_aggregator(given).protection is not None else None


def check_rule(
    rule: Relaxation,
    space: CellSpace,
    learn: AlphaGradient,
    penalty: Penalty | None,
    alpha_draws: int,
    table: str | None,
    selection: Selection,
) -> None:
    """Raise ConfigurationError if options of a supernet search exclude each other."""
    if table is not None and not isinstance(space, NASBench201):
        raise ConfigurationError(
            f"model.table has results of NAS-Bench-201, and model.space is {space.name}: leave the table out"
        )
    if isinstance(rule, PartialChannels) and not space.has_shapes:
        raise ConfigurationError(
            f"model.rule PartialChannels needs layers with fewer channels, and those of {space.name} are made by your "
            "functions: use Softmax, HardGumbel or another rule"
        )
    if isinstance(rule, SinglePath) and not isinstance(learn, Reward):
        raise ConfigurationError(
            "model.rule SinglePath has no gradient of alpha, which would not change: set model.learn to "
            "fl_lightning.nas.Reward, or use BinaryGates or HardGumbel"
        )
    if isinstance(learn, Reward) and penalty is not None:
        raise ConfigurationError(
            f"model.penalty {type(penalty).__name__} is part of a loss, and model.learn Reward uses accuracy instead of "
            "a loss: leave one of them out"
        )
    if selection == "perturbation" and (rule.draws or isinstance(learn, Reward)):
        part = type(rule if rule.draws else learn).__name__
        raise ConfigurationError(
            f"model.selection perturbation removes operations from the mixture of all, and {part} runs drawn "
            "networks: use Softmax or PartialChannels with Gradient, or selection: alpha"
        )
    if alpha_draws > 1 and (not rule.draws or isinstance(rule, BinaryGates)):
        why = "shifts logits after every draw" if rule.draws else "draws nothing"
        raise ConfigurationError(
            f"model.alpha_draws is {alpha_draws}, and model.rule {type(rule).__name__} {why}: set it to 1"
        )
