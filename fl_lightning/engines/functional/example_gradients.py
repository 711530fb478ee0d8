"""Sum of clipped per-example gradients, for DP-SGD.

    Σ_i g_i · min(1, S / ‖g_i‖₂),   g_i = ∇ℓ(example i),   norm over all trainable parameters

The user's ``training_step`` gets each example as a batch of one, so that it cannot mix two examples.
Buffers and attributes that the step changes (a running scale of the loss) are restored after each example.
`torch.func` computes many gradients at once (vmap over examples, in chunks that fit the memory). If vmap
cannot run the step, plain autograd computes one after the other. A gradient that is not finite counts as 0,
because a failure of the client would reveal the example. Source: Abadi et al. 2016 (1607.00133), Algorithm 1.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import grad_and_value, vmap

from fl_lightning.client.log_collector import LogCollector
from fl_lightning.client.state.attributes import Attributes
from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.seeds import GlobalGenerators
from fl_lightning.core.space import Space
from fl_lightning.engines.functional.functional_step import OWN_LOSS, Tensors, TrainingStep
from fl_lightning.sparsity.sensitivity.scoring import chunks, map_batch

# (batch, batch index) -> loss of a plain training step, None if the step skips the batch
Loss = Callable[[Any, int], Tensor | None]

# one clipped gradient, shape (k,) -> the gradient in integer multiples of a grid step
ToIntegers = Callable[[Tensor], Tensor]


class ExampleGradients:
    """Computes the gradient of each single example, clips it, and sums the clipped gradients, as DP-SGD needs.

    Args:
        module: the LightningModule.
        loss: returns the loss of a plain training step in the module itself.
        takes_index: whether ``training_step`` has a second parameter.
        collector: receives values that the step logs; None to discard them.
        memory_limit: bytes for gradients at one time; None for 64 MiB on a CPU, 2 GiB elsewhere.
        vectorize: compute many gradients at once if the module supports it.
        ignore: names of attributes that Lightning sets on the module, see `Attributes`.

    Attributes:
        num_clipped: number of gradients so far whose norm was above the clipping norm.

    Example:
        >>> class Line(nn.Linear):
        ...     def training_step(self, batch):
        ...         return self(batch).square().sum() / 2
        >>> line = Line(2, 1, bias=False)
        >>> _ = nn.init.ones_(line.weight)
        >>> space, loss = Space.of_parameters(line), lambda batch, index: line.training_step(batch)
        >>> gradients = ExampleGradients(line, loss, takes_index=False)
        >>> examples = torch.tensor([[1.0, 0.0], [3.0, 4.0]])  # gradients (1, 0) and (21, 28)
        >>> gradients(space, examples, index=0, clip_norm=5.0)[0]
        tensor([4., 4.])
    """

    def __init__(
        self,
        module: nn.Module,
        loss: Loss,
        *,
        takes_index: bool,
        collector: LogCollector | None = None,
        memory_limit: int | None = None,
        vectorize: bool = True,
        ignore: Collection[str] = (),
    ) -> None:
        self._module, self._loss, self._collector = module, loss, collector
        self._call = TrainingStep(module, takes_index)
        self._memory_limit = memory_limit
        self._vectorize, self._ignore = vectorize, ignore
        if vectorize and collector is not None and len(self._call.stand_ins):
            self._go_slowly("torchmetrics objects must be updated (log_unprotected: true)")
        self.num_clipped = 0

    def __call__(
        self,
        space: Space,
        batch: Any,
        index: int,
        clip_norm: float,
        to_integers: ToIntegers | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Sum the clipped gradients of a batch, shape (k,); also returns its losses, shape (B,).

        Args:
            space: layout of the trainable parameters; gradients are taken at their current values.
            batch: tensors in tuples, lists and dicts, with examples along the first axis.
            index: index of the local step.
            clip_norm: clipping norm S > 0, finite.
            to_integers: converts each clipped gradient to int64, the dtype of the sum; None for no
                conversion.

        Raises:
            ConfigurationError: if the training step changes parameters; the change is undone.
        """
        total, losses = zero_gradient(space, as_integers=to_integers is not None), []
        before = _Before(self._module, self._ignore)
        for chunk in chunks(batch, self._chunk_size(space)):
            summed, lost = self._of_chunk(space, chunk, index, clip_norm, to_integers, before)
            total += summed
            losses.append(lost)
        before.check_untouched()
        return total, torch.cat(losses)

    def _chunk_size(self, space: Space) -> int:
        limit = self._memory_limit
        if limit is None:
            limit = 2**26 if space.device.type == "cpu" else 2**31
        return max(1, limit // (8 * space.num_entries))

    def _of_chunk(
        self,
        space: Space,
        chunk: Any,
        index: int,
        clip_norm: float,
        to_integers: ToIntegers | None,
        before: _Before,
    ) -> tuple[Tensor, Tensor]:
        if self._vectorize:
            generators = GlobalGenerators(only_torch=True)
            try:
                rows, losses, logged = self._at_once(space, chunk, index)
            except ConfigurationError:
                raise
            except Exception as error:  # noqa: BLE001 - whatever the step does that vmap cannot
                generators.put_back()
                self._go_slowly(f"{type(error).__name__}: {error}".splitlines()[0])
            else:
                self._log(logged)
                return self._clipped_sum(rows, clip_norm, to_integers), losses
            finally:
                before.put_back()
        total = zero_gradient(space, as_integers=to_integers is not None)
        alone = []
        for example in chunks(chunk, 1):
            row, loss = self._alone(space, example, index)
            before.put_back()  # state from one example would change the gradients of the next
            total += self._clipped_sum(row.unsqueeze(0), clip_norm, to_integers)
            alone.append(loss)
        return total, torch.stack(alone)

    def _go_slowly(self, reason: str) -> None:
        self._vectorize = False
        warnings.warn(
            f"gradients of single examples are computed one by one, which is slow: {reason}",
            stacklevel=2,
        )

    def _at_once(self, space: Space, chunk: Any, index: int) -> tuple[Tensor, Tensor, Tensors]:
        """Return B examples' gradients, shape (B, k), losses, shape (B,), and logged values, by `vmap`."""
        tensors = dict(self._module.named_parameters()) | dict(self._module.named_buffers())
        fixed = {name: tensor.detach() for name, tensor in tensors.items()}
        params = {name: fixed.pop(name) for name in space.names}
        weights: dict[str, float | None] = {}

        def one(params: Tensors, example: Any) -> tuple[Tensor, Tensors]:
            single = map_batch(lambda tensor: tensor.unsqueeze(0), example)
            result = self._call(params | fixed, single, torch.tensor(index))
            weights.update({name: weight for name, (_, weight) in result.logged.items()})
            return result.loss, {name: value for name, (value, _) in result.logged.items()}

        gradient = vmap(grad_and_value(one, has_aux=True), (None, 0), randomness="different")
        with self._call.in_place():
            grads, (losses, logged) = gradient(params, chunk)
        rows = [
            grads[name].flatten(1) if picked is None else grads[name].flatten(1)[:, picked]
            for name, picked in ((name, space.active.get(name)) for name in space.names)
        ]
        del logged[OWN_LOSS]
        return torch.cat(rows, 1).to(space.dtype), losses.detach(), logged

    def _alone(self, space: Space, example: Any, index: int) -> tuple[Tensor, Tensor]:
        """Return one example's gradient, shape (k,), and its loss, by plain autograd."""
        own = dict(self._module.named_parameters())
        leaves = [own[name] for name in space.names]
        buffers = [(buffer, buffer.clone()) for buffer in self._module.buffers()]
        if self._collector is not None:
            self._collector.batch_size = 1
        loss = self._loss(example, index)
        for buffer, before in buffers:  # statistics of examples, which no noise covers
            buffer.copy_(before)
        if loss is None:
            return zero_gradient(space, as_integers=False), torch.zeros((), device=space.device)
        grads = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
        rows = [
            grad.reshape(-1) if picked is None else grad.reshape(-1)[picked]
            for grad, picked in zip(grads, (space.active.get(n) for n in space.names), strict=True)
        ]
        return torch.cat(rows).to(space.dtype), loss.detach().reshape(())

    def _clipped_sum(
        self, rows: Tensor, clip_norm: float, to_integers: ToIntegers | None
    ) -> Tensor:
        """Scale each gradient (a row) down to the clipping norm, and return the rows' sum, shape (k,)."""
        wide = torch.float32 if rows.device.type == "mps" else torch.float64
        norms = torch.linalg.vector_norm(rows, dim=1, dtype=wide)
        is_finite = norms.isfinite()
        if not bool(is_finite.all()):
            rows = torch.where(is_finite.unsqueeze(1), rows, 0)
        self.num_clipped += int((norms > clip_norm).sum())
        scales = torch.where(is_finite, (clip_norm / norms).clamp(max=1.0), 0).to(rows.dtype)
        if to_integers is None:
            return scales @ rows
        clipped = (scale * row for scale, row in zip(scales, rows, strict=True))
        return torch.stack([to_integers(row) for row in clipped]).sum(0)

    def _log(self, logged: Tensors) -> None:
        if self._collector is None:
            return
        for name, values in logged.items():
            self._collector.batch_size = len(values)
            self._collector.log(name, values.mean())


def zero_gradient(space: Space, *, as_integers: bool) -> Tensor:
    """Return a zero vector of shape (k,), int64 or the space's dtype, to which gradients are added."""
    dtype = torch.int64 if as_integers else space.dtype
    return torch.zeros(space.size, dtype=dtype, device=space.device)


class _Before:
    """Snapshot of a module's parameters and attributes before the training step."""

    def __init__(self, module: nn.Module, ignore: Collection[str]) -> None:
        self._module = module
        self._attributes = Attributes(module, ignore=ignore)
        self._before = {name: (p, p.detach().clone()) for name, p in module.named_parameters()}

    def put_back(self) -> None:
        """Restore the module's attributes; raise if the training step has replaced a parameter."""
        self.check_untouched(values=False)
        self._attributes.put_back(generators=False)  # each example has its own draws

    def check_untouched(self, *, values: bool = True) -> None:
        """Undo changes that the training step made to parameters, and raise ConfigurationError if there were any."""
        present = dict(self._module.named_parameters())
        changed = [
            name
            for name, (param, value) in self._before.items()
            if present.get(name) is not param or (values and not _is_same(param.detach(), value))
        ]
        if not changed:
            return
        for name in changed:
            param, value = self._before[name]
            param.data = value
            owner, _, own_name = name.rpartition(".")
            setattr(self._module.get_submodule(owner), own_name, param)
        raise ConfigurationError(
            f"federation.privacy ExampleDP: training_step changes the parameter {changed[0]} itself, and such a "
            "change is not clipped: return a loss, and let the optimizer change parameters"
        )


def _is_same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)


def check_examples_apart(module: nn.Module) -> None:
    """Raise ConfigurationError if a layer mixes the examples of a batch, as batch norm does.

    Raises:
        ConfigurationError: if one does; it names the layer.
    """
    for name, child in module.named_modules():
        if isinstance(child, nn.modules.batchnorm._BatchNorm):
            raise ConfigurationError(
                f"federation.privacy ExampleDP bounds the effect of each example, but {name} "
                f"({type(child).__name__}) mixes the examples of a batch: use group or layer norm"
            )
