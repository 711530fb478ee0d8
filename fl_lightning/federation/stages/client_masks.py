"""Clients that each train a part of the model: by masks of their own, or by adapters of different ranks.

Masks come from a callback of the Trainer. With adapters, the server may change frozen weights:

    down:     client i starts from the first r_i rows of A and columns of B. The other entries are 0, and stay
              0: the gradient of an entry of A is a multiple of entries of B that are 0, and vice versa
    close:    W ← W + the aggregator's change of each layer

    Entries that are 0 are neither sent nor counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
import torch
from lightning.pytorch import Trainer
from torch import Tensor

from fl_lightning.client.devices import Devices
from fl_lightning.client.work import GroupWork
from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.space import Space
from fl_lightning.core.traits import NO_TRAITS, Trait, Traits
from fl_lightning.core.update import GlobalModel
from fl_lightning.federation.options import Options
from fl_lightning.federation.round_record import RoundRecord
from fl_lightning.federation.run import Run
from fl_lightning.federation.stage import LocalTraining, Stage, Start, Upload
from fl_lightning.server.adapters import AdapterAggregator, Pair
from fl_lightning.server.server import fedavg_optimizer
from fl_lightning.updates.message import bytes_down, bytes_up

# Maps a client to its mask, True where entries may change; called while the module holds the client's start
MaskOfClient: TypeAlias = Callable[[int], Mapping[str, Tensor]]
OWN_MASKS = Traits(breaks={Trait.ONE_MASK: "gives clients masks of their own"})


@runtime_checkable
class HasClientMasks(Protocol):
    """A callback that may give each client its own mask of the parameters that it trains.

    The optimizer's masks must contain the masks of all clients: they define the coordinates of the
    run's vectors. A client sends only the entries of its own mask.
    """

    def client_masks(self) -> MaskOfClient | None:
        """Return a function that maps a client to its mask; None if all clients have the optimizer's masks."""


def client_masks(trainer: Trainer) -> MaskOfClient | None:
    """Return a callback's function from a client to its mask; None if all clients have the optimizer's masks."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        masks = callback.client_masks() if isinstance(callback, HasClientMasks) else None
        if masks is not None:
            return masks
    return None


class MaskedClients(Stage):
    """Trains every client under its own mask: only entries where the mask is True may change."""

    traits = OWN_MASKS
    one_at_a_time = "clients have masks of their own"

    def __init__(self, masks: MaskOfClient) -> None:
        self._masks = masks

    def enter(self, run: Run) -> None:
        """Keep the run's sequential engine, which trains clients under their masks."""
        self._local = run.local

    @contextmanager
    def steps(self, training: LocalTraining) -> Iterator[None]:
        """Set the client's mask before its local steps; it is computed while the module holds the server's model."""
        if training.counts:
            model = training.start.present
            self._local.restore(model)
            training.masks = self._masks(training.work.client_id)
            active = self._local.space.coordinates(training.masks)
            training.num_bytes = bytes_down(model.params, model.buffers, active)
        yield


_A, _B = ".lora_A.", ".lora_B."


class AdapterRounds(Stage):
    """Stage for aggregators of LoRA adapters: truncates adapters to clients' ranks, and updates frozen weights."""

    traits = NO_TRAITS  # the aggregator has them

    def __init__(self, aggregator: AdapterAggregator, options: Options) -> None:
        self._aggregator, self._options = aggregator, options
        self._name = f"federation.aggregator {type(aggregator).__name__}"
        if aggregator.changes_base:
            self.one_at_a_time = "the server changes the frozen weights (federation.aggregator)"

    def enter(self, run: Run) -> None:
        """Find the module's LoRA adapters; raise if a server optimizer would change them."""
        if self._options.server_optimizer is not fedavg_optimizer:
            raise ConfigurationError(
                f"{self._name} computes the new adapters itself, and a server optimizer would change them: leave "
                "federation.server_optimizer out"
            )
        self._module = run.module
        self._aggregator.tiers = self._tiers(run)
        self.place(run.local.space, None)

    def _tiers(self, run: Run) -> list[int] | None:
        """Return each client's index into the adapter ranks, slowest device first; None without simulated devices."""
        ranks, devices = self._aggregator.ranks, self._options.devices
        if ranks is None or not isinstance(devices, Devices):
            return None
        num_clients = len(run.trainer.datamodule.clients)  # type: ignore[attr-defined]
        seconds = devices.speeds.seconds_per_step(num_clients, self._options.seed)
        places = np.argsort(np.argsort(-seconds, kind="stable"))
        return (places * len(ranks) // num_clients).tolist()  # type: ignore[no-any-return]

    def place(self, space: Space, positions: Tensor | None) -> None:
        """Find where the factors of the LoRA adapters are in the exchanged vectors."""
        sizes = [math.prod(shape) for shape in space.shapes]
        begins = [sum(sizes[:place]) for place in range(len(sizes))]
        places = [slice(begin, begin + size) for begin, size in zip(begins, sizes, strict=True)]
        found = dict(zip(space.names, zip(places, space.shapes, strict=True), strict=True))
        pairs, self._layers = [], []
        for name, (place, shape) in found.items():
            if _A in name:
                other = found.get(name.replace(_A, _B))
                layer: Any = self._module.get_submodule(name.split(_A)[0])
                adapter = name.split(_A)[1].split(".")[0]
                if other is None or len(shape) != 2:
                    raise ConfigurationError(
                        f"{self._name} needs both factors of each adapter of a linear layer: {name} is shared "
                        "without its other factor (freeze_a, or federation.personal), or belongs to another kind "
                        "of layer. Share both factors, or use Mean"
                    )
                self._check(layer, adapter, shape[0])
                pairs.append(Pair(place, other[0], shape[0], float(layer.scaling[adapter])))
                self._layers.append((name.split(_A)[0], layer))
        if not pairs:
            raise ConfigurationError(
                f"{self._name} aggregates LoRA adapters, and {type(self._module).__name__} has none to train: "
                "set adapter of CausalLM (without freeze_a), or use Mean"
            )
        self._aggregator.pairs = pairs

    def _check(self, layer: Any, adapter: str, rank: int) -> None:
        ranks = self._aggregator.ranks or [1]
        if max(ranks) > rank:
            raise ConfigurationError(
                f"{self._name}: ranks must be at most {rank}, the rank of the model's adapters, got {max(ranks)}"
            )
        if getattr(layer, "use_dora", {}).get(adapter):
            raise ConfigurationError(
                f"{self._name} assumes layers W + s B A, and DoRA scales their columns: leave use_dora out, or use "
                "Mean"
            )
        dtype = layer.base_layer.weight.dtype
        if self._aggregator.changes_base and dtype not in (torch.float32, torch.float64):
            raise ConfigurationError(
                f"{self._name} adds small changes to the frozen weights, which {dtype} would round away: "
                "load them in float32 (dtype: float32, without four_bit), or use Mean"
            )

    def _kept(self, model: GlobalModel, rank: int | None) -> Tensor | None:
        """Return which coordinates clients of a given adapter rank train, bool of shape (k,); None if they train all."""
        if rank is None or all(rank >= pair.rank for pair in self._aggregator.pairs):
            return None
        kept = torch.ones(1, len(model.params))
        for pair in self._aggregator.pairs:
            pair.keep(kept, [min(rank, pair.rank)])
        return kept[0].bool().to(model.params.device)

    def down(self, start: Start, work: GroupWork) -> list[tuple[Start, GroupWork]]:
        """Return, for each adapter rank, the model truncated to it and the work of the clients with this rank."""
        # the last change of the frozen weights is sent as stacked factors
        size = start.model.params.element_size()
        start = start._replace(num_bytes=start.num_bytes + size * self._aggregator.num_stacked)
        clients: dict[int | None, list[Any]] = {}
        for client in work:
            clients.setdefault(self._aggregator.rank_of(client.client_id), []).append(client)
        pieces, model = [], start.model
        for rank, some in clients.items():
            piece, kept = start, self._kept(model, rank)
            if kept is not None:
                smaller = GlobalModel(model.params * kept, model.buffers)
                saved = 0
                if not self._options.download:  # its transforms count the bytes themselves
                    saved = bytes_down(model.params, model.buffers)
                    saved -= bytes_down(model.params, model.buffers, kept)
                piece = start._replace(model=smaller, num_bytes=start.num_bytes - saved)
            pieces.append((piece, GroupWork.of(some)))
        return pieces

    def up(self, upload: Upload) -> Iterable[Upload]:
        """Mark in clients' updates the entries that they send: those within their adapter rank."""
        whole = upload.arrived
        kept = self._kept(upload.start.model, self._aggregator.rank_of(whole.client_ids[0]))
        if kept is None:
            return (upload,)
        arrived = replace(whole, active=[kept] * len(whole.client_ids))
        num_bytes = upload.num_bytes + bytes_up(arrived) - bytes_up(whole)
        return (upload._replace(arrived=arrived, num_bytes=num_bytes),)

    def close(self, record: RoundRecord) -> None:
        """Add the aggregator's changes to the frozen weights of the layers with adapters."""
        changes = zip(self._layers, self._aggregator.take_changes(), strict=False)
        for (name, layer), change in changes:
            if change is not None:
                # for a module whose checkpoints leave unchanged frozen weights out
                will_change = getattr(self._module, "will_change", None)
                if callable(will_change):
                    will_change([f"{name}.base_layer.weight"])
                weight = layer.base_layer.weight.data
                weight.copy_(weight.double().cpu() + (change.T if layer.fan_in_fan_out else change))
