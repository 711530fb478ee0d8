"""Ends a search before it collapses, or says that it did: a callback, off unless it is asked for.

    skips        too many skips in the cell that α means, in a round in which α moves
    eigenvalue   the largest eigenvalue of the Hessian of L_search by α has grown: α goes back to where it
                 was before, and the search ends

The Hessian is that of the mean loss over some examples of the half for the search, the same ones in every
round, over all clients alike; a private run names it among what ε does not cover.
Source: Zela et al. 2020, section 4; Liang et al. 2019, DARTS+; see `fl_lightning.nas.relax.early_stop`.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.nn import functional

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.seeds import torch_generator
from fl_lightning.data.federated import FederatedDataModule
from fl_lightning.nas.relax.bilevel import Tensors
from fl_lightning.nas.relax.curvature import largest_eigenvalue
from fl_lightning.nas.relax.early_stop import EigenvalueStop, too_many_skips
from fl_lightning.nas.supernet import Supernet


class StopAtCollapse(Callback):
    """Ends the search of a `Supernet` by its skips or by the sharpness of α.

    Args:
        most_skips: the search ends when a kind of cell has more while α moves; None does not look at
            skips.
        eigenvalue: whether to look at the largest eigenvalue; it is logged as ``search/eigenvalue``.
        num_examples: that the eigenvalue is measured on, at least 1.
        window: measurements in a mean, and from one mean to the other, at least 1.
        ratio: in (0, 1): the search ends when the earlier mean is below this share of the present one.
        how: ``exact`` costs a backward pass for each number of α, ``lanczos`` 32 at most.

    Attributes:
        unprotected: what of clients no privacy of rounds covers, in words; None without an eigenvalue.

    Raises:
        ConfigurationError: for values out of range, and at the start for a search without such
            an eigenvalue.
    """

    def __init__(
        self,
        most_skips: int | None = 2,
        eigenvalue: bool = False,
        *,
        num_examples: int = 64,
        window: int = 5,
        ratio: float = 0.75,
        how: Literal["exact", "lanczos"] = "exact",
    ) -> None:
        if most_skips is not None and most_skips < 0:
            raise ConfigurationError(f"most_skips must be at least 0, got {most_skips}")
        if num_examples < 1:
            raise ConfigurationError(f"num_examples must be at least 1, got {num_examples}")
        self._most_skips, self._num_examples, self._how = most_skips, num_examples, how
        self._stop = EigenvalueStop(window, ratio) if eigenvalue else None
        self.unprotected: str | None = None
        if eigenvalue:
            self.unprotected = "the largest eigenvalue, which examples of single clients show"
        self._earlier: list[dict[str, Tensor]] = []

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse what has no cells, or no eigenvalue."""
        if not isinstance(pl_module, Supernet):
            raise ConfigurationError(
                f"StopAtCollapse is for the search of a Supernet, not for {type(pl_module).__name__}"
            )
        if self._stop is not None and pl_module.rule.draws:
            raise ConfigurationError(
                f"StopAtCollapse: {type(pl_module.rule).__name__} draws its operations, so that its loss "
                "has no Hessian: set eigenvalue to false, or search with Softmax or PartialChannels"
            )

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Look, and end the search if it is time."""
        assert isinstance(pl_module, Supernet)
        if not pl_module.moves_alpha(trainer.current_epoch):
            return  # its skips are those of the draw at the start
        if self._has_many_skips(pl_module):
            self._end(trainer, f"the cell has more than {self._most_skips} skips")
        if self._stop is not None:
            self._measure(trainer, pl_module, self._stop)

    def _has_many_skips(self, module: Supernet) -> bool:
        space, most = module.space, self._most_skips
        if most is None or "skip_connect" not in space.operations:
            return False
        operations = space.operations_of(module.architecture)
        skip = space.operations.index("skip_connect")
        cells: dict[str, list[int]] = {}
        for row, operation in zip(space.rows, operations, strict=True):
            cells.setdefault(row.cell, []).append(operation)
        return any(too_many_skips(cell, skip, most + 1) for cell in cells.values())

    def _measure(self, trainer: Trainer, module: Supernet, stop: EigenvalueStop) -> None:
        images, labels = self._examples(trainer, module)

        def loss(alphas: Tensors) -> Tensor:
            return functional.cross_entropy(module.mixed_logits(images, alphas), labels)

        with torch.enable_grad():
            generator = torch_generator(0, "eigenvalue")
            found = largest_eigenvalue(loss, module.alphas, how=self._how, generator=generator)
        module.log("search/eigenvalue", found, rank_zero_only=True)
        present = {name: tensor.detach().clone() for name, tensor in module.alphas.items()}
        self._earlier = [*self._earlier, present][-stop.window - 1 :]
        if stop.measured(found):
            for name, tensor in module.alphas.items():
                tensor.data.copy_(self._earlier[0][name])
            self._end(trainer, "the largest eigenvalue has grown: alpha goes back to before")

    def _examples(self, trainer: Trainer, module: Supernet) -> Any:
        data: FederatedDataModule = trainer.datamodule  # type: ignore[attr-defined]
        indices = data.clients.flat.indices
        places = np.linspace(0, len(indices) - 1, min(self._num_examples, len(indices)))
        batch = data.train_batch(torch.from_numpy(indices[places.astype(np.int64)]))["search"]
        converted = trainer.precision_plugin.convert_input(batch)
        return module.transfer_batch_to_device(converted, module.device, 0)

    def _end(self, trainer: Trainer, reason: str) -> None:
        rank_zero_info(f"round {trainer.current_epoch}: the search ends, {reason}")
        trainer.should_stop = True

    def state_dict(self) -> dict[str, Any]:
        """Return the measurements that count, and where α was."""
        stop = {} if self._stop is None else self._stop.state_dict()
        return {"stop": stop, "earlier": self._earlier}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up where `state_dict` left off."""
        if self._stop is not None and state_dict["stop"]:
            self._stop.load_state_dict(state_dict["stop"])
        self._earlier = state_dict["earlier"]
