"""Corrections of losses: MOON, FedLC.

MOON: a client's features are pulled towards those of the global model.

    loss + μ · mean over examples of  -log( e^{s(z, z_x)/T} / (e^{s(z, z_x)/T} + e^{s(z, z_m)/T}) )

s: cosine similarity; z, z_x, z_m: features of the client's current model, of the global model with
which the round began, and of the client's model at the end of its last round.

Source: Li, He, Song 2021, "Model-Contrastive Federated Learning", CVPR, equation 3.
Differs: the features are those of the user's network; the paper adds a projection head in front of the
classifier. Running statistics of norm layers do not change in the additional forward passes.

FedLC: the logit of each class is shifted by a function of the client's number of examples of that class.

    loss on f_c(x) - τ n_c^(-1/4) in place of f_c(x),    n_c: the client's training examples of class c

Classes with few examples get a wider margin, so that local steps do not unlearn them.

Source: Zhang et al. 2022, Federated Learning with Label Distribution Skew via Logits Calibration.
Differs: the module computes its loss from the shifted logits, which is the paper's loss for cross entropy.
The logit of a class without examples is lowered by 100 τ, as if n_c were 1e-8.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from torch.optim import Optimizer

from fl_lightning.client.corrections.correction import Correction, Outcome
from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.space import Space
from fl_lightning.core.traits import Trait, Traits


@final
@dataclass(frozen=True)
class Moon(Correction):
    """MOON: adds a contrastive loss on features of the client's current, global and last model.

    Clients train one after the other. A step has three more forward passes, one of them with gradients.
    A client's first round has no contrastive loss, because there is no last model.

    Args:
        mu: weight μ ≥ 0 of the contrastive loss; the paper uses 1, 5 or 10.
        temperature: temperature T > 0.

    Raises:
        ConfigurationError: for values out of range, and at the start of a fit for a module without a
            method ``features``.

    Example:
        >>> here, there = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]])
        >>> round(float(Moon(mu=1.0).contrast(here, here, there)), 4)  # log(1 + e⁻²)
        0.1269
    """

    mu: float = 1.0
    temperature: float = 0.5

    ranges: ClassVar[dict[str, str]] = {
        "mu": "at least 0 and finite",
        "temperature": "above 0 and finite",
    }

    @property
    def traits(self) -> Traits:
        """Conditions on a round that the correction needs or breaks; it needs a loss from ``training_step``."""
        added = {Trait.RETURNED_LOSS: "adds to the loss"}
        ways = {Trait.RETURNED_LOSS: "use FedProx, Scaffold or FedDyn"}
        return super().traits | Traits(needs=added, instead=ways)

    def check(self, module: nn.Module, optimizer: Optimizer) -> None:
        """Raise ConfigurationError if the module has no method ``features``."""
        if not hasattr(module, "features"):
            raise ConfigurationError(
                f"Moon needs a method features(batch) of {type(module).__name__} that returns the features of "
                "a batch, shape (B, …): add one, or use FedProx"
            )

    def remember(self, memory: Tensor | None, mean: Tensor | None, outcome: Outcome) -> Tensor:
        """Return the client's trained model, shape (k,), which is its last model in its next round."""
        return outcome.start - outcome.delta

    def added_loss(
        self, module: nn.Module, space: Space, start: Tensor, memory: Tensor
    ) -> Contrast:
        """Return a function that computes MOON's contrastive loss on a batch."""
        return Contrast(self, module, space, start, memory)

    def contrast(self, own: Tensor, of_global: Tensor, of_last: Tensor) -> Tensor:
        """Compute MOON's contrastive loss from features of three models, a scalar.

        Args:
            own: features of the client's current model, shape (B, …).
            of_global: features of the global model, shape (B, …).
            of_last: features of the client's last model, shape (B, …).
        """
        own, of_global, of_last = (z.flatten(1).float() for z in (own, of_global, of_last))
        near = functional.cosine_similarity(own, of_global) / self.temperature
        far = functional.cosine_similarity(own, of_last) / self.temperature
        return self.mu * functional.softplus(far - near).mean()


class Contrast:
    """Function of a batch that computes MOON's contrastive loss for one client.

    Args:
        moon: the correction with its options.
        module: the client's model, which has a method ``features``.
        space: layout of the trainable parameters.
        start: the global model, shape (k,).
        last: the client's last model, shape (k,).
    """

    def __init__(
        self, moon: Moon, module: nn.Module, space: Space, start: Tensor, last: Tensor
    ) -> None:
        self._moon, self._module, self._features = moon, module, _Features(module)
        self._own = {name: module.get_parameter(name) for name in space.names}
        dtypes = {name: param.dtype for name, param in self._own.items()}
        self._start, self._last = (
            {name: tensor.to(dtypes[name]) for name, tensor in space.full(model).items()}
            for model in (start, last)
        )

    def __call__(self, batch: Any) -> Tensor:
        """Return the contrastive loss of a batch, a scalar with a gradient."""
        with torch.no_grad():
            of_global, of_last = self._of(self._start, batch), self._of(self._last, batch)
        return self._moon.contrast(self._of(self._own, batch), of_global, of_last)

    def _of(self, params: Mapping[str, Tensor], batch: Any) -> Tensor:
        # copies, to which norm layers write their statistics
        buffers = {name: buffer.clone() for name, buffer in self._module.named_buffers()}
        tensors = {f"module.{name}": tensor for name, tensor in {**buffers, **params}.items()}
        features: Tensor = functional_call(self._features, tensors, (batch,))
        return features


class _Features(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, batch: Any) -> Tensor:
        features: Tensor = self.module.features(batch)  # type: ignore[operator]
        return features


_NO_EXAMPLES = 1e-8  # stands for the number of examples of a class without any


@final
@dataclass(frozen=True)
class FedLC(Correction):
    """FedLC: shifts logits by class frequency in local training; with ``tau`` 0 bit-identical to FedAvg.

    The output of the module's ``forward``, of shape (B, C), is shifted while a client trains. This also
    affects personal parameters (`Personal` with ``own_epochs``, `Ditto`, `APFL`) and ``train/…`` metrics.
    Evaluation is unchanged. Clients train one after the other.

    Args:
        tau: strength τ ≥ 0 of the shift.

    Raises:
        ConfigurationError: if ``tau`` is negative, and in the first round for a module whose
            ``training_step`` does not compute its logits by ``self(inputs)``.

    Example:
        >>> FedLC(tau=1.0).logit_shift(torch.tensor([16, 1, 0]))
        tensor([  -0.5000,   -1.0000, -100.0000])
    """

    tau: float = 1.0

    ranges: ClassVar[dict[str, str]] = {"tau": "at least 0 and finite"}

    @contextmanager
    def calibrated(self, module: nn.Module, labels: Callable[[], Tensor]) -> Iterator[None]:
        """Shift the module's logits by class frequency while a client trains inside the block.

        Raises:
            ConfigurationError: if ``forward`` returns no logits, or is not called inside the block.
        """
        known, was_asked = labels().bincount(), False

        def shifted(module: nn.Module, inputs: Any, logits: Any) -> Any:
            nonlocal was_asked
            if not module.training:
                return logits
            if not isinstance(logits, Tensor) or logits.ndim != 2 or logits.shape[1] < len(known):
                raise ConfigurationError(
                    f"FedLC shifts logits of shape (B, C), C ≥ {len(known)}, but {type(module).__name__}.forward "
                    f"returned {_described(logits)}: return the logits of all classes"
                )
            was_asked = True
            counts = torch.zeros(logits.shape[1])
            counts[: len(known)] = known
            return logits + self.logit_shift(counts).to(logits)

        handle = module.register_forward_hook(shifted)
        try:
            yield
        finally:
            handle.remove()
        if not was_asked:
            raise ConfigurationError(
                f"FedLC shifts the output of forward, but {type(module).__name__}.training_step "
                "does not call it: compute the logits by self(inputs)"
            )

    def logit_shift(self, counts: Tensor) -> Tensor:
        """Return -τ n^(-1/4) for each class with n examples, shape (C,), which is added to the logits."""
        return -self.tau * counts.clamp(min=_NO_EXAMPLES).pow(-0.25)


def _described(value: Any) -> str:
    return f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
