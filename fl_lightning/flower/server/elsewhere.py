"""Data module of a server whose clients' examples are at sites: the server knows only their numbers.

Below: checks of a configuration before any site is contacted, and the calibration of a mask or a head on examples
at sites. Clients send sums over their examples, which are yielded in the order of the clients, so that the result
is bit-identical to a simulation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, final

import numpy as np
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset
from typing_extensions import override

from fl_lightning.client.work import GroupWork
from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.traits import conflicts
from fl_lightning.data.federated import MAX_CLIENTS_COUNTED, FederatedDataModule
from fl_lightning.data.shards import FlatShards
from fl_lightning.data.summary import PartitionSummary
from fl_lightning.federation import (
    ExampleOwners,
    LocalWork,
    Options,
    WorkPlan,
    network_parts,
    shown_by,
)
from fl_lightning.flower.messages import Order
from fl_lightning.flower.packing import (
    STATISTICS,
    SUMS,
    model_tensors,
    named_sums,
    of_stage,
)
from fl_lightning.flower.server.correspondence import Part, in_order
from fl_lightning.flower.server.greeting import ClientsAtSites, Content
from fl_lightning.nas.collapse import StopAtCollapse
from fl_lightning.nas.one_shot import OneShot
from fl_lightning.nas.shared_weights import SharedWeights
from fl_lightning.nas.sub_networks.evaluation import (
    Sums,
    TrainingExamples,
    has_statistics,
    sums_of_owners,
)
from fl_lightning.server.server import as_aggregator
from fl_lightning.sparsity.sensitivity.protocol import Scores

_AT_SITES = (
    "clients' examples are at sites, and something of this configuration wants to read them at the server "
    "(an evaluation on clients' examples, a head that is fitted): leave it out over a network"
)


class DataElsewhere(FederatedDataModule):
    """Data module of a server: clients' examples are at sites, the evaluation loaders at the server.

    If the server has no test set, a test asks the sites to evaluate the clients' test examples, as far as
    `ClientEvaluation` is there and their policies let metrics leave.

    Args:
        data: data module of the configuration; its training set is never read.
        num_examples: number of examples of every client.
        held_out: number of held-out examples of every client, by stage (``validation``, ``test``).
        batch_size: size of clients' local batches.
        drop_last: True if clients leave out a smaller last batch.
    """

    def __init__(
        self,
        data: FederatedDataModule,
        *,
        num_examples: Mapping[int, int],
        held_out: Mapping[str, Mapping[int, int]],
        batch_size: int,
        drop_last: bool,
    ) -> None:
        super().__init__(
            data.source,
            num_clients=len(num_examples),
            seed=data.seed,
            transforms=data.transforms,  # of the server's own validation
        )
        if sorted(num_examples) != list(range(len(num_examples))):
            raise ConfigurationError(
                f"the sites' clients must be numbered from 0 without a gap, got {sorted(num_examples)}: "
                "set clients in each site.yaml"
            )
        self._shards = _shards_of(num_examples)
        self._held_out = {stage: _shards_of(sizes) for stage, sizes in held_out.items()}
        self._size, self._drops = batch_size, drop_last
        if any(held_out["test"].values()):
            self.test_dataloader = self._test_sets  # type: ignore[method-assign]

    @property
    def training(self) -> NoReturn:
        """Raise ConfigurationError: the data are at sites."""
        raise ConfigurationError(_AT_SITES)

    def _clients_test_set(self) -> DataLoader[Any]:
        """Return a loader without a batch, so that the clients' sites test and nothing is tested here."""
        return DataLoader(_Nothing())

    def _read(self, *, augmented: bool) -> Callable[[Tensor], Any]:
        """Return a reader that always refuses: the data are at sites."""

        def refuse(indices: Tensor) -> Any:
            raise ConfigurationError(_AT_SITES)

        return refuse

    @property
    def clients(self) -> FlatShards:
        """Shards with the number of examples of each client, without indices."""
        return self._shards

    def held_out(self, stage: str) -> FlatShards:
        """Return shards with the number of examples that each client holds out for a stage."""
        return self._held_out[stage]

    @property
    def batch_size(self) -> int:
        """Examples per local batch."""
        return self._size

    @property
    def drop_last(self) -> bool:
        """True if clients leave out a smaller last batch."""
        return self._drops

    @property
    def draw_weights(self) -> None:
        """No weights: sites draw their own batches."""
        return

    def summary(self) -> PartitionSummary:
        """Return a summary of the clients' sizes, without classes, which only sites know."""
        return PartitionSummary.of(self.clients, None, max_clients=MAX_CLIENTS_COUNTED)


class _Nothing(IterableDataset[Any]):
    """A stream that ends at once; Lightning skips an evaluation only if the length is known to be 0."""

    def __iter__(self) -> Iterator[Any]:
        return iter(())


def _shards_of(sizes: Mapping[int, int]) -> FlatShards:
    """Return shards with these numbers of examples, and no indices: a site may claim any number."""
    lengths = np.array([sizes[client] for client in sorted(sizes)], np.int64)
    shards = FlatShards(np.empty(0, np.int32), np.zeros_like(lengths))
    shards.num_examples = lengths
    return shards


@final
class WorkElsewhere(WorkPlan):
    """Plan of a server: which clients train in which round. Sites draw examples and steps.

    Args:
        data: data module of the server.
        seed: seed of the run.
    """

    def __init__(self, data: FederatedDataModule, seed: int) -> None:
        super().__init__(data, LocalWork(None, None, accumulate=1, seed=seed))
        self._seed = seed

    @override
    def of(self, clients: Sequence[int], rounds: int | Sequence[int]) -> GroupWork:
        # no index of an example: their number is what a site claims
        chosen, nothing = np.array(clients, np.int64), np.empty(0, np.int64)
        return GroupWork(
            client_ids=chosen,
            num_examples=self.num_examples[chosen],
            order=torch.from_numpy(nothing),
            sizes=nothing,
            num_steps=np.zeros_like(chosen),
            rounds=np.broadcast_to(np.array(rounds, np.int64), chosen.shape),
            root_seed=self._seed,
        )


SCALED = "16-mixed"  # a precision


def check_over_network(trainer: Trainer, module: Any, data: Any, options: Options) -> None:
    """Raise if options have no meaning, or a different one, over a network.

    Raises:
        ConfigurationError: naming all of them.
    """
    problems = list(conflicts(network_parts(trainer, module, options)))
    if trainer.world_size > 1:
        problems.append(
            f"trainer.devices: the server is one process, got {trainer.world_size}: set devices to 1; "
            "sites have devices of their own"
        )
    problems += _problems_of_searches(trainer, module, options)
    if isinstance(data, FederatedDataModule):
        problems += unknown_elsewhere(data)
    else:
        problems.append(
            "data: over a network the configuration is that of a federation: wrap the data module in "
            "fl_lightning.FederatedDataModule"
        )
    if problems:
        raise ConfigurationError("\n".join(problems))


def _problems_of_searches(trainer: Trainer, module: Any, options: Options) -> Iterator[str]:
    """Yield an error for each part of a search that reads examples, or shows single clients that are hidden."""
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    if any(isinstance(each, StopAtCollapse) and each.unprotected for each in callbacks):
        yield "StopAtCollapse reads clients' examples, which are at sites: set its eigenvalue to false"
    hidden = options.client_privacy is not None and options.client_privacy.clients_add_noise
    if as_aggregator(options.aggregator).protection is not None:
        hidden = True
    if hidden and isinstance(module, OneShot) and has_statistics(module.network):
        yield (
            "model OneShot: sums of clients' activations, for batch norm statistics, would reach the server in "
            "clear, and this run hides what single clients send: use a space without batch norm "
            "(fl_lightning.nas.ViT), or Mean without LocalDP and DistributedDP"
        )


def unknown_elsewhere(data: FederatedDataModule) -> list[str]:
    """Return an error for each option that needs the examples of all clients in one place."""
    weight = "data.update_weight: sites report how many examples their clients have, and no sums of a column: "
    problems = [] if data.update_weight is None else [f"{weight}leave update_weight out"]
    return problems + [
        f"data.transforms {type(each).__name__} learns from all clients' examples, which are at sites: use "
        "Normalize with numbers that are known, in the configurations of server and sites"
        for each in data.transforms
        if shown_by([each])
    ]


VALUES = "stage/values/"


class CalibrationAtSites:
    """Collects sums for a calibration from clients at sites; a missing answer ends the run.

    Args:
        remote: clients of the run.
        trainer: Trainer of the server.
        skips_failures: whether batch norm statistics are computed without the clients that send no valid sums.
    """

    def __init__(
        self, remote: ClientsAtSites, trainer: Trainer, *, skips_failures: bool = False
    ) -> None:
        self._remote, self._trainer = remote, trainer
        self._skips_failures = skips_failures

    def scores(
        self, values: Mapping[str, Tensor], ids: tuple[int, int], asked: Mapping[int, int]
    ) -> Iterator[Scores]:
        """Yield each client's sensitivity scores, in the order of ``asked``.

        Args:
            values: parameters that are scored, by name.
            ids: version of the mask, and round of its calibration.
            asked: number of examples to score, by client.
        """
        tensors = model_tensors(self._trainer.lightning_module, without=values.keys())
        tensors |= {f"{VALUES}{name}": value.detach().cpu() for name, value in values.items()}
        options = {"what": "scores", "version": ids[0], "round": ids[1]}
        like = {name: value.shape for name, value in values.items()}
        for client, num_examples, sums in self._ask(options, tensors, asked):
            if {name: tensor.shape for name, tensor in sums.items()} != like:
                raise ConfigurationError(self._of(client, "its scores are not of these entries"))
            if not all(map(_are_scores, sums.values())):
                raise ConfigurationError(self._of(client, "its scores are no finite numbers ≥ 0"))
            if num_examples != asked[client]:
                raise ConfigurationError(
                    self._of(
                        client, f"it scored {num_examples} examples instead of {asked[client]}"
                    )
                )
            yield Scores(sums, num_examples)

    def sums(self, clients: Sequence[int], like: Tensor) -> Iterator[Tensor]:
        """Yield the clients' sums for the head, in the order given.

        Args:
            clients: ids of the clients.
            like: tensor with the shape and dtype of the sums.
        """
        form = like.shape, like.dtype
        tensors = model_tensors(self._trainer.lightning_module)
        for client, _, sums in self._ask({"what": "head"}, tensors, dict.fromkeys(clients, 0)):
            told = sums.get("head")
            if told is None or (told.shape, told.dtype) != form or not told.isfinite().all():
                raise ConfigurationError(self._of(client, "it sent no finite sums for the head"))
            yield told

    def statistics(self, asked: Mapping[int, int]) -> Iterator[list[Sums]]:
        """Yield each client's batch norm sums of the networks that an evaluation runs, in the order of ``asked``.

        Args:
            asked: number of examples to read, by client.
        """
        module: Any = self._trainer.lightning_module
        blank = _blank_sums(self._trainer, module)
        names = set(named_sums(blank))
        options, is_lacking = {"what": STATISTICS}, self._skips_failures
        tensors, num_yielded = model_tensors(module), 0
        for client, num_examples, told in self._ask(options, tensors, asked, is_lacking=is_lacking):
            try:
                if num_examples != asked[client] or told.keys() != names:
                    raise ValueError(f"it sent no sums of {asked[client]} examples")
                found = [of_stage(f"{at}/", told) for at in range(len(blank))]
                for own, like in zip(found, blank, strict=True):
                    _check_sums(own, like, asked[client] / _NUM_BLANK)
            except ValueError as error:
                self._lack(client, str(error), is_lacking=is_lacking)
            else:
                num_yielded += 1
                yield found
        if asked and not num_yielded:
            raise ConfigurationError("calibration: no client sent sums for batch norm statistics")

    def _ask(
        self,
        options: Mapping[str, Any],
        tensors: Mapping[str, Tensor],
        asked: Mapping[int, int],
        *,
        is_lacking: bool = False,
    ) -> Iterator[tuple[int, int, dict[str, Tensor]]]:
        """Yield the id, the number of examples and the sums of each client, in order; some may be lacking."""
        about = {**options, "num_clients": len(self._remote.site_of)}

        def content(some: tuple[int, ...]) -> Content:
            return about | {"examples": [[client, asked[client]] for client in some]}, tensors

        orders = self._remote.orders("calibrate", asked, content, self._trainer.current_epoch)
        for part in in_order(list(asked), self._parts(orders, is_lacking=is_lacking)):
            if part.answer is None:
                self._lack(part.client, part.reason, is_lacking=is_lacking)
            else:
                yield part.client, part.answer.num_examples, of_stage(SUMS, part.tensors)

    def _lack(self, client: int, reason: str, *, is_lacking: bool) -> None:
        if not is_lacking:
            raise ConfigurationError(self._of(client, reason))
        rank_zero_warn(f"left out: {self._of(client, reason)}")

    def _parts(self, orders: Mapping[str, Order], *, is_lacking: bool) -> Iterator[Part]:
        for reply in self._remote.correspondence.ask(orders):
            if reply.answer is None and not is_lacking:
                raise ConfigurationError(
                    f"calibration: site {reply.site}: {reply.reason}. Start the run again"
                )
            yield from reply.parts

    def _of(self, client: int, what: str) -> str:
        return f"calibration: client {client} at site {self._remote.site_of[client]}: {what}"


_NUM_BLANK = 2  # images


def _blank_sums(trainer: Trainer, module: SharedWeights) -> list[Sums]:
    """Return the batch norm sums over blank images of the networks that an evaluation runs."""
    images = torch.zeros(module.networks.images(_NUM_BLANK).shape)
    batch = images, torch.zeros(_NUM_BLANK, dtype=torch.long)
    all_of_them = FlatShards.of([range(_NUM_BLANK)])
    owners = ExampleOwners(all_of_them, lambda _: batch, _NUM_BLANK)
    examples = TrainingExamples(owners, {0: _NUM_BLANK}, seed=0)
    with torch.no_grad():
        shown = list(module.shown.values())
    [found] = sums_of_owners(trainer, module.network, shown, examples, [0])
    return found


def _check_sums(told: Mapping[str, Tensor], blank: Sums, ratio: float) -> None:
    """Check a client's sums.

    Args:
        told: sums of one sub-network.
        blank: sums of the same sub-network over blank images.
        ratio: number of examples of the sums, as a multiple of the blank images.

    Raises:
        ValueError: if the sums are of other layers or numbers of examples, or no statistics follow from them.
    """
    if told.keys() != blank.keys():
        raise ValueError("its sums are of other batch norms")
    for name, own in blank.items():
        sums = told[name]
        if (sums.shape, sums.dtype) != (own.shape, own.dtype) or not sums.isfinite().all():
            raise ValueError(f"its sums of {name} are not {tuple(own.shape)} finite float64")
        if not torch.equal(sums[0], own[0] * ratio):
            raise ValueError(
                f"its sums of {name} are of {sums[0, 0]:g} numbers a channel, and square images of "
                f"model.image_size have {own[0, 0] * ratio:g}"
            )
        mean, square = sums[1:] / sums[0]
        if (square * (1 + 1e-9) < mean.square()).any() or not square.float().isfinite().all():
            raise ValueError(
                f"its sums of {name} give a variance below 0, or numbers that are too large"
            )


def _are_scores(told: Tensor) -> bool:
    if told.dtype not in (torch.float32, torch.float64):
        return False
    return bool((told.isfinite() & (told >= 0)).all())
