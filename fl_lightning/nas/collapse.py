"""`StopAtCollapse`: a callback that ends a search before its cells collapse to skips.

    skips        the current cell has more skips than allowed, in a round in which α moves
    eigenvalue   the mean of the last `window` largest eigenvalues λ of the Hessian of L_search by α has
                 grown: mean(now - window) / mean(now) < ratio; α is reset to its value `window`
                 measurements ago, and the search ends

DARTS without a stop ends in cells of skips alone: they train fastest with shared weights. If the
eigenvalue grows, α is in a sharp minimum: choosing the largest operation of each edge changes α a lot, and
the resulting network is worse than the search predicts.

    exact    all of H, one product with a unit vector at a time, then its eigenvalues
    lanczos  H on the space of v, Hv, H²v, …, of at most 32 dimensions: the ends of the spectrum converge
             first

The Hessian is that of the mean loss over some examples of the half for the search, equal in every round,
over all clients; a private run lists it among the values that ε does not cover.
Sources: Liang et al. 2019, DARTS+ (two skips in a normal cell); Zela et al. 2020, Understanding and
Robustifying Differentiable Architecture Search, section 4 (distance 5, ratio 0.75); Golub, Van Loan,
Matrix Computations, section 10.1, with full orthogonalisation.
Differs: one number is the length of the mean and the distance between the two means.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, final

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.nn import functional

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.seeds import torch_generator
from fl_lightning.data.federated import FederatedDataModule
from fl_lightning.nas.alpha_gradients import Tensors, leaves
from fl_lightning.nas.supernet import Supernet


class StopAtCollapse(Callback):
    """Ends the search of a `Supernet` by its skips or by the sharpness of α.

    Args:
        most_skips: the search ends when a kind of cell has more skips while α moves; None ignores skips.
        eigenvalue: whether to measure the largest eigenvalue, which is logged as ``search/eigenvalue``.
        num_examples: number of examples for the eigenvalue, at least 1.
        window: number of measurements in a mean, and between the two means, at least 1.
        ratio: in (0, 1): the search ends when the earlier mean is below this share of the current one.
        how: ``exact`` needs a backward pass for each number of α, ``lanczos`` at most 32.

    Attributes:
        unprotected: description of values that no privacy covers; None without an eigenvalue.

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
        """Raise ConfigurationError for a module without cells, or without a Hessian if it is needed."""
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
        """Check the criteria, and end the search if one is met."""
        assert isinstance(pl_module, Supernet)
        if not pl_module.moves_alpha(trainer.current_epoch):
            return  # skips are those of the random start
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
        """Return the recent measurements and values of α."""
        stop = {} if self._stop is None else self._stop.state_dict()
        return {"stop": stop, "earlier": self._earlier}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        if self._stop is not None and state_dict["stop"]:
            self._stop.load_state_dict(state_dict["stop"])
        self._earlier = state_dict["earlier"]


MOST_LANCZOS_STEPS = 32

Product = Callable[[Tensor], Tensor]


def largest_eigenvalue(
    loss: Callable[[Tensors], Tensor],
    alphas: Tensors,
    *,
    how: Literal["exact", "lanczos"] = "exact",
    generator: torch.Generator | None = None,
) -> float:
    """Largest (most positive) eigenvalue of the Hessian of a loss.

    Args:
        loss: function of the architecture parameters, equal in every call.
        alphas: architecture parameters at which to evaluate.
        how: ``exact`` needs a backward pass for each number of α, ``lanczos`` at most 32.
        generator: generator of the first vector of ``lanczos``, on the CPU.

    Raises:
        ConfigurationError: if `how` is neither.
        ValueError: if the Hessian is not finite, or ``lanczos`` has no generator.
    """
    if how not in ("exact", "lanczos"):
        raise ConfigurationError(f"how must be exact or lanczos, got {how!r}")
    product, like = hessian_product(loss, alphas)
    if how == "lanczos":
        if generator is None:
            raise ValueError("lanczos draws its first vector: give it a generator")
        first = torch.randn(len(like), generator=generator, dtype=torch.float64)
        return _largest(_projected(product, first.to(like)))
    return _largest(torch.stack([product(unit) for unit in torch.eye(len(like)).to(like)]))


def hessian_product(loss: Callable[[Tensors], Tensor], alphas: Tensors) -> tuple[Product, Tensor]:
    """Return the function v ↦ Hv, and a vector of v's shape, over all concatenated α."""
    a = leaves(alphas)
    values = list(a.values())
    gradients = torch.autograd.grad(
        loss(a), values, create_graph=True, allow_unused=True, materialize_grads=True
    )
    flat = torch.cat([gradient.flatten() for gradient in gradients])

    def product(vector: Tensor) -> Tensor:
        if not flat.requires_grad:  # a loss that is linear in α
            return torch.zeros_like(vector)
        parts = torch.autograd.grad(
            flat, values, vector, retain_graph=True, allow_unused=True, materialize_grads=True
        )
        return torch.cat([part.flatten() for part in parts])

    return product, flat.detach()


def _projected(product: Product, first: Tensor) -> Tensor:
    """Project the Hessian onto the Krylov space of a vector."""
    basis = (first / first.norm())[:, None]
    images = product(basis[:, 0])[:, None]
    while basis.shape[1] < min(len(first), MOST_LANCZOS_STEPS):
        rest = images[:, -1]
        for _ in range(2):  # the second time removes rounding errors
            rest = rest - basis @ (basis.T @ rest)
        if not rest.norm() > torch.finfo(rest.dtype).eps * images[:, -1].norm() * len(first):
            break  # the space is invariant: further vectors are independent of the first
        basis = torch.cat([basis, (rest / rest.norm())[:, None]], 1)
        images = torch.cat([images, product(basis[:, -1])[:, None]], 1)
    projected: Tensor = basis.T @ images
    return projected


def _largest(matrix: Tensor) -> float:
    if not matrix.isfinite().all():
        raise ValueError("the Hessian by alpha holds a number that is not finite")
    # symmetrise: rounding makes the triangles slightly different
    return float(torch.linalg.eigvalsh((matrix + matrix.T) / 2)[-1])


def too_many_skips(operations: Sequence[int], skip: int, limit: int = 2) -> bool:
    """True if a cell has at least `limit` skips.

    Args:
        operations: number of the operation on each row of the cell.
        skip: number of the skip.
        limit: at least 1.

    Raises:
        ConfigurationError: if the limit is below 1, which would stop any search.

    Example:
        >>> too_many_skips([1, 3, 1], skip=1), too_many_skips([1, 3, 3], skip=1)
        (True, False)
    """
    if limit < 1:
        raise ConfigurationError(f"the limit of skips must be at least 1, got {limit}")
    return list(operations).count(skip) >= limit


@final
class EigenvalueStop:
    """Criterion for a growing largest eigenvalue.

    Args:
        window: number of measurements in a mean, and between the two means; at least 1.
        ratio: ratio in (0, 1) of the means below which the search ends.

    Raises:
        ConfigurationError: if one is out of its range.
    """

    def __init__(self, window: int = 5, ratio: float = 0.75) -> None:
        if window < 1:
            raise ConfigurationError(f"window must be at least 1, got {window}")
        if not 0 < ratio < 1:
            raise ConfigurationError(f"ratio must be in (0, 1), got {ratio}")
        self._window, self._ratio = window, ratio
        self._eigenvalues: list[float] = []

    @property
    def window(self) -> int:
        """Number of measurements to go back to a good α when the search ends."""
        return self._window

    def measured(self, eigenvalue: float) -> bool:
        """Record a measurement; returns True if the search should end."""
        window = self._window
        self._eigenvalues = [*self._eigenvalues, eigenvalue][-2 * window :]
        if len(self._eigenvalues) < 2 * window:
            return False
        earlier, now = (sum(part) / window for part in self._halves())
        # the ratio of negative means is meaningless: α is in no minimum
        return 0 < earlier < self._ratio * now

    def _halves(self) -> tuple[list[float], list[float]]:
        return self._eigenvalues[: self._window], self._eigenvalues[self._window :]

    def state_dict(self) -> dict[str, Any]:
        """Return the recent measurements."""
        return {"eigenvalues": list(self._eigenvalues)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._eigenvalues = list(state["eigenvalues"])
