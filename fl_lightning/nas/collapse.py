"""`StopAtCollapse`: a callback that ends a search before its cells collapse to skip connections.

    skips        the current cell has more skips than allowed, in a round in which α moves
    eigenvalue   the largest eigenvalue λ of the Hessian of L_search in α has grown: of its means over the last
                 `window` measurements, mean(`window` measurements ago) / mean(now) < ratio; α is reset to
                 its value `window` measurements ago

DARTS without a stop ends in cells of skips only, which train fastest in shared weights. If λ is large, α is in
a sharp minimum: the selection of one operation per edge is a large change of α, and the selected network is
worse than the mixture.

The Hessian is that of the mean loss over a fixed set of search examples of all clients; a private run
lists it among the values that ε does not cover.
Sources: Liang et al. 2019, DARTS+ (two skips in a normal cell); Zela et al. 2020, Understanding and
Robustifying Differentiable Architecture Search, section 4 (distance 5, ratio 0.75).
Differs: `window` is both the length of a mean and the distance between the two means.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.nn import functional

from fl_lightning.core.errors import ConfigurationError, check_range
from fl_lightning.core.traits import NO_TRAITS, Trait, Traits
from fl_lightning.data.federated import FederatedDataModule
from fl_lightning.nas.alpha_gradients import Tensors
from fl_lightning.nas.relaxation import SearchStep
from fl_lightning.nas.supernet import Supernet

READS_EXAMPLES = Traits(
    needs={Trait.SIMULATION: "measures an eigenvalue on clients' examples"},
    instead={Trait.SIMULATION: "set its eigenvalue to false"},
)


class StopAtCollapse(Callback):
    """Callback that stops a `Supernet` search if cells have too many skips, or the loss becomes sharp in α.

    Args:
        most_skips: largest number of skip connections in a cell while α moves; None for any number.
        eigenvalue: whether to measure the largest eigenvalue of the Hessian in every round and log it as
            ``search/eigenvalue``. A measurement takes one backward pass per entry of α.
        num_examples: number of examples for the eigenvalue, at least 1.
        window: number of measurements in a mean, and between the two means, at least 1.
        ratio: ratio of the earlier to the current mean, in (0, 1), below which the search ends.

    Attributes:
        unprotected: description of the values that ε does not cover; None without `eigenvalue`.
        traits: requirements of the callback, checked against the options of a federation.

    Raises:
        ConfigurationError: for values out of range; at the start of a search whose loss has no Hessian.
    """

    def __init__(
        self,
        most_skips: int | None = 2,
        eigenvalue: bool = False,
        *,
        num_examples: int = 64,
        window: int = 5,
        ratio: float = 0.75,
    ) -> None:
        check_range("most_skips", most_skips, "at least 0")
        check_range("num_examples", num_examples, "at least 1")
        check_range("window", window, "at least 1")
        check_range("ratio", ratio, "in (0, 1)")
        self._most_skips, self._num_examples = most_skips, num_examples
        self._has_eigenvalue, self._window, self._ratio = eigenvalue, window, ratio
        self.unprotected: str | None = None
        self.traits = READS_EXAMPLES if eigenvalue else NO_TRAITS
        if eigenvalue:
            self.unprotected = "the largest eigenvalue, which examples of single clients show"
        self._eigenvalues: list[float] = []
        self._earlier: list[dict[str, Tensor]] = []

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Raise ConfigurationError if the module is no `Supernet`, or `eigenvalue` is set and operations are sampled."""
        if not isinstance(pl_module, Supernet):
            raise ConfigurationError(
                f"StopAtCollapse ends the search of a fl_lightning.nas.Supernet, and model is "
                f"{type(pl_module).__name__}: remove the callback"
            )
        if self._has_eigenvalue and pl_module.rule.draws:
            raise ConfigurationError(
                f"StopAtCollapse: with model.rule {type(pl_module.rule).__name__}, which draws operations, the loss "
                "has no Hessian: set eigenvalue to false, or search with Softmax or PartialChannels"
            )

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop the search if a stop criterion is met; skip rounds before α starts to learn."""
        assert isinstance(pl_module, Supernet)
        if not pl_module.moves_alpha(trainer.current_epoch):
            return  # the cell is still that of the random start
        if self._has_many_skips(pl_module):
            self._end(trainer, f"the cell has more than {self._most_skips} skips")
        if self._has_eigenvalue:
            self._measure(trainer, pl_module)

    def _has_many_skips(self, module: Supernet) -> bool:
        space, most = module.space, self._most_skips
        if most is None or "skip_connect" not in space.operations:
            return False
        skip = space.operations.index("skip_connect")
        pairs = zip(space.rows, space.operations_of(module.architecture), strict=True)
        skips = Counter(row.cell for row, operation in pairs if operation == skip)
        return max(skips.values(), default=0) > most

    def _measure(self, trainer: Trainer, module: Supernet) -> None:
        images, labels = self._examples(trainer, module)

        def loss(alphas: Tensors) -> Tensor:
            logits = module.network(images, module.mixed(alphas, SearchStep()))
            return functional.cross_entropy(logits, labels)

        with torch.enable_grad():
            found = largest_eigenvalue(loss, module.alphas)
        module.log("search/eigenvalue", found, rank_zero_only=True)
        alphas = {name: tensor.detach().clone() for name, tensor in module.alphas.items()}
        self._earlier = [*self._earlier, alphas][-self._window - 1 :]
        self._eigenvalues = [*self._eigenvalues, found][-2 * self._window :]
        if has_grown(self._eigenvalues, self._window, self._ratio):
            for name, tensor in module.alphas.items():
                tensor.data.copy_(self._earlier[0][name])
            self._end(
                trainer, "the largest eigenvalue has grown: alpha is reset to its earlier value"
            )

    def _examples(self, trainer: Trainer, module: Supernet) -> Any:
        data: FederatedDataModule = trainer.datamodule  # type: ignore[attr-defined]
        indices = data.clients.indices
        places = np.linspace(0, len(indices) - 1, min(self._num_examples, len(indices)))
        batch = data.train_batch(torch.from_numpy(indices[places.astype(np.int64)]))["search"]
        converted = trainer.precision_plugin.convert_input(batch)
        return module.transfer_batch_to_device(converted, module.device, 0)

    def _end(self, trainer: Trainer, reason: str) -> None:
        rank_zero_info(f"round {trainer.current_epoch + 1}: the search ends, {reason}")
        trainer.should_stop = True

    def state_dict(self) -> dict[str, Any]:
        """Return the recent eigenvalues, and the values of α at which they were measured."""
        return {"eigenvalues": self._eigenvalues, "earlier": self._earlier}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the eigenvalues and values of α that `state_dict` returned."""
        self._eigenvalues, self._earlier = state_dict["eigenvalues"], state_dict["earlier"]


def largest_eigenvalue(loss: Callable[[Tensors], Tensor], alphas: Tensors) -> float:
    """Return the largest (most positive) eigenvalue of the loss's Hessian in the architecture parameters.

    Args:
        loss: deterministic function of the architecture parameters.
        alphas: architecture parameters, at whose values the Hessian is computed.

    Raises:
        ValueError: if the Hessian is not finite.
    """
    sizes = [tensor.numel() for tensor in alphas.values()]

    def of_all(flat: Tensor) -> Tensor:
        parts = zip(alphas.items(), flat.split(sizes), strict=True)
        return loss({name: part.view_as(tensor) for (name, tensor), part in parts})

    flat = torch.cat([tensor.detach().flatten() for tensor in alphas.values()])
    hessian = torch.autograd.functional.hessian(of_all, flat)
    if not hessian.isfinite().all():
        raise ValueError(
            "the Hessian of the search loss in alpha is not finite: the weights have diverged, lower the lr of "
            "model.optimizer"
        )
    # symmetrise: rounding makes the triangles slightly different
    return float(torch.linalg.eigvalsh((hessian + hessian.T) / 2)[-1])


def has_grown(eigenvalues: Sequence[float], window: int, ratio: float) -> bool:
    """True if the mean of the latest window of eigenvalues, times the ratio, exceeds that of the previous window.

    Args:
        eigenvalues: measurements, the latest last.
        window: number of measurements in a mean.
        ratio: ratio in (0, 1).
    """
    if len(eigenvalues) < 2 * window:
        return False
    earlier, now = sum(eigenvalues[-2 * window : -window]), sum(eigenvalues[-window:])
    # the ratio of negative means is meaningless: α is in no minimum
    return 0 < earlier < ratio * now
