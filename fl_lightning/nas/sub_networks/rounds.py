"""Callback of a `OneShot`: client budgets, sorting of channels, recalibration of batch norm.

In a round: the callback records which client trains. With a capability every client has a mask of the
coordinates that its sub-networks use; only these are sent, and a coordinate is averaged over the clients that
train it.
Before a round: a frozen teacher of `Shrinking` is copied when the first phase ends. Channels are sorted
before a narrower width joins, so that narrow networks start with the most important channels. The outputs of
the largest network, and of widths that already train, do not change. The optimizer (of the server, or of a
central run) then restarts, because its state is in the old order. Clients must have no state by coordinates.
At the end of a round without validation batch norm statistics are recalibrated, as before evaluations.
Source: Cai et al. 2020, ICLR (Once-for-All), section 3.2, "elastic width".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.traits import Trait
from fl_lightning.federation import LocalTraining, MaskOfClient, Stage, federation_options
from fl_lightning.nas.spaces.sizes import SizeSpace
from fl_lightning.nas.spaces.space import Architecture
from fl_lightning.nas.spaces.subnetwork import sort_channels
from fl_lightning.nas.sub_networks.capability import limits, reach, within
from fl_lightning.nas.sub_networks.evaluation import check_personal, has_statistics
from fl_lightning.nas.sub_networks.methods import Shrinking
from fl_lightning.reports.progress import federation_of


class CurrentClient(Stage):
    """Federation stage that records which client is training at the moment.

    Attributes:
        client: id of the client that trains now; None between clients.
    """

    one_at_a_time = "every step trains other sub-networks"
    # the stage reads only the id of a client, where it trains
    traits = Stage.traits.without(Trait.PRIVATE_CLIENTS, Trait.PRIVATE_EXAMPLES, Trait.SIMULATION)

    def __init__(self) -> None:
        self.client: int | None = None

    @contextmanager
    def around(self, training: LocalTraining) -> Iterator[None]:
        """Record the client's id while it trains."""
        before, self.client = self.client, training.work.client_id
        try:
            yield
        finally:
            self.client = before


class SubNetworkRounds(Callback):
    """Callback of every `OneShot`: applies client budgets, sorts channels and recalibrates batch norm.

    Attributes:
        unprotected: description of the values of clients that ε does not cover; None if there are none.
        teacher: weights of a frozen teacher by name, from the end of `Shrinking`'s first phase; None before.
    """

    def __init__(self) -> None:
        super().__init__()
        self._is_at_site = False
        self.unprotected: str | None = None
        self._module: Any = None
        self._current: CurrentClient | None = None
        self._limits: list[Architecture] | None = None
        self._masks: dict[Architecture, Mapping[str, Tensor]] = {}
        self.teacher: dict[str, Tensor] | None = None

    @property
    def client(self) -> int | None:
        """Id of the client that is training; None in a central run."""
        return None if self._current is None else self._current.client

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check the run's options; in a federation, compute client limits and record which client trains.

        Raises:
            ConfigurationError: for a capability without clients, limits of sites without a capability, a
                budget below the smallest network, personal models whose statistics would not be
                recalibrated, sorting beside a state by coordinates, or phases without a number of rounds.
        """
        module: Any = pl_module
        self._module, self._current, self._limits = module, None, None
        federation = federation_options(trainer)
        self._is_at_site = federation is not None and federation.is_at_site
        self._masks = {}
        if has_statistics(module.network):
            self.unprotected = "the sums of each client's activations, for batch norm statistics"
        if stage != "fit":
            return
        check_shrinking(trainer, module.method)
        if federation is None:
            if module.capability is not None:
                raise ConfigurationError(
                    "model.capability is a budget of each client, and this run has no clients: add a federation "
                    "block, or leave capability out"
                )
            return
        if module.capability is not None:
            num_clients = len(trainer.datamodule.clients)  # type: ignore[attr-defined]
            self._limits = limits(module.capability, module.networks, num_clients)
            for client, most in module.most_of_clients.items():
                self._limits[client] = within(self._limits[client], most)
        elif module.most_of_clients:
            raise ConfigurationError(
                "model.capability: sites have a most_cost, so that clients train networks of different sizes: set "
                "capability, e.g. to DeviceClasses with budgets_of_classes: [1.0], and use an optimizer that "
                "supports masks (SparseSGDM, SparseAdamW)"
            )
        check_personal(federation.personal, module.network)
        self._current = CurrentClient()
        federation.add(self._current)

    def limit_of(self, client: int | None) -> Architecture:
        """Return the largest sub-network that a client trains; without budgets, the largest of the space."""
        largest: Architecture = self._module.space.largest
        return largest if self._limits is None or client is None else self._limits[client]

    def client_masks(self) -> MaskOfClient | None:
        """Return a function from client to mask of the coordinates it trains; None if clients have no budgets."""
        return None if self._limits is None else self._mask

    def _mask(self, client: int) -> Mapping[str, Tensor]:
        limit, module = self.limit_of(client), self._module
        if limit not in self._masks:
            held = reach(module.space, module.network, limit)
            self._masks[limit] = {f"network.{name}": mask for name, mask in held.items()}
        return self._masks[limit]

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Copy the weights for a frozen teacher after the first phase; sort channels if a narrower width joins."""
        if self._is_at_site:
            return  # the server does, and sends the model
        module: Any = pl_module
        method, round_ = module.method, trainer.current_epoch
        if isinstance(method, Shrinking) and method.largest == "frozen":
            has_shrunk = method.phase(module.space, round_, max(0, trainer.max_epochs or 0)) > 0
            if self.teacher is None and has_shrunk:
                weights = module.network.named_parameters()
                self.teacher = {name: param.detach().clone() for name, param in weights}
            if self.teacher is not None:  # a restored one may be on another device
                self.teacher = {name: t.to(module.device) for name, t in self.teacher.items()}
        sort_before_round(trainer, pl_module)

    def state_dict(self) -> dict[str, Any]:
        """Return the frozen teacher's weights, None before there is a teacher."""
        return {"teacher": self.teacher}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the frozen teacher's weights."""
        self.teacher = state_dict["teacher"]

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Recompute batch norm statistics after a round without validation, before checkpoints are saved."""
        if trainer.is_last_batch and not (trainer.enable_validation or self._is_at_site):
            self._module.recalibrate()


_NO_WIDTH = ("resolution", "kernel", "depth")
# options of a federation that keep a state by coordinates
_MEMORIES = ("correction", "personal", "updates", "asynchronous", "client_state", "privacy")


def check_shrinking(trainer: Trainer, method: Any) -> None:
    """Raise ConfigurationError if shrinking phases have no length, or a stored state prevents sorting channels."""
    if not isinstance(method, Shrinking):
        return
    if method.rounds is None and (trainer.max_epochs or -1) < 1:
        raise ConfigurationError(
            f"model.method Shrinking divides the run into phases of equal length, and trainer.max_epochs is "
            f"{trainer.max_epochs}: set it, or the length of each phase by model.method.rounds"
        )
    federation = federation_of(trainer)
    if not method.sort or federation is None:
        return
    found = [name for name in _MEMORIES if getattr(federation, name, None)]
    if found:
        raise ConfigurationError(
            f"model.method.sort reorders channels between rounds, and federation.{found[0]} "
            f"has a state in the old order: set sort to false, or leave {found[0]} out"
        )
    if str(trainer.precision) in ("bf16-true", "64-true"):
        raise ConfigurationError(
            f"model.method.sort: with trainer.precision {trainer.precision} the server has a copy of the weights, "
            "which cannot be sorted between rounds: use 32-true or bf16-mixed, or set sort to false"
        )


def sort_before_round(trainer: Trainer, module: Any) -> None:
    """Sort channels by importance if a narrower width joins in this round, and reset the optimizer's state."""
    method, round_, space = module.method, trainer.current_epoch, module.space
    if not (isinstance(method, Shrinking) and method.sort) or round_ == 0:
        return
    num_rounds = max(0, trainer.max_epochs or 0)
    before, now = (method.kept(space, number, num_rounds) for number in (round_ - 1, round_))
    rows = zip(space.kinds, before, now, strict=True)
    if not any(kind not in _NO_WIDTH and more > less for kind, less, more in rows):
        return
    with torch.device("meta"):
        trained = [module.networks.build(one) for one in _narrower(space, before)]
    sort_channels(module.network, trained)
    federation = federation_of(trainer)
    if federation is None:
        for optimizer in trainer.optimizers:
            optimizer.state.clear()
        return
    assert federation.rounds is not None, "the fit has begun"
    server = federation.rounds.server.optimizer
    fresh = federation.server_optimizer([p for g in server.param_groups for p in g["params"]])
    server.state.clear()
    server.state.update(fresh.state)  # some optimizers have a state from the start


def _narrower(space: SizeSpace, kept: Sequence[int]) -> list[Architecture]:
    """Return the deepest network of every width below the largest, among the widths that already train."""
    found = []
    for steps in range(1, max(kept)):
        choices = [
            last - (0 if kind in _NO_WIDTH else min(steps, number - 1))
            for kind, last, number in zip(space.kinds, space.largest.choices, kept, strict=True)
        ]
        found.append(space.architecture(choices))
    return [one for one in found if one != space.largest]
