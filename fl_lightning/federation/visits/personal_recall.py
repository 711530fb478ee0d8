"""Where the personal models of a federation's clients are: in its rounds, or in a saved state.

A few local steps from the global model on a client's examples, outside of any round.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch.optim import Optimizer

from fl_lightning.client.local_step import PlainStep
from fl_lightning.client.memory import ClientMemory
from fl_lightning.client.personal.personalisation import Personalisation
from fl_lightning.client.work import ClientWork
from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.seeds import derive_seed, seed_global_generators, torch_generator
from fl_lightning.data.federated import FederatedDataModule
from fl_lightning.data.shards import local_order
from fl_lightning.federation.checkpoints.memory import saved_memory
from fl_lightning.federation.fit_rounds import FitRounds
from fl_lightning.federation.run import Run
from fl_lightning.federation.visits.local_counts import counted
from fl_lightning.federation.visits.personal_models import PersonalModels
from fl_lightning.federation.visits.visiting import visiting


def recalled_models(
    trainer: Trainer,
    personal: Personalisation | None,
    seed: int,
    run: Run | None,
    saved: Mapping[str, Any],
) -> PersonalModels | None:
    """Return what clients have for themselves; None if nothing.

    Args:
        trainer: whose module holds the global model.
        personal: what the user asked for.
        seed: of what fine-tuning draws.
        run: of the fit in this process; None if there was none.
        saved: a checkpoint's state, or that of `state_to_bring_home`, which then counts; or empty.
    """
    if personal is None:
        return None
    module, steps, tune = trainer.lightning_module, personal.tuning_steps, None
    if steps:
        tune = FineTuning(trainer, trainer.datamodule, steps, seed)  # type: ignore[attr-defined]
    if saved:
        names = (saved.get("personal") or {"names": []})["names"]
        memory = saved_memory(saved["memory"], trainer.ckpt_path)
    elif run is not None:
        names, memory = run.local.own.names, run.memory.clients
    else:
        names, memory = [], ClientMemory()
    return PersonalModels(module, names, memory, tune) if names or tune else None


def state_to_bring_home(rounds: FitRounds | None) -> dict[str, Any]:
    """Return what another process needs to evaluate personal models, unless it is large."""
    if rounds is None or not rounds.run.local.own.names:
        return {}
    memory = rounds.memory.clients
    if not memory.is_small:
        rank_zero_info(
            "personal models are too large to be brought home from the fit's processes: "
            "evaluate them with ckpt_path"
        )
        return {}
    return {
        "personal": {"names": list(rounds.run.local.own.names)},
        "memory": memory.state_dict(with_round=False),
    }


_PURPOSE = "fine-tuning"


class FineTuning:
    """Fine-tunes the model on a client's examples; draws depend on seed and client alone.

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
        round_index = self._trainer.current_epoch
        work = ClientWork(client, len(shard), order, sizes, round_index, self._seed)
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            visiting(self._trainer, mode="train", in_place=True) as visit,
            counted(self._trainer, work),
        ):
            seed_global_generators(derive_seed(self._seed, _PURPOSE, client))
            optimizer = made_optimizer(self._trainer.lightning_module)
            step = PlainStep(SimpleNamespace(training_step=visit.step), optimizer, visit.logs)
            for index, indices in enumerate(work.batches):
                batch = visit.prepared(self._data.train_batch(indices))
                step([(batch, len(indices))], index)


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
