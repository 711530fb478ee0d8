"""One local step of G clients at once: forward, backward and optimizer as one function of tensors.

    (params, state) of shape (G, …), batches (G, B, …)  ->  updated in place

The user's own ``training_step`` is run on stacked parameters by `torch.func`: its gradient under
`vmap` over the clients. Fixed shapes and no Python between the operators let the compiler turn the
whole step into one graph, which is where the speed comes from.

A batch smaller than B is padded, and a padded example must count for nothing. So where the loss is
a mean over examples, the step evaluates it example by example (a second `vmap`, which costs nothing)
and takes the mean with weights 0 and 1. Where it is not (batch norm, contrastive losses), the batch
stays whole and only full batches can be stacked.

Random numbers (dropout) are inputs of the step like the batch, drawn beforehand from each client's
own generator. What the step would give to torchmetrics objects is among its outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import grad_and_value, vmap
from torch.optim import Optimizer

from fl_lightning.client.cannot_stack import CannotStack
from fl_lightning.client.compiling import Compiled
from fl_lightning.client.functional_step import Tensors, TrainingStep, map_tensors
from fl_lightning.client.rehearsal import Rehearsal, rehearse
from fl_lightning.client.stacked_optimizers import StackedRule, stacked_rule
from fl_lightning.sparsity.masked_optimizer import MaskedOptimizer

# Compiled anew for changed momentum, weight decay, …; beyond, the step runs as it is.
MOST_GRAPHS = 3


@dataclass(frozen=True)
class StackedOptions:
    """How a local step is stacked.

    Attributes:
        num_slots: clients side by side, G.
        weighted: evaluate the loss by example, so that batches may be padded.
        clip_norm: largest norm of a client's gradient; None for no clipping.
        clip_value: largest absolute value of a gradient's numbers; None for no clipping.
        compiled: have the compiler turn the step into one graph.
    """

    num_slots: int
    weighted: bool = True
    clip_norm: float | None = None
    clip_value: float | None = None
    compiled: bool = False


class StackedStep:
    """Parameters, optimizer state and sums of G clients, and the step that moves them.

    Args:
        module: the LightningModule; its parameters are read, never written.
        optimizer: over all parameters that train; its options and masks are read before every
            round.
        takes_index: whether ``training_step`` has a second parameter.
        options: how to stack.

    Raises:
        CannotStack: if the optimizer has no rule or leaves out a parameter that trains.

    Attributes:
        params: by name, shape (G, …).
        states: of the optimizer, by name.
        masks: ``True`` where an entry may move, of parameters with frozen entries, by name.
        buffers: floating-point buffers by name, shape (G, …); empty if ``weighted``.
        sums: loss and logged values by name: Σ value · weight and Σ weight, shape (G, 2).
        count: steps that each client has taken, float64 of shape (G,).
        rehearsal: what the step draws and gives to metrics; None before `rehearse`.
        given: what the last step gave to metrics.
    """

    def __init__(
        self, module: nn.Module, optimizer: Optimizer, takes_index: bool, options: StackedOptions
    ) -> None:
        self.options = options
        self._call = TrainingStep(module, takes_index)
        self._module = module
        self.rehearsal: Rehearsal | None = None
        trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._optimizer = optimizer
        self._trained = trained
        self._group_of = _groups(optimizer, trained)
        self._rules: list[StackedRule] = []
        self._num_graphs = 0
        first = next(iter(trained.values()))
        self._device, self._dtype = first.device, first.dtype
        self.params = {name: self._stacked(p.detach()) for name, p in trained.items()}
        stacked_buffers = {} if options.weighted else dict(module.named_buffers())
        self.buffers = {n: self._stacked(b) for n, b in stacked_buffers.items()}
        self.count = torch.zeros(options.num_slots, device=self._device, dtype=torch.float64)
        self.sums: Tensors = {}
        self.given: list[Tensor] = []
        self.states: dict[str, list[Tensor]] = {}
        self._graphs: list[Compiled] = []
        self.read_options()

    def read_options(self) -> None:
        """Take over the optimizer's present options and masks; some need another graph.

        What else Python reads in a step may have changed as well, since the last time.
        """
        groups = self._optimizer.param_groups
        rules = [stacked_rule(self._optimizer, group) for group in groups]
        if any(rule is None for rule in rules):
            raise CannotStack(f"there is no stacked form of {type(self._optimizer).__name__}")
        # tensors, because a changed number would mean another graph
        self._lrs = [
            torch.tensor(float(g["lr"]), dtype=self._dtype, device=self._device) for g in groups
        ]
        masks = self._optimizer.masks if isinstance(self._optimizer, MaskedOptimizer) else {}
        self.masks = {name: masks[p] for name, p in self._trained.items() if p in masks}
        if rules == self._rules:
            for graph in self._graphs:
                graph.recheck()
            return
        self._rules = [rule for rule in rules if rule is not None]
        self.states = {
            name: [torch.zeros_like(p) for _ in range(self._rules[self._group_of[name]].num_states)]
            for name, p in self.params.items()
        }
        # a schedule that changes more than the learning rate would want a graph every round
        self._num_graphs += 1
        self._graphs = []
        self._run, self._run_first = self._graph(self._step), self._graph(self._first_step)
        self._run_only = self._graph(self._only_step)

    def _graph(self, function: Callable[..., Any]) -> Callable[..., Any]:
        if not self.options.compiled or self._num_graphs > MOST_GRAPHS:
            return function
        self._graphs.append(Compiled(function))
        return self._graphs[-1]

    def rehearse(self, batch: Callable[[], Any]) -> Rehearsal:
        """Find out what the step draws and gives to metrics, if that is not known for good.

        It may change from round to round, e.g. with a dropout that grows.

        Args:
            batch: makes a full one.
        """
        if self.rehearsal is None or not self.rehearsal.is_final:
            options = self.options
            self.rehearsal = rehearse(
                self._call,
                self._module,
                batch(),
                num_slots=options.num_slots,
                by_example=options.weighted,
            )
        return self.rehearsal

    def __call__(self, batch: Any, valid: Tensor) -> None:
        """Take one step in every slot.

        Args:
            batch: tensors in tuples, lists and dicts, each of shape (G, B, …).
            valid: 1 where an example counts, 0 where it is padding, shape (G, B).
        """
        states = self.params, self.states, self.buffers
        self._add(self._done(self._run, *states, self.count, self._lrs, batch, valid))

    def first(self, start: Tensors, batch: Any, valid: Tensor) -> None:
        """Begin with a new client in every slot and take its first step.

        All clients start from the same parameters, so the forward pass is that of one model on
        all batches: cheaper than a reset and a step.

        Args:
            start: parameters by name, without the axis of clients.
            batch: as for a step.
            valid: as for a step.
        """
        torch._foreach_zero_([self.count, *self.sums.values()])
        states = start, self.params, self.states
        self._add(self._done(self._run_first, *states, self.count, self._lrs, batch, valid))

    def only(
        self, start: Tensors, batch: Any, valid: Tensor, active: Tensors
    ) -> tuple[Tensor, Tensors]:
        """Return what the only step of a new client in every slot comes to.

        Args:
            start: as for the first step; its order is that of the deltas' coordinates.
            batch: as for a step.
            valid: as for a step.
            active: of parameters whose deltas have only some entries, which, as indices.

        Returns:
            The clients' deltas, shape (G, k), and what `sums` would hold.
        """
        self.count.zero_()
        only: tuple[Tensor, Tensors]
        states = self.states, self.count, self._lrs
        only = self._done(self._run_only, start, *states, batch, valid, active)
        return only

    def _done(self, run: Callable[..., Any], *arguments: Any) -> Any:
        """Run a step with its random numbers, and keep what it gives to metrics."""
        draws = [] if self.rehearsal is None else self.rehearsal.draws.numbers
        with self._call.stand_ins.in_place():
            result, self.given = run(*arguments, draws)
        return result

    def _add(self, logged: Tensors) -> None:
        for name, sums in logged.items():
            if name in self.sums:
                self.sums[name] += sums
            else:
                self.sums[name] = sums

    def _first_step(
        self,
        start: Tensors,
        params: Tensors,
        states: dict[str, list[Tensor]],
        count: Tensor,
        lrs: list[Tensor],
        batch: Any,
        valid: Tensor,
        draws: list[Tensor],
    ) -> tuple[Tensors, list[Tensor]]:
        moved, new_states, logged, given = self._moved_from(
            start, states, count, lrs, batch, valid, draws
        )
        self._write(params, states, count, moved, new_states)
        return logged, given

    def _only_step(
        self,
        start: Tensors,
        states: dict[str, list[Tensor]],
        count: Tensor,
        lrs: list[Tensor],
        batch: Any,
        valid: Tensor,
        active: Tensors,
        draws: list[Tensor],
    ) -> tuple[tuple[Tensor, Tensors], list[Tensor]]:
        moved, _, logged, given = self._moved_from(start, states, count, lrs, batch, valid, draws)
        deltas = {name: (start[name] - moved[name]).flatten(1) for name in start}
        for name, index in active.items():
            deltas[name] = deltas[name][:, index]
        return (torch.cat(list(deltas.values()), 1), logged), given

    def _step(
        self,
        params: Tensors,
        states: dict[str, list[Tensor]],
        buffers: Tensors,
        count: Tensor,
        lrs: list[Tensor],
        batch: Any,
        valid: Tensor,
        draws: list[Tensor],
    ) -> tuple[Tensors, list[Tensor]]:
        loss = self._weighted_loss if self.options.weighted else self._whole_loss
        gradient = grad_and_value(loss, has_aux=True)
        grads, (_, (logged, given, new_buffers)) = vmap(gradient, randomness="error")(
            params, buffers, batch, valid, count, draws
        )
        moved, new_states = self._moved(params, states, grads, count, lrs)
        self._write(params, states, count, moved, new_states)
        for name, buffer in buffers.items():
            buffer.copy_(new_buffers[name])
        return dict(logged), given

    def _moved_from(
        self,
        start: Tensors,
        states: dict[str, list[Tensor]],
        count: Tensor,
        lrs: list[Tensor],
        batch: Any,
        valid: Tensor,
        draws: list[Tensor],
    ) -> tuple[Tensors, dict[str, list[Tensor]], Tensors, list[Tensor]]:
        """Return parameters and states after a first step, what was logged and given to metrics."""
        gradient = grad_and_value(self._weighted_loss, has_aux=True)
        axes = (None, None, 0, 0, 0, 0)
        grads, (_, (logged, given, _)) = vmap(gradient, axes, randomness="error")(
            start, {}, batch, valid, count, draws
        )
        stacked = {name: value.unsqueeze(0) for name, value in start.items()}
        empty = {
            name: [torch.zeros_like(grads[name]) for _ in state] for name, state in states.items()
        }
        return *self._moved(stacked, empty, grads, count, lrs), dict(logged), given

    def _moved(
        self,
        params: Tensors,
        states: dict[str, list[Tensor]],
        grads: Tensors,
        count: Tensor,
        lrs: list[Tensor],
    ) -> tuple[Tensors, dict[str, list[Tensor]]]:
        """Return the optimizer's new parameters and states."""
        grads = self._clipped(grads)
        moved, new_states = {}, {}
        for name, param in params.items():
            group = self._group_of[name]
            moved[name], new_states[name] = self._rules[group].step(
                param, grads[name], states[name], lrs[group], count
            )
            if name in self.masks:
                moved[name] = torch.where(self.masks[name], moved[name], param)
        return moved, new_states

    def _write(
        self,
        params: Tensors,
        states: dict[str, list[Tensor]],
        count: Tensor,
        moved: Tensors,
        new_states: dict[str, list[Tensor]],
    ) -> None:
        for name, param in params.items():
            param.copy_(moved[name])
            for slot, new in zip(states[name], new_states[name], strict=True):
                slot.copy_(new)
        count.add_(1)

    def _whole_loss(
        self,
        params: Tensors,
        buffers: Tensors,
        batch: Any,
        valid: Tensor,
        count: Tensor,
        draws: list[Tensor],
    ) -> tuple[Tensor, tuple[Tensors, list[Tensor], Tensors]]:
        buffers = {name: buffer.clone() for name, buffer in buffers.items()}
        result = self._call(params | buffers, batch, count, draws)
        size = valid.sum()
        sums = {
            name: torch.stack([value * (weight or size), torch.ones_like(value) * (weight or size)])
            for name, (value, weight) in result.logged.items()
        }
        return result.loss, (sums, result.given, buffers)

    def _weighted_loss(
        self,
        params: Tensors,
        buffers: Tensors,
        batch: Any,
        valid: Tensor,
        count: Tensor,
        draws: list[Tensor],
    ) -> tuple[Tensor, tuple[Tensors, list[Tensor], Tensors]]:
        weights: dict[str, float | None] = {}

        def one(example: Any, draws: list[Tensor]) -> tuple[Tensor, Tensors, list[Tensor]]:
            batch = map_tensors(lambda x: x.unsqueeze(0), example)
            result = self._call(params, batch, count, draws)
            weights.update({name: weight for name, (_, weight) in result.logged.items()})
            logged = {name: value for name, (value, _) in result.logged.items()}
            return result.loss, logged, result.given

        axes = (0, [] if self.rehearsal is None else self.rehearsal.draws.axes)
        losses, logged, given = vmap(one, axes, randomness="error")(batch, draws)
        sums = {
            name: torch.stack([(value * valid).sum(), valid.sum()]) * (weights[name] or 1)
            for name, value in logged.items()
        }
        return (losses * valid).sum() / valid.sum().clamp(min=1), (sums, given, {})

    def _clipped(self, grads: Tensors) -> Tensors:
        if self.options.clip_value is not None:
            bound = self.options.clip_value
            return {name: grad.clamp(-bound, bound) for name, grad in grads.items()}
        if self.options.clip_norm is None:
            return grads
        squares = [grad.flatten(1).square().sum(1) for grad in grads.values()]
        norms = torch.stack(squares).sum(0).sqrt()
        factors = (self.options.clip_norm / (norms + 1e-6)).clamp(max=1.0)
        return {n: g * factors.view(-1, *[1] * (g.ndim - 1)) for n, g in grads.items()}

    def _stacked(self, tensor: Tensor) -> Tensor:
        return tensor.unsqueeze(0).repeat(self.options.num_slots, *[1] * tensor.ndim)


def _groups(optimizer: Optimizer, trained: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the number of the parameter group that each name is in."""
    numbers = {id(p): i for i, g in enumerate(optimizer.param_groups) for p in g["params"]}
    missing = [name for name, p in trained.items() if id(p) not in numbers]
    if missing:
        raise CannotStack(f"its optimizer leaves out the parameter {missing[0]}, which trains")
    return {name: numbers[id(p)] for name, p in trained.items()}
