"""A few local steps from the global model on a client's examples, outside of any round."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer

from fl_lightning.client.local_training import loss_of
from fl_lightning.client.log_collector import LogCollector
from fl_lightning.client.wrapped_optimizers import stepped_with_closure, takes_closure
from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.metric_states import MetricStates, metrics_of
from fl_lightning.core.seeds import (
    derive_seed,
    preserve_global_generators,
    seed_global_generators,
    torch_generator,
)
from fl_lightning.data.federated import FederatedDataModule
from fl_lightning.data.shards import local_order
from fl_lightning.federation.visits.batches import batch_preparation, takes_index

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
        self._module: LightningModule = trainer.lightning_module
        self._data, self._num_steps, self._seed = data, num_steps, seed
        self._prepare = batch_preparation(trainer) or (lambda batch: batch)
        self._context = trainer.precision_plugin.train_step_context
        self._takes_index = takes_index(self._module.training_step)

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
        module, metrics = self._module, MetricStates(metrics_of(self._module))
        modes = [(child, child.training) for child in module.modules()]
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            preserve_global_generators(),
            LogCollector().listening_to(module),
        ):
            seed_global_generators(derive_seed(self._seed, _PURPOSE, client))
            optimizer = made_optimizer(module)
            module.train()
            try:
                for index, indices in enumerate(order.split(sizes)):
                    self._step(optimizer, self._prepare(self._data.train_batch(indices)), index)
            finally:
                optimizer.zero_grad()
                metrics.put_back()
                for child, mode in modes:
                    child.training = mode

    def _step(self, optimizer: Optimizer, batch: Any, index: int) -> None:
        if takes_closure(optimizer):
            stepped_with_closure(optimizer, lambda: self._gradients(optimizer, batch, index))
        elif self._gradients(optimizer, batch, index) is not None:
            optimizer.step()

    def _gradients(self, optimizer: Optimizer, batch: Any, index: int) -> Tensor | None:
        optimizer.zero_grad()
        with self._context():
            arguments = (batch, index) if self._takes_index else (batch,)
            loss = loss_of(self._module.training_step(*arguments))
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
