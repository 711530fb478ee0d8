"""Optimizer of the architecture parameters α in a federation: at the server, or at the clients.

    client i:  α_i ← α - η Σ_t g_{i,t}               plain SGD, one step per local step
    server:    g = Σ_i w_i (α - α_i) / (η Σ_i w_i)   the mean of the clients' sums of gradients
               α ← optimizer(α, g)                   Adam, whose moments last from round to round

If every client takes one step on a full batch, g is the gradient over the pooled data, and α moves as in a
central search. Adam at the clients would start with empty moments in every round. Its first step has the size
of the rate, whatever the gradient, so that the mean of the clients' steps may have the wrong sign: for the
gradients 0.9, -0.1, -0.1 the pooled step goes down, the mean of the clients' steps goes up.

If clients step α nevertheless, the state of their optimizers can be a buffer of the module (`keep`,
`recall`), which the server averages, or which is personal.
Source: Reddi et al. 2021, Algorithm 1, for this one group of parameters. Differs from FedNAS (He et al.
2020), which averages the clients' α.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer
from torch.utils._pytree import tree_leaves

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.space import Space
from fl_lightning.core.traits import Trait
from fl_lightning.core.update import GlobalModel
from fl_lightning.federation import RoundRecord, Stage
from fl_lightning.sparsity import SparseAdamW, SparseSGDM


@final
class GradientSignal:
    """Running mean and variance of α's gradients over steps, to tell whether they have a signal.

    If single gradients have a signal-to-noise ratio s, α needs about (3 / s)² steps to decide.

    Attributes:
        count: number of gradients.

    Example:
        >>> signal = GradientSignal()
        >>> for gradient in (1.0, 3.0):
        ...     signal.add(torch.tensor([gradient]))
        >>> round(signal.standard_errors, 3), round(signal.to_noise, 3)
        (2.0, 1.225)
    """

    def __init__(self) -> None:
        self.count = 0
        self._mean = self._squares = torch.zeros(())

    def add(self, gradient: Tensor) -> None:
        """Update mean and variance with the gradient of one step (Welford 1962)."""
        gradient = gradient.detach().cpu().double()
        self.count += 1
        difference = gradient - self._mean
        self._mean = self._mean + difference / self.count
        self._squares = self._squares + difference * (gradient - self._mean)

    @property
    def standard_errors(self) -> float:
        """Norm of α's mean gradient divided by its standard error; about 1 if there is no signal.

        NaN before the second step, and infinite if all gradients are equal.
        """
        if self.count < 2:
            return math.nan
        error = float((self._squares.sum() / (self.count - 1) / self.count).sqrt())
        return float(self._mean.norm()) / error if error else math.inf

    @property
    def to_noise(self) -> float:
        """Signal-to-noise ratio of one gradient of α, corrected for noise in the mean; NaN before the second step."""
        if self.count < 2:
            return math.nan
        return math.sqrt(max(0.0, self.standard_errors**2 - 1) / self.count)

    def state_dict(self) -> dict[str, Any]:
        """Return count, mean and summed squared deviations of the gradients."""
        return {"count": self.count, "mean": self._mean, "squares": self._squares}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the gradient statistics that `state_dict` returned."""
        self.count, self._mean, self._squares = state["count"], state["mean"], state["squares"]


@final
class ServerSearchStep(Stage):
    """Federation stage: the server steps some parameters (such as α) with an optimizer of their own.

    Args:
        names: names of the parameters.
        make_optimizer: makes the optimizer from a list of parameters.
        local_lr: learning rate η of the clients' plain SGD on these parameters, above 0.
        is_active: returns True for rounds in which the parameters learn; in others they do not change.
        signal: gradient statistics; every active round adds the first parameter's gradient.

    Raises:
        ConfigurationError: if the learning rate is not above 0 and finite.

    Example:
        >>> import torch
        >>> step = ServerSearchStep(["alpha"], lambda p: torch.optim.Adam(p, lr=0.1), local_lr=0.5)
        >>> step.place(Space({"alpha": torch.zeros(1), "weight": torch.zeros(1)}), None)
        >>> params = torch.tensor([0.0, 1.0])
        >>> step.open(0, GlobalModel(params, torch.empty(0)))
        >>> aggregate = step.on_server(torch.tensor([0.5, 0.25]))
        >>> step.stepped(params.sub_(aggregate))
        >>> params
        tensor([-0.1000,  0.7500])
    """

    key = "architecture"
    # it reads nothing but the aggregate, and acts at the server alone
    traits = Stage.traits.without(Trait.PRIVATE_CLIENTS, Trait.PRIVATE_EXAMPLES, Trait.SIMULATION)

    def __init__(
        self,
        names: Sequence[str],
        make_optimizer: Callable[[Iterable[Any]], Optimizer],
        local_lr: float,
        is_active: Callable[[int], bool] = lambda round_index: True,
        signal: GradientSignal | None = None,
    ) -> None:
        if not 0 < local_lr < math.inf:
            raise ConfigurationError(
                f"model.architecture_optimizer: its lr must be above 0 and finite, got {local_lr}: the server "
                "divides clients' updates by it. To train a given architecture, use an ImageClassifier with a "
                "fl_lightning.nas.Network"
            )
        self._names, self._make_optimizer, self._local_lr = list(names), make_optimizer, local_lr
        self._is_active, self._round, self._signal = is_active, 0, signal
        self._params: list[nn.Parameter] = []
        self._optimizer: Optimizer | None = None
        self._gradients: list[Tensor] | None = None
        self._next: tuple[list[nn.Parameter], Optimizer] | None = None

    def place(self, space: Space, positions: Tensor | None) -> None:
        """Locate the server-stepped parameters in the flat vector of a client update.

        Raises:
            ConfigurationError: if a parameter is personal, frozen, or masked in part.
        """
        absent = [name for name in self._names if name not in space.names]
        partial = [name for name in self._names if name in space.active]
        if absent or partial:
            raise ConfigurationError(
                f"the server steps {(absent or partial)[0]}, which is "
                f"{'personal or frozen' if absent else 'frozen in part by a mask'}: all clients must train all of "
                "it, or set model.architecture_state to clients"
            )
        self._space = space

    def open(self, round_index: int, model: GlobalModel) -> None:
        """Start a round: load the global parameters, and drop gradients left by an unfinished round."""
        views = self._views(model.params)
        if self._optimizer is None:
            self._params = [nn.Parameter(view.clone()) for view in views]
            self._optimizer = self._make_optimizer(self._params)
        for param, view in zip(self._params, views, strict=True):
            param.data.copy_(view)
        self._gradients, self._next, self._round = None, None, round_index

    def _views(self, vector: Tensor) -> list[Tensor]:
        views = self._space.named_views(vector)
        return [views[name] for name in self._names]

    def on_server(self, aggregate: Tensor) -> Tensor:
        """Store mean gradients (aggregate divided by the clients' learning rate); return the aggregate unchanged."""
        self._gradients = [view / self._local_lr for view in self._views(aggregate)]
        return aggregate

    def stepped(self, params: Tensor) -> None:
        """Step the parameters with the server's optimizer, and write them into the model; no step without replies."""
        if self._gradients is None:
            return
        if not self._is_active(self._round):  # undo the noise of a private run
            for view, param in zip(self._views(params), self._params, strict=True):
                view.copy_(param.detach())
            return
        assert self._optimizer is not None
        # copies, because a later error in this round undoes the server's step
        next_params, next_optimizer = self._next = copy.deepcopy((self._params, self._optimizer))
        for param, gradient in zip(next_params, self._gradients, strict=True):
            param.grad = gradient
        next_optimizer.step()
        for view, param in zip(self._views(params), next_params, strict=True):
            view.copy_(param.detach())

    def close(self, record: RoundRecord) -> None:
        """Keep the optimizer's state after this round, and add the round's gradient to the statistics."""
        if self._next is None:
            return
        self._params, self._optimizer = self._next
        if self._signal is not None and self._gradients is not None:
            self._signal.add(self._gradients[0])

    def state_dict(self) -> dict[str, Any]:
        """Return the round and the state of the server's optimizer for these parameters."""
        if self._optimizer is None:
            return {}
        return {"round": self._round, "optimizer": self._optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any] | None, model: GlobalModel) -> None:
        """Restore the optimizer's state that `state_dict` returned."""
        self.open((state or {}).get("round", 0), model)
        if state:
            assert self._optimizer is not None
            self._optimizer.load_state_dict(state["optimizer"])


def num_kept(make_optimizer: Callable[[Iterable[Any]], Optimizer], params: list[Tensor]) -> int:
    """Return how many numbers an optimizer's state has after its first step.

    Example:
        >>> num_kept(torch.optim.Adam, [torch.zeros(3)])  # two moments, and the number of steps
        7
    """
    copies = [nn.Parameter(param.detach().clone()) for param in params]
    optimizer = make_optimizer(copies)
    _fill(optimizer)
    return sum(tensor.numel() for tensor in _tensors(optimizer))


def keep(optimizer: Optimizer, kept: Tensor) -> None:
    """Copy an optimizer's state into a flat buffer, shape (s,), in place; do nothing if s is 0."""
    if kept.numel():
        torch.cat([tensor.reshape(-1).to(kept) for tensor in _tensors(optimizer)], out=kept)


def recall(optimizer: Optimizer, kept: Tensor) -> None:
    """Load an optimizer's state from a buffer that `keep` filled; a buffer of zeros is a fresh state."""
    if not kept.numel():
        return
    if not optimizer.state:
        _fill(optimizer)
    tensors = _tensors(optimizer)
    for tensor, part in zip(tensors, kept.split([t.numel() for t in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))


def _fill(optimizer: Optimizer) -> None:
    """Make an optimizer create its state tensors, without changing the parameters."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    before = [(param.detach().clone(), param.grad) for param in params]
    for param in params:
        param.grad = torch.zeros_like(param)
    optimizer.step()
    for param, (value, gradient) in zip(params, before, strict=True):
        param.data.copy_(value)
        param.grad = gradient


def _tensors(optimizer: Optimizer) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(dict(optimizer.state)) if isinstance(leaf, Tensor)]


NO_MASK = "keeps to no mask: operations would compete with parts of them missing"


def check_steps_once(option: str, optimizer: Optimizer) -> None:
    """Raise ConfigurationError if the optimizer is LBFGS, which evaluates the loss several times per step."""
    if isinstance(optimizer, LBFGS):
        raise ConfigurationError(
            f"{option} is LBFGS, which evaluates the loss several times per step, and a search evaluates it once: "
            "use torch.optim.SGD or torch.optim.Adam"
        )


def check_weights_optimizer(optimizer: Optimizer) -> None:
    """Raise ConfigurationError if the weights' optimizer applies sparsity masks, or is LBFGS."""
    check_steps_once("model.optimizer", optimizer)
    if isinstance(optimizer, SparseSGDM | SparseAdamW):
        raise ConfigurationError(
            f"model.optimizer is {type(optimizer).__name__}, and a search {NO_MASK}. Search with "
            "torch.optim.SGD, then mask the network that was found"
        )
