"""The type of a client's local step, and the local step of a LightningModule without a Trainer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from fl_lightning.client.corrections.correction import AddedTerm
from fl_lightning.client.log_collector import LogCollector
from fl_lightning.client.optimizers import stepped_with_closure, takes_closure
from fl_lightning.core.errors import ConfigurationError

# A batch and its number of examples.
SizedBatch = tuple[Any, int]
# Takes one optimizer step on one batch, or on several with accumulated gradients. The second argument is the
# index of the step in the client's round. Returns the mean loss, detached; None if the step was skipped.
LocalStep = Callable[[Sequence[SizedBatch], int], Tensor | None]


class PlainStep:
    """The local step of a LightningModule in full precision, without a Trainer.

    Args:
        module: the LightningModule, inside `LogCollector.listening_to`.
        optimizer: optimizer that steps once per local step.
        collector: collector of logged values; its batch size is set before every step.

    Attributes:
        term: term of a correction that is added to the gradients, or None.
        contrast: computes a term that is added to the loss from a batch, or None.
    """

    def __init__(self, module: Any, optimizer: Optimizer, collector: LogCollector) -> None:
        self._module, self._optimizer, self._collector = module, optimizer, collector
        self.term: AddedTerm | None = None
        self.contrast: Callable[[Any], Tensor] | None = None

    def __call__(self, batches: Sequence[SizedBatch], index: int) -> Tensor | None:
        """Run one local step on one batch, see `LocalStep`."""
        (batch,) = batches
        if takes_closure(self._optimizer):
            return stepped_with_closure(self._optimizer, lambda: self._gradients(batch, index))
        loss = self._gradients(batch, index)
        if loss is not None:
            self._optimizer.step()
        return loss

    def _gradients(self, sized_batch: SizedBatch, index: int) -> Tensor | None:
        self._optimizer.zero_grad()
        batch, self._collector.batch_size = sized_batch
        loss = loss_of(self._module.training_step(batch, index))
        if loss is None:
            return None
        if self.contrast is not None:
            loss = loss + self.contrast(batch)
        loss.backward()
        if self.term is not None:
            self.term.add()
        return loss.detach()


def loss_of(output: Any) -> Tensor | None:
    """Return the loss that ``training_step`` returned, as a scalar tensor; None if it skipped the batch.

    Raises:
        ConfigurationError: for anything else.
    """
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if loss is None and output is None:
        return None
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        shape = f" with a loss of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else ""
        raise ConfigurationError(
            "training_step must return a loss tensor with one element, a dict with the key 'loss', "
            f"or None to skip the batch; it returned {type(output).__name__}{shape}"
        )
    return loss if loss.ndim == 0 else loss.reshape(())
