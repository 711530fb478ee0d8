"""Batch norm statistics with which a supernet of cells is evaluated: of the present cell, and of all at once.

While it searches, a supernet normalises by its batch. In an evaluation that would depend on which examples
stand together: a folder's images stand class by class, and within one class nothing tells them apart. So sums
of training examples, which add up over clients, give the statistics (`recalibrated`), anew for each
evaluation. Where updates are protected clients send no sums, and evaluations go by the batch.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning.pytorch import Trainer
from torch import Tensor

from fl_lightning.federation.federation import Federation
from fl_lightning.nas.checks import protector
from fl_lightning.nas.elastic.calibration import Sums, normalised_by
from fl_lightning.nas.sub_networks.recalibration import recalibrated

if TYPE_CHECKING:
    from fl_lightning.nas.supernet import Supernet

Shown = Literal["cell", "all"]


class CellStatistics:
    """The statistics of what a `Supernet` shows."""

    def __init__(self) -> None:
        self._sums: dict[Shown, Sums] = {}
        self._alpha: Tensor | None = None

    def measure(self, trainer: Trainer, module: Supernet) -> None:
        """Find them anew; to be called by all processes before an evaluation."""
        self._sums = {}
        federations = [c for c in trainer.callbacks if isinstance(c, Federation)]  # type: ignore[attr-defined]
        if trainer.sanity_checking or any(protector(one) is not None for one in federations):
            return
        with torch.no_grad():
            shown = module.shown
        found = recalibrated(
            trainer,
            module.network,
            list(shown.values()),
            max_examples=module.recalibration_examples,
            seed=module.seed,
        )
        if found is None:
            return
        self._sums = dict(zip(shown, found.sums, strict=True))
        self._alpha = module.alpha.detach().clone()
        if federations and not trainer.predicting:  # which logs nothing
            module.log("recalibration/bytes_up", float(found.num_bytes), rank_zero_only=True)

    def used(self, module: Supernet, shown: Shown) -> AbstractContextManager[Any]:
        """Have the network use those of what is shown; the batch's where α is another, as a client's own."""
        is_known = self._alpha is not None and torch.equal(self._alpha, module.alpha.detach())
        if shown not in self._sums or not is_known:
            return nullcontext()
        return normalised_by(module.network, self._sums[shown])
