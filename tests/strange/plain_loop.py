"""Federated averaging as a plain loop: the oracle of the table.

    for every client:  x_c ← local steps from x;     x ← Σ_c n_c x_c / Σ_c n_c

Source: McMahan et al. 2017, Algorithm 1. Every client is a module that is built anew, so nothing but
the tensors copied into it can come from another client. Parameters (frozen ones too) and
floating-point buffers are averaged; integer buffers and all Python state stay as they were built.
The order of examples and the seeds of draws are the product's, by `WorkPlan`; batches are not.
"""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from lightning.fabric.utilities.apply_func import apply_to_collection
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import default_collate

from fl_lightning.client.work import ClientWork
from fl_lightning.core.seeds import seed_global_generators
from strange.rows import ROUNDS, Row

Plan = Callable[[int], list[ClientWork]]
Tensors = dict[str, Tensor]


def tensors_of(module: nn.Module) -> Tensors:
    """Return a copy of all parameters and buffers by name."""
    named = (*module.named_parameters(), *module.named_buffers())
    return {name: tensor.detach().clone() for name, tensor in named}


def new_module(row: Row, dtype: torch.dtype = torch.float32) -> LightningModule:
    """Return the row's module as it is before training, for double precision as Lightning has it."""
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of old forms, which are on purpose
        torch.manual_seed(0)
        module = row.make()
        return module.double() if dtype == torch.float64 else module


def plain_loop(
    row: Row,
    plan: Plan,
    rounds: int,
    dtype: torch.dtype,
    at_end: Callable[[Any], object] = lambda module: None,
) -> Tensors:
    """Return all parameters and buffers of the global model after some rounds.

    Args:
        row: what is trained.
        plan: every client's work in a round.
        rounds: how many.
        dtype: of all real numbers.
        at_end: is shown the module of every client that is done.
    """
    model = tensors_of(new_module(row, dtype))
    for round_index in range(rounds):
        start, total = model, 0
        sums = {name: torch.zeros_like(wide(t)) for name, t in start.items()}
        for work in plan(round_index):
            module = trained(row, work, start, dtype)
            at_end(module)
            end = tensors_of(module)
            total += work.num_examples
            for name, sum_ in sums.items():
                sum_ += work.num_examples * moved(end[name], start[name])
        model = {
            name: (wide(tensor) + sums[name] / total).to(tensor.dtype)
            if tensor.is_floating_point() or tensor.is_complex()
            else tensor
            for name, tensor in start.items()
        }
    return model


def moved(end: Tensor, start: Tensor) -> Tensor:
    """Return the difference in double precision; infinite numbers that stay so have not moved."""
    return torch.where(end == start, 0.0, wide(end) - wide(start))


def wide(tensor: Tensor) -> Tensor:
    """Return a tensor in double precision."""
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def trained(row: Row, work: ClientWork, start: Tensors, dtype: torch.dtype) -> Any:
    """Return the module of one client at the end of its round."""
    module = outside_lightning(new_module(row, dtype), work.round_index)
    with torch.no_grad():
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            tensor.copy_(start[name])
    seed_global_generators(work.seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of schedules that step before their optimizers
        module.build_optimizers()
    module.on_train_epoch_start()
    with default_dtype(dtype):
        for index, examples in enumerate(work.batches):
            local_step(row, module, read(row, examples, dtype), index)
    return module


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Have new tensors be of this type while the block runs."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def read(row: Row, examples: Tensor, dtype: torch.dtype) -> Any:
    """Return the batch of some examples; in double precision its real numbers are double as well."""
    collate = row.collate or default_collate
    with default_dtype(torch.float32):
        batch = collate([row.data[index] for index in examples.tolist()])
    if dtype != torch.float64:
        return batch
    return apply_to_collection(batch, Tensor, lambda t: t.double() if t.is_floating_point() else t)


def local_step(row: Row, module: Any, batch: Any, index: int) -> None:
    """Call ``training_step`` once and, unless the module steps by hand, the optimizer's step."""
    outputs: list[Any] = []
    batch = module.on_after_batch_transfer(module.on_before_batch_transfer(batch, 0), 0)
    takes_index = len(inspect.signature(module.training_step).parameters) > 1
    arguments = (batch, index) if takes_index else (batch,)
    optimizer = module.all_optimizers[0]

    def closure() -> Tensor | None:
        outputs.append(module.training_step(*arguments))
        loss = outputs[-1]["loss"] if isinstance(outputs[-1], dict) else outputs[-1]
        module.on_before_zero_grad(optimizer)
        optimizer.zero_grad()
        if loss is not None:
            loss.backward()
            module.on_after_backward()
            module.on_before_optimizer_step(optimizer)
            bound = row.trainer.get("gradient_clip_val")
            module.configure_gradient_clipping(optimizer, bound, "norm")
        return loss

    module.on_train_batch_start(batch, index)
    if module.automatic_optimization:
        module.optimizer_step(module.current_epoch, index, optimizer, closure)
    else:
        outputs.append(module.training_step(*arguments))
    output = outputs[-1] if isinstance(outputs[-1], dict) else {"loss": outputs[-1]}
    module.on_train_batch_end(output, batch, index)


class OutsideLightning:
    """What a module calls of Lightning, without Lightning."""

    def build_optimizers(self) -> None:
        """Make optimizers, and step their schedules once for every round that has been."""
        configured = self.configure_optimizers()
        schedules: list[Any] = []
        if isinstance(configured, tuple) and isinstance(configured[0], list):
            configured, schedules = configured
        one = not isinstance(configured, list | tuple)
        self.__dict__["all_optimizers"] = [configured] if one else list(configured)
        self.__dict__["all_schedules"] = schedules
        self.__dict__["trainer"].optimizers = self.all_optimizers
        for schedule in schedules if self.automatic_optimization else ():
            for _ in range(self.current_epoch):
                schedule.step()

    current_epoch = property(lambda self: self.trainer.current_epoch)
    global_step = property(lambda self: self.trainer.global_step)
    trainer = property(lambda self: self.__dict__["trainer"])

    def log(self, *args: Any, **options: Any) -> None:
        """Do nothing."""

    log_dict = log

    def optimizers(self) -> Any:
        return self.all_optimizers[0] if len(self.all_optimizers) == 1 else self.all_optimizers

    def lr_schedulers(self) -> Any:
        return self.all_schedules[0] if len(self.all_schedules) == 1 else self.all_schedules

    def manual_backward(self, loss: Tensor, **options: Any) -> None:
        loss.backward(**options)

    def toggle_optimizer(self, optimizer: Any) -> None:
        """Have only this optimizer's parameters ask for gradients."""
        every = {p for o in self.all_optimizers for g in o.param_groups for p in g["params"]}
        self.__dict__["toggled"] = {p: p.requires_grad for p in every}
        own = {p for group in optimizer.param_groups for p in group["params"]}
        for param in every - own:
            param.requires_grad_(False)

    def untoggle_optimizer(self, optimizer: Any) -> None:
        for param, needs in self.__dict__.pop("toggled").items():
            param.requires_grad_(needs)

    def clip_gradients(
        self, optimizer: Any, gradient_clip_val: float | None, gradient_clip_algorithm: str
    ) -> None:
        params = [p for group in optimizer.param_groups for p in group["params"]]
        assert gradient_clip_algorithm == "norm"
        if gradient_clip_val is not None:
            nn.utils.clip_grad_norm_(params, gradient_clip_val)


def outside_lightning(module: LightningModule, round_index: int) -> Any:
    """Return the module itself, which from now on does without a Trainer."""
    kind = type(module)
    module.__class__ = type(kind.__name__, (OutsideLightning, kind), {})
    told = SimpleNamespace(current_epoch=round_index, global_step=round_index, max_epochs=ROUNDS)
    module.__dict__["trainer"] = told
    return module
