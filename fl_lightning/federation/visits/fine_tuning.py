"""A few local steps from the global model on a client's examples, outside of any round."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer

from fl_lightning.client.local_step import loss_of
from fl_lightning.client.wrapped_optimizers import stepped_with_closure, takes_closure
from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.seeds import derive_seed, seed_global_generators, torch_generator
from fl_lightning.data.federated import FederatedDataModule
from fl_lightning.data.shards import local_order
from fl_lightning.federation.visits.visiting import Visit, visiting

_PURPOSE = "fine-tuning"


class FineTuning:
    """Takes plain steps under a Trainer's precision; draws depend on seed and client alone.

    Args:
        trainer: with its module on its device.
        data: whose clients' training examples are used.
        num_steps: per client, n ≥ 1.
        seed: root seed.
    """

    def __init__(
        self, trainer: Trainer, data: FederatedDataModule, num_steps: int, seed: int
    ) -> None:
        self._trainer, self._data = trainer, data
        self._num_steps, self._seed = num_steps, seed

    def __call__(self, client: int) -> None:
        """Fine-tune the module as it is, in place; a client without examples changes nothing."""
        shard = self._data.clients[client]
        if not len(shard):
            return
        order, sizes = local_order(
            shard,
            self._data.batch_size,
            lambda: torch_generator(self._seed, f"{_PURPOSE} order", client),
            num_batches=self._num_steps,
            drop_last=self._data.drop_last,
            weights=self._data.weights_of(shard),
        )
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            visiting(self._trainer, mode="train", in_place=True) as visit,
        ):
            seed_global_generators(derive_seed(self._seed, _PURPOSE, client))
            optimizer = made_optimizer(self._trainer.lightning_module)
            for index, indices in enumerate(order.split(sizes)):
                _step(visit, optimizer, visit.prepared(self._data.train_batch(indices)), index)


def _step(visit: Visit, optimizer: Optimizer, batch: Any, index: int) -> None:
    if takes_closure(optimizer):
        stepped_with_closure(optimizer, lambda: _gradients(visit, optimizer, batch, index))
    elif _gradients(visit, optimizer, batch, index) is not None:
        optimizer.step()


def _gradients(visit: Visit, optimizer: Optimizer, batch: Any, index: int) -> Tensor | None:
    optimizer.zero_grad()
    loss = loss_of(visit.step(batch, index))
    if loss is None:
        return None
    loss.backward()
    return loss.detach()


def made_optimizer(module: LightningModule) -> Optimizer:
    """Return a new optimizer as the module configures it, at the rate without its schedule.

    Raises:
        ConfigurationError: if it configures none.
    """
    made: Any = module.configure_optimizers()
    while made and not isinstance(made, Optimizer):
        made = made.get("optimizer") if isinstance(made, Mapping) else made[0]
    if not isinstance(made, Optimizer):
        raise ConfigurationError(
            f"FineTuned: {type(module).__name__}.configure_optimizers returns no optimizer"
        )
    for group in made.param_groups:  # a warm-up has begun by making the schedule
        group["lr"] = group.get("initial_lr", group["lr"])
    return made
