"""Personal models beside the shared one: Ditto, APFL, fine-tuning.

Ditto: a personal model besides the shared one, pulled towards the global model.

    v_i ← v_i - η (∇F_i(v_i) + λ (v_i - x))        x: the global model with which the round began

Source: Li et al. 2021, "Ditto: Fair and Robust Federated Learning Through Personalization", ICML,
Algorithm 1.
Differs: a client's first v_i is the global model of the round in which the client first takes part (the
paper uses the initial model, which the server would have to send as well); v_i takes the same number of
local steps as the shared model, on the same batches; buffers belong to v_i.

APFL: every client mixes a personal model with the shared one, and learns the share of each.

    v̄_i = α_i v_i + (1 - α_i) w_i                w_i: the shared model as client i has trained it
    v_i ← v_i - η α_i ∇F_i(v̄_i)                  in every local step
    α_i ← α_i - η_α ⟨∇F_i(v̄_i), v_i - w_i⟩       once per round, kept in [0, 1]

Source: Deng, Kamani, Mahdavi 2020, "Adaptive Personalized Federated Learning", Algorithm 1 and
equation 10.
Differs: v_i takes its steps after w_i, whose final value it uses, on the same batches; the inner product
is the mean over the round's steps and has a separate rate η_α; a client's first v_i is the global model
of the round in which the client first takes part.

Fine-tuning: the personal model is the global one after a few steps on the client's examples.

    z_i = x after n local steps on client i's training examples, evaluated and then discarded

Source: Wang et al. 2019, "Federated Evaluation of On-device Personalization", section 3; Yu et al.
2020, "Salvaging Federated Learning by Local Adaptation", section 3 (FT).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor, nn

from fl_lightning.client.local_step import SizedBatch
from fl_lightning.client.personal.personalisation import Personalisation
from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.space import Space


class _Beside(Personalisation):
    """Base of personalisations with a whole personal model besides the shared one."""

    beside = True

    def names(self, module: nn.Module) -> list[str]:
        """Return the names of all trainable parameters and all buffers."""
        params = [name for name, p in module.named_parameters() if p.requires_grad]
        return [*params, *(name for name, _ in module.named_buffers())]


@final
@dataclass(frozen=True)
class Ditto(_Beside):
    """Ditto: a personal model for every client, pulled towards the global model.

    The global model is bit-identical to that of a run without Ditto. A client's round takes twice as long.

    Args:
        pull: strength λ ≥ 0 of the pull; with 0 the personal models train independently. It needs a
            learning rate η with η λ < 2.

    Raises:
        ConfigurationError: if ``pull`` is negative or infinite.

    Example:
        >>> Ditto(pull=0.1).names(nn.Linear(2, 1))
        ['weight', 'bias']
    """

    pull: float = 0.1

    ranges: ClassVar[dict[str, str]] = {"pull": "at least 0 and finite"}


@final
@dataclass(frozen=True)
class APFL(_Beside):
    """APFL: every client uses a learnt mixture of a personal model and the shared one.

    The global model is bit-identical to that of a run without APFL. A client's round takes twice as long.

    Args:
        mixture: initial share α of the personal model, in [0, 1]; 0 is the shared model alone.
        mixture_rate: learning rate η_α ≥ 0 of the shares; with 0 they stay constant.

    Raises:
        ConfigurationError: for values out of range.

    Example:
        >>> APFL(mixture=0.5).names(nn.Linear(2, 1))
        ['weight', 'bias']
    """

    mixture: float = 0.5
    mixture_rate: float = 0.1

    ranges: ClassVar[dict[str, str]] = {
        "mixture": "in [0, 1]",
        "mixture_rate": "at least 0 and finite",
    }


class Mixing:
    """APFL's local steps of one client: the gradient is taken at the mixture, the personal model moves.

    Before a step the module gets the mixture v̄. After the backward pass it gets v again, with the
    gradient times α, which the optimizer then uses.

    Args:
        space: layout of the trainable parameters.
        share: w, the shared model after the client's local training, shape (k,).
        mixture: share α of the personal model.
    """

    def __init__(self, space: Space, share: Tensor, mixture: float) -> None:
        self._space, self._share, self._mixture = space, share, mixture
        self._own: Tensor | None = None
        self._slopes: list[Tensor] = []

    def steps(self, steps: Iterator[Sequence[SizedBatch]]) -> Iterator[Sequence[SizedBatch]]:
        """Yield the batches of every step, while the module holds the mixture."""
        for batches in steps:
            self._own = self._space.read()
            self._space.write(torch.lerp(self._share, self._own, self._mixture))
            yield batches
            self._put_back()  # if the step was skipped

    @torch.no_grad()
    def add(self, scale: float = 1.0) -> None:
        """Turn the gradient at the mixture into that of the personal model, and put the latter back.

        Args:
            scale: scale of the existing gradients (`torch.amp.GradScaler`).
        """
        if self._own is None:
            raise ConfigurationError(
                "APFL takes one gradient per step, and the module's optimizer evaluates its closure "
                "several times: use SGD or Adam"
            )
        away = self._own - self._share
        slope = away.new_zeros(())
        for param, active, part in self._space.entries(away):
            if param.grad is not None:
                grad = param.grad.reshape(-1)
                grad = grad if active is None else grad.index_select(0, active)
                slope += (grad.to(part.dtype) * part.reshape(-1)).sum() / scale
                param.grad.mul_(self._mixture)
        self._slopes.append(slope)
        self._put_back()

    def value(self) -> Tensor:
        """Raise ConfigurationError, because LBFGS would search along a line of the mixture's loss."""
        raise ConfigurationError("APFL does not work with LBFGS: use SGD or Adam")

    def _put_back(self) -> None:
        if self._own is not None:
            self._space.write(self._own)
            self._own = None

    def adapted(self, rate: float) -> float:
        """Return the share of the personal model for the client's next round, in [0, 1]."""
        slopes = [s for s in self._slopes if bool(s.isfinite())]
        if not slopes or not rate:
            return self._mixture
        return min(1.0, max(0.0, self._mixture - rate * float(torch.stack(slopes).mean())))


@final
@dataclass(frozen=True)
class FineTuned(Personalisation):
    """Fine-tunes the global model on each client before the client is evaluated; training is unchanged.

    The steps use a new optimizer from the module's ``configure_optimizers``, without clipping and hooks.

    Args:
        local_steps: number n ≥ 1 of fine-tuning steps.

    Raises:
        ConfigurationError: if ``local_steps`` is below 1.

    Example:
        >>> FineTuned(local_steps=10).names(nn.Linear(2, 1))
        []
    """

    local_steps: int = 10

    ranges: ClassVar[dict[str, str]] = {
        "local_steps": "at least 1: leave personal out to evaluate the global model"
    }

    @property
    def tuning_steps(self) -> int:
        """Number of local steps that fine-tune a client's model."""
        return self.local_steps

    def names(self, module: nn.Module) -> list[str]:
        """Return an empty list, because clients keep no personal parameters."""
        return []
