"""Personal models of clients, loaded into the module one at a time, to be evaluated.

Personal tensors come from a fit in this process, from a checkpoint, or from a few local steps on the global
model (`FineTuned`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch import nn
from torch.optim import Optimizer

from fl_lightning.client.local_step import PlainStep
from fl_lightning.client.memory import ClientMemory
from fl_lightning.client.personal import Personalisation
from fl_lightning.client.work import ClientWork
from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.seeds import derive_seed, seed_global_generators, torch_generator
from fl_lightning.core.space import Space
from fl_lightning.data.federated import FederatedDataModule
from fl_lightning.data.shards import local_order
from fl_lightning.federation.checkpoints.files import in_files, load_memory
from fl_lightning.federation.visits.local_counts import counted
from fl_lightning.federation.visits.visiting import visiting

# Names of the client states with personal tensors and with APFL's mixture.
MEMORY = "personal"
MIXTURE = "mixture"


class PersonalModels:
    """Puts clients' personal models, one at a time, into a module that holds the global model.

    Args:
        module: the module, on its device.
        names: names of the personal tensors.
        memory: client states with their values; a client that never took part has the global ones.
        tune: fine-tunes the module for a client, in place; None for no fine-tuning.

    Example:
        >>> module, memory = nn.Linear(1, 1), ClientMemory()
        >>> memory.put(MEMORY, 3, torch.tensor([7.0]))
        >>> memory.commit()
        >>> with PersonalModels(module, ["bias"], memory).of(3):
        ...     module.bias.tolist()
        [7.0]
        >>> module.bias.tolist() == [7.0]
        False
    """

    def __init__(
        self,
        module: nn.Module,
        names: Sequence[str],
        memory: ClientMemory,
        tune: Callable[[int], None] | None = None,
    ) -> None:
        tensors = dict(module.named_parameters()) | dict(module.named_buffers())
        self._own = Space({name: tensors[name] for name in names})
        self._changing = [tensors[name] for name in names] if tune is None else [*tensors.values()]
        self._memory, self._tune = memory, tune

    @contextmanager
    def of(self, client: int) -> Iterator[None]:
        """Load a client's personal model into the module inside this block."""
        before = [tensor.detach().clone() for tensor in self._changing]
        try:
            own = self._memory.get(MEMORY, client)
            if own is not None:
                own, mixture = own.to(self._own.device), self._memory.get(MIXTURE, client)
                if mixture is not None:  # with the global ones
                    own = torch.lerp(self._own.read(), own, float(mixture))
                self._own.write(own)
            if self._tune is not None:
                self._tune(client)
            yield
        finally:
            with torch.no_grad():
                for tensor, value in zip(self._changing, before, strict=True):
                    tensor.copy_(value)


def recalled_models(
    trainer: Trainer,
    personal: Personalisation | None,
    seed: int,
    fitted: tuple[Sequence[str], ClientMemory] | None,
    saved: Mapping[str, Any],
) -> PersonalModels | None:
    """Return clients' personal models from a fit or a checkpoint's state; None if there are none.

    Args:
        trainer: a Trainer whose module holds the global model.
        personal: the option of the federation.
        seed: seed of the draws of fine-tuning.
        fitted: names and client states of a fit in this process; None without one.
        saved: the Federation's state, of a checkpoint or of a fit in other processes, which is preferred;
            empty without one.
    """
    if personal is None:
        return None
    steps = personal.tuning_steps
    tune = partial(fine_tune, trainer, steps, seed) if steps else None
    if saved and trainer.ckpt_path is None and in_files(saved["memory"]):
        rank_zero_info(
            "personal models are too large to be copied from the processes of the fit: evaluate them from a "
            "checkpoint, with ckpt_path"
        )
        return None
    if saved:
        names = (saved["stages"].get("personal") or {"names": []})["names"]
        memory = ClientMemory()
        load_memory(memory, saved["memory"], trainer.ckpt_path)
    else:
        names, memory = fitted or ([], ClientMemory())
    return PersonalModels(trainer.lightning_module, names, memory, tune) if names or tune else None


_PURPOSE = "fine-tuning"


def fine_tune(trainer: Trainer, num_steps: int, seed: int, client: int) -> None:
    """Fine-tune the module on a client's examples, in place; draws depend on seed and client alone.

    A client without examples changes nothing.

    Args:
        trainer: a Trainer, with its module on its device and clients' training examples.
        num_steps: local steps, ≥ 1.
        seed: root seed of the draws.
        client: id of the client.
    """
    data: FederatedDataModule = trainer.datamodule  # type: ignore[attr-defined]
    shard = data.clients[client]
    if not len(shard):
        return
    order, sizes = local_order(
        shard,
        data.batch_size,
        lambda: torch_generator(seed, f"{_PURPOSE} order", client),
        num_batches=num_steps,
        drop_last=data.drop_last,
        weights=data.draw_weights,
    )
    work = ClientWork(client, len(shard), order, sizes, trainer.current_epoch, seed)
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        visiting(trainer, mode="train", in_place=True) as visit,
        counted(trainer, work),
    ):
        seed_global_generators(derive_seed(seed, _PURPOSE, client))
        optimizer = made_optimizer(trainer.lightning_module)
        step = PlainStep(SimpleNamespace(training_step=visit.step), optimizer, visit.logs)
        for index, indices in enumerate(work.batches):
            batch = visit.prepared(data.train_batch(indices))
            step([(batch, len(indices))], index)


def made_optimizer(module: LightningModule) -> Optimizer:
    """Return a new optimizer as the module configures it, with its initial learning rate.

    Raises:
        ConfigurationError: if the module configures none.
    """
    made: Any = module.configure_optimizers()
    while made and not isinstance(made, Optimizer):
        made = made.get("optimizer") if isinstance(made, Mapping) else made[0]
    if not isinstance(made, Optimizer):
        raise ConfigurationError(
            f"federation.personal FineTuned needs an optimizer: return one from {type(module).__name__}."
            "configure_optimizers"
        )
    for group in made.param_groups:  # making a schedule with warm-up has changed the rate
        group["lr"] = group.get("initial_lr", group["lr"])
    return made
