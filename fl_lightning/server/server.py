"""The server's side of a round: aggregate the updates, then step.

    x ← server_optimizer(x, Σ_k w_k Δ_k / Σ_k w_k)

Source: Reddi et al. 2021, Algorithm 1 (FedOpt). With SGD at learning rate 1 this is FedAvg exactly.
Buffers are not optimized: floating-point buffers become their mean weighted by examples, or the result
of the robust rule; integer buffers keep the server's values. With a private aggregator all buffers keep
the server's values.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from fl_lightning.core.errors import ConfigurationError, RoundFailure
from fl_lightning.core.update import ClientUpdate, GlobalModel, Updates
from fl_lightning.server.aggregator import Aggregator, AllReduce, Gather
from fl_lightning.server.means.mean import Mean
from fl_lightning.server.means.running_mean import new_mean

ServerOptimizer = Callable[[Iterable[Any]], Optimizer]
# Schedule of the server optimizer's learning rate, over rounds
ServerSchedule = Callable[[Optimizer], LRScheduler]
# Sending this many numbers takes less time than waiting for the other processes.
_FEW_NUMBERS = 1000
# Maps an aggregate to the pseudo-gradient, shape (k,); None skips the server's step.
PseudoGradient = Callable[[Tensor], Tensor | None]


def fedavg_optimizer(params: Iterable[Any]) -> Optimizer:
    """Return FedAvg's server optimizer: SGD with learning rate 1, which subtracts the aggregate from the model."""
    return torch.optim.SGD(params, lr=1.0)


class Server:
    """Aggregates the updates of a round, and updates the global model by one step of the server optimizer.

    Args:
        model: the initial global model.
        aggregator: aggregator of the deltas; the mean if None.
        make_optimizer: builds an optimizer over one flat parameter of shape (k,).
        make_schedule: builds that optimizer's learning-rate schedule, which advances once per round.

    Raises:
        ConfigurationError: if ``make_optimizer`` makes no optimizer that can step on a dense vector,
            or the schedule needs a metric.

    Attributes:
        model: the current global model, which `close_round` changes in place.
        num_replies: number of updates received in the open round.
        is_open: whether a round is open.
        round_index: number of the open round, or of the last one.

    Example:
        >>> server = Server(GlobalModel(torch.tensor([1.0]), torch.empty(0)))
        >>> server.open_round()
        >>> server.receive(ClientUpdate(0, torch.tensor([0.25]), torch.empty(0), 10, 1))
        >>> server.close_round()
        tensor(0.2500)
        >>> server.model.params
        tensor([0.7500])
    """

    def __init__(
        self,
        model: GlobalModel,
        aggregator: Aggregator | None = None,
        make_optimizer: ServerOptimizer = fedavg_optimizer,
        make_schedule: ServerSchedule | None = None,
    ) -> None:
        self._params = nn.Parameter(model.params.clone())
        self._buffers = model.buffers.clone()
        # live: `close_round` changes it in place
        self.model = GlobalModel(self._params.detach(), self._buffers)
        self._aggregator = as_aggregator(aggregator)
        self._aggregator.memory = {}  # it may have served another run
        _check_steps(make_optimizer)
        self._make_optimizer = make_optimizer
        self.optimizer = make_optimizer([self._params])
        self._schedule = None if make_schedule is None else make_schedule(self.optimizer)
        if isinstance(self._schedule, ReduceLROnPlateau):
            raise ConfigurationError(
                "server_schedule: ReduceLROnPlateau needs a metric, and the server steps before "
                "it is known: use a schedule over rounds like CosineAnnealingLR"
            )
        self.round_index = 0
        self.num_replies = 0
        self.is_open = False

    def replace_model(self, model: GlobalModel) -> None:
        """Replace the parameters and buffers of the global model; the server optimizer's state is kept."""
        self._params.data.copy_(model.params)
        self._buffers.copy_(model.buffers)

    def replace_buffers(self, buffers: Tensor) -> None:
        """Replace the global model's buffers, between two rounds."""
        self._buffers = buffers.clone()
        self.model = GlobalModel(self._params.detach(), self._buffers)

    def relocate(self, model: GlobalModel, positions: Tensor) -> None:
        """Replace the model after masks have changed its coordinates; common coordinates keep their optimizer state.

        Args:
            model: the new model, of k' coordinates.
            positions: index of each new coordinate among the current ones, or -1 if it is new;
                integers, shape (k',). New coordinates get the state of an optimizer that has not
                stepped yet, or 0 if the optimizer creates its state in its first step.
        """
        params = nn.Parameter(model.params.clone())
        state = self.optimizer.state.pop(self._params, {})
        fresh = self._make_optimizer([params]).state.get(params, {})
        is_known, known = positions >= 0, positions.clamp(min=0)
        for key, value in state.items():
            if isinstance(value, Tensor) and value.shape == self._params.shape:
                state[key] = torch.where(is_known, value[known], fresh.get(key, 0))
        self._aggregator.memory = {
            name: torch.where(is_known.cpu(), value[known.cpu()], 0)
            if value.shape == self._params.shape
            else value
            for name, value in self._aggregator.memory.items()
        }
        self.optimizer.state[params] = state
        self.optimizer.param_groups[0]["params"] = [params]
        self._params, self._buffers = params, model.buffers.clone()
        self.model = GlobalModel(params.detach(), self._buffers)

    def open_round(self, round_index: int = 0) -> None:
        """Start a round, and discard any updates of the former one."""
        self.num_replies = 0
        self.is_open = True
        self.round_index = round_index
        self._aggregator.start_round(round_index)
        self._aggregator.open(self._params.detach())
        self._mean_buffers = new_mean(self._buffers, exact=self._aggregator.exact)

    def receive(self, updates: ClientUpdate | Updates) -> None:
        """Add updates to the open round; most aggregators keep only running sums of them."""
        if not isinstance(updates, Updates):
            updates = Updates.of(updates)
        self._aggregator.receive(updates)
        if updates.buffers.shape[1]:
            self._mean_buffers.add_rows(updates.buffers, updates.num_examples)
        self.num_replies += len(updates.client_ids)

    def reduce(self, all_reduce: AllReduce, gather: Gather) -> None:
        """Add up the aggregator's sums over all processes, so that each has the sums over all updates.

        Called by all processes before `close_round`, which then gives the same model everywhere.

        Args:
            all_reduce: called on one or a few vectors, see `added_up`; with a robust rule also once
                per update.
            gather: called once with a robust rule.
        """
        if self._aggregator.exchanges:
            self._aggregator.exchange(gather, all_reduce)
        deltas, buffers = self._aggregator.sums(), self._mean_buffers.sums()
        replies = torch.full_like(buffers[-1], self.num_replies)  # travels with the weights
        *sums, replies = added_up([*deltas, *buffers, replies], all_reduce)
        self._aggregator.load_sums(sums[: len(deltas)])
        self._mean_buffers.load_sums(sums[len(deltas) :])
        self.num_replies = int(replies)

    def close_round(self, change: PseudoGradient | None = None) -> Tensor:
        """Update the global model by the round's aggregate; return the L2 norm of the pseudo-gradient, a scalar.

        Without updates the model stays, unless the aggregator is private and must not show that.

        Args:
            change: maps the aggregate to the pseudo-gradient; the identity if None.

        Raises:
            RoundFailure: if the new model is not finite.
        """
        norm = torch.zeros(())
        if self.num_replies or self._aggregator.is_private:
            norm = self._step(change, self.model.params.clone())
        if self._schedule is not None:
            self._schedule.step()
        self.is_open = False
        return norm

    @contextmanager
    def reversible(self) -> Iterator[None]:
        """Context that undoes `close_round` if an error is raised inside it; the round is then open again."""
        vectors = self.model.params, self.model.buffers
        before, state = [vector.clone() for vector in vectors], copy.deepcopy(self.state_dict())
        try:
            yield
        except BaseException:  # also an interruption, after which a checkpoint may follow
            for vector, value in zip(vectors, before, strict=True):
                vector.copy_(value)
            self.load_state_dict(state)
            self.is_open = True
            raise

    def _step(self, change: PseudoGradient | None, before: Tensor) -> Tensor:
        aggregate = self._aggregator.close()
        untouched, own = self._aggregator.untouched, self._aggregator.buffers
        pseudo_gradient = aggregate if change is None else change(aggregate)
        if pseudo_gradient is None:
            return torch.zeros(())
        params = self.model.params
        self._descend(pseudo_gradient)
        params[untouched] = before[untouched]  # neither momentum nor decay moves what no client may
        norm: Tensor = torch.linalg.vector_norm(pseudo_gradient)
        if not (params.sum().isfinite() or params.isfinite().all()):  # a sum may overflow
            raise RoundFailure(
                f"round {self.round_index + 1}: after the server's step the model holds NaN or infinite "
                f"numbers. It descended a pseudo-gradient of norm {float(norm):.4g}: lower the learning "
                "rate of server_optimizer or of the clients"
            )
        if not self._aggregator.is_private:
            self._buffers.copy_(self._mean_buffers.value() if own is None else own)
        return norm

    def _descend(self, gradient: Tensor) -> None:
        options = self.optimizer.param_groups[0]
        # a checkpoint may have loaded options other than FedAvg's
        is_changed = any(options.get(name) for name in ("momentum", "weight_decay", "maximize"))
        if self._make_optimizer is fedavg_optimizer and not is_changed:
            # all that SGD's step does; calling it takes as long as training a small client
            self.model.params.add_(gradient, alpha=-options["lr"])
            return
        self._params.grad = gradient
        self.optimizer.step()
        self._params.grad = None

    def state_dict(self) -> dict[str, Any]:
        """Return the state of server optimizer, schedule and aggregator, without the updates of an open round.

        The model itself is among the checkpoint's weights.
        """
        state: dict[str, Any] = {"optimizer": self.optimizer.state_dict()}
        if self._schedule is not None:
            state["schedule"] = self._schedule.state_dict()
        if self._aggregator.memory:
            state["memory"] = self._aggregator.memory
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state from `state_dict`."""
        self.optimizer.load_state_dict(state["optimizer"])
        if self._schedule is not None and "schedule" in state:
            self._schedule.load_state_dict(state["schedule"])
        self._aggregator.memory = state.get("memory", {})


def as_aggregator(given: Aggregator | None) -> Aggregator:
    """Return the given aggregator; `Mean`, which is FedAvg, for None."""
    return Mean() if given is None else given


def added_up(tensors: list[Tensor], all_reduce: AllReduce) -> list[Tensor]:
    """Sum tensors over all processes, possibly in place.

    Small tensors are packed together, floating-point ones in the widest of their dtypes: waiting for
    the other processes costs more than the bytes.

    Example:
        >>> def with_an_equal_twin(vector):
        ...     vector *= 2
        >>> added_up([torch.tensor(1.0), torch.tensor([2, 3])], with_an_equal_twin)
        [tensor(2.), tensor([4, 6])]
    """
    sums = [tensor.contiguous() for tensor in tensors]
    floats = [tensor.dtype for tensor in sums if tensor.is_floating_point()]
    widest = reduce(torch.promote_types, floats, torch.float16)
    together: dict[torch.dtype, list[int]] = {}
    for place, tensor in enumerate(sums):
        if tensor.numel() > _FEW_NUMBERS:
            all_reduce(tensor)
        else:
            dtype = widest if tensor.is_floating_point() else tensor.dtype
            together.setdefault(dtype, []).append(place)
    for dtype, places in together.items():
        packed = torch.cat([sums[place].flatten().to(dtype) for place in places])
        all_reduce(packed)
        parts = packed.split([sums[place].numel() for place in places])
        for place, part in zip(places, parts, strict=True):
            sums[place] = part.view_as(sums[place]).to(sums[place].dtype)
    return sums


def _check_steps(make_optimizer: ServerOptimizer) -> None:
    """Raise ConfigurationError if a server optimizer cannot update a vector, e.g. because it needs matrices."""
    probe = nn.Parameter(torch.zeros(2))
    probe.grad = torch.zeros(2)
    try:
        optimizer = make_optimizer([probe])
        if isinstance(optimizer, Optimizer):
            optimizer.step()
    except Exception as error:
        raise ConfigurationError(
            f"server_optimizer cannot step on a vector of numbers ({type(error).__name__}: {error})"
            ": use one like torch.optim.SGD, Adam or Adagrad"
        ) from error
    if not isinstance(optimizer, Optimizer):
        raise ConfigurationError(
            "server_optimizer must make a torch.optim.Optimizer, "
            f"it made {type(optimizer).__name__}"
        )
