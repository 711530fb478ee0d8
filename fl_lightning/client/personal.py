"""Personal parameters of a client: layers of the model, or a second model beside the shared one.

    z_i: personal tensors of client i, which the server never sees
    a round of client i:   (x, z_i) → local training → Δ_i to the server, z_i⁺ stays

Personal layers are no part of the shared model x; a second model is a copy of all of x. Before its first
round a client has the values of the global model.

`Personal`: layers that stay with the client, as in FedPer, FedBN and FedRep.

    x = shared parameters,  z_i = personal parameters of client i
    FedPer, FedBN:   (y, z_i) ← local steps on both from (x, z_i);   Δ = x - y
    FedRep:          z_i ← epochs with y = x frozen;  then  y ← local steps with z_i frozen

Sources: Arivazhagan et al. 2019, "Federated Learning with Personalization Layers", Algorithms 1
and 2 (the head); Li et al. 2021, "FedBN", Algorithm 1 (normalisation layers, with their running
statistics); Collins et al. 2021, "Exploiting Shared Representations for Personalized Federated
Learning", Algorithm 1 (FedRep).
Differs: the global model, which is validated and saved, has the initial personal parameters.

`Ditto`: a second model, pulled towards the global model.

    v_i ← v_i - η (∇F_i(v_i) + λ (v_i - x))        x: the global model at the start of the round

Source: Li et al. 2021, "Ditto: Fair and Robust Federated Learning Through Personalization", ICML,
Algorithm 1.
Differs: a client's first v_i is the global model of the first round in which the client takes part (the
paper uses the initial model, which the server would have to send as well); v_i takes the same number of
local steps as the shared model, on the same batches; buffers belong to v_i.

`APFL`: every client mixes a second model with the shared one, and learns the share of each.

    v̄_i = α_i v_i + (1 - α_i) w_i                w_i: the shared model after client i's local steps
    v_i ← v_i - η α_i ∇F_i(v̄_i)                  in every local step
    α_i ← α_i - η_α ⟨∇F_i(v̄_i), v_i - w_i⟩       once per round, kept in [0, 1]

Source: Deng, Kamani, Mahdavi 2020, "Adaptive Personalized Federated Learning", Algorithm 1 and
equation 10.
Differs: v_i trains after w_i, with the final value of w_i, on the same batches; the inner product is
the mean over the round's steps and has a separate rate η_α; the first v_i is as in Ditto.

`FineTuned`: the personal model is the global one after a few steps on the client's examples.

    z_i = x after n local steps on client i's training examples, evaluated and then discarded

Source: Wang et al. 2019, "Federated Evaluation of On-device Personalization", section 3; Yu et al.
2020, "Salvaging Federated Learning by Local Adaptation", section 3 (FT).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import ClassVar, final

import torch
from torch import Tensor, nn

from fl_lightning.client.local_step import SizedBatch
from fl_lightning.core.errors import ConfigurationError, Ranged
from fl_lightning.core.modules import head_names
from fl_lightning.core.space import Space
from fl_lightning.core.traits import Trait, Traits

_OF_OWN_STEPS = Traits(
    breaks={Trait.PRIVATE_EXAMPLES: "takes further local steps, whose privacy cost is not counted"},
    instead={
        Trait.PRIVATE_EXAMPLES: "leave personal out",
        Trait.RETURNED_LOSS: "use Ditto or Personal",
    },
)


class Personalisation(Ranged, ABC):
    """Base of personalisation methods: which parameters are personal, and how clients train them.

    Attributes:
        beside: whether the personal parameters are a second model beside the shared one.
        pull: strength λ ≥ 0 of the second model's pull towards the global model.
        mixture: initial share α of the personal model in a mixture of both; None without mixing.
        mixture_rate: learning rate η_α ≥ 0 of the share α, which moves once per round.
        own_epochs: epochs that train only the personal part, before the shared part trains; None to train
            both together.
    """

    beside: bool = False
    pull: float = 0.0
    mixture: float | None = None
    mixture_rate: float = 0.0
    own_epochs: int | None = None

    @property
    def tuning_steps(self) -> int:
        """Number of local steps that fine-tune the global model before a client is evaluated."""
        return 0

    @property
    def traits(self) -> Traits:
        """Conditions on a round that the personalisation needs or breaks, to detect conflicting options."""
        needs, ways = {}, {}
        if self.mixture is not None:
            needs[Trait.RETURNED_LOSS] = "takes gradients at a mixture of two models"
        elif self.own_epochs is not None:
            needs[Trait.RETURNED_LOSS] = (
                "freezes one part after the other (own_epochs), so that one optimizer has nothing to train"
            )
            ways[Trait.RETURNED_LOSS] = "leave own_epochs out"
        elif self.tuning_steps > 0:
            needs[Trait.RETURNED_LOSS] = "takes further local steps on the loss"
        return _OF_OWN_STEPS | Traits(needs, {}, ways)

    @abstractmethod
    def names(self, module: nn.Module) -> list[str]:
        """Return the names of the personal parameters and buffers in a module.

        Raises:
            ConfigurationError: if the module does not fit.
        """


@final
@dataclass(frozen=True)
class Personal(Personalisation):
    """Parameters and buffers that stay with each client and are never sent.

    Args:
        parameters: patterns of names, with ``*`` and ``?``; each must match a parameter's or buffer's
            name, or the part after one of its dots: ``head.*`` matches ``network.head.weight``.
        head: add the classifier, if the network has ``get_classifier`` as timm's networks do.
        norms: add the parameters and buffers of all normalisation layers (FedBN).
        own_epochs: epochs that train only personal parameters, at the start of a client's round; its local
            steps then train only shared parameters (FedRep). With 0 personal parameters never train. None
            trains both together.

    Raises:
        ConfigurationError: at the start of the fit, if a pattern or option matches nothing.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))
        >>> Personal(parameters=["2.*"]).names(model)
        ['2.weight', '2.bias']
        >>> Personal(norms=True).names(model)
        ['1.weight', '1.bias', '1.running_mean', '1.running_var', '1.num_batches_tracked']
    """

    parameters: Sequence[str] = field(default_factory=list)
    head: bool = False
    norms: bool = False
    own_epochs: int | None = None

    ranges: ClassVar[dict[str, str]] = {
        "own_epochs": "at least 0, or null to train everything together"
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.parameters, str):
            raise ConfigurationError(
                f"Personal: parameters is a list of patterns, got {self.parameters!r}: write "
                f"[{self.parameters}]"
            )
        if not (self.parameters or self.head or self.norms):
            raise ConfigurationError(
                f"Personal: parameters must name the parameters that stay with a client, got "
                f"{list(self.parameters)}: name some, or set head or norms to true"
            )

    def names(self, module: nn.Module) -> list[str]:
        """Return the names of the personal tensors, parameters first.

        Raises:
            ConfigurationError: if a pattern matches nothing, a normalisation layer or classifier is
                missing, or none of the named parameters is trainable.
        """
        found = {t for pattern in self.parameters for t in _matching(module, pattern)}
        if self.head:
            found |= {t for name in _heads(module) for t in _tensors(module.get_submodule(name))}
        if self.norms:
            found |= set(_norm_tensors(module))
        params = [(name, p) for name, p in module.named_parameters() if p in found]
        buffers = [(name, b) for name, b in module.named_buffers() if b in found]
        needs_training = not buffers or self.own_epochs is not None
        if found and needs_training and not any(p.requires_grad for _, p in params):
            raise ConfigurationError(
                f"Personal: all parameters that it names are frozen (requires_grad is False), e.g. "
                f"{(*params, *buffers)[0][0]}: unfreeze them, or name other parameters"
            )
        return [name for name, _ in (*params, *buffers)]


def _tensors(module: nn.Module, *, recurse: bool = True) -> Iterator[nn.Parameter]:
    yield from module.parameters(recurse)
    yield from module.buffers(recurse)  # type: ignore[misc]


def name_matches(name: str, pattern: str) -> bool:
    """Return whether a name, or its part after any dot, matches a pattern with ``*`` and ``?``."""
    parts = name.split(".")
    return any(fnmatchcase(".".join(parts[i:]), pattern) for i in range(len(parts)))


def _matching(module: nn.Module, pattern: str) -> list[nn.Parameter]:
    # a tied parameter has several names, of which any will do
    params = list(module.named_parameters(remove_duplicate=False))
    buffers = list(module.named_buffers(remove_duplicate=False))
    found = [t for name, t in (*params, *buffers) if name_matches(name, pattern)]
    if not found:
        names = [name for name, _ in (*params, *buffers)]
        shown = ", ".join(names[:20]) + (f", … ({len(names)} in all)" if len(names) > 20 else "")
        raise ConfigurationError(
            f"Personal: parameters: no parameter or buffer matches {pattern!r}; there are {shown}"
        )
    return found  # type: ignore[return-value]


def _heads(module: nn.Module) -> list[str]:
    names = head_names(module)
    if not names:
        raise ConfigurationError(
            f"Personal: head is set, but {type(module).__name__} does not say which layer is its head (no "
            "get_classifier): leave head out, and name its parameters in parameters, e.g. [head.*]"
        )
    return names


def _norm_tensors(module: nn.Module) -> list[nn.Parameter]:
    # by name, as networks bring normalisation layers of their own
    norms = [child for child in module.modules() if "norm" in type(child).__name__.lower()]
    found = [t for child in norms for t in _tensors(child, recurse=False)]
    if not found:
        raise ConfigurationError(
            f"Personal: norms is set, but {type(module).__name__} has no normalisation layer with "
            "parameters or buffers: leave it out"
        )
    return found


class _Beside(Personalisation):
    """Base of personalisations in which each client also has a complete second model."""

    beside = True

    def names(self, module: nn.Module) -> list[str]:
        """Return the names of all trainable parameters and all buffers."""
        params = [name for name, p in module.named_parameters() if p.requires_grad]
        return [*params, *(name for name, _ in module.named_buffers())]


@final
@dataclass(frozen=True)
class Ditto(_Beside):
    """Ditto: trains a personal model for every client, pulled towards the global model.

    The global model is bit-identical to that of a run without Ditto. A client's round takes twice as long.

    Args:
        pull: strength λ ≥ 0 of the pull; with 0 the personal models train independently. Use a learning
            rate η with η λ < 2; otherwise training diverges.

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
    """APFL: evaluates every client on a learnt mixture of a personal model and the shared one.

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
    """APFL's local steps for a client's personal model, with gradients taken at the mixture with the shared model.

    During forward and backward pass the module has the weights of the mixture v̄. Before the optimizer
    steps, the module gets the personal model v again, and gradients are multiplied by α.

    Args:
        space: layout of the trainable parameters.
        shared: w, the shared model after the client's local training, shape (k,).
        mixture: share α of the personal model.
    """

    def __init__(self, space: Space, shared: Tensor, mixture: float) -> None:
        self._space, self._shared, self._mixture = space, shared, mixture
        self._own: Tensor | None = None
        self._slopes: list[Tensor] = []

    def steps(self, steps: Iterator[Sequence[SizedBatch]]) -> Iterator[Sequence[SizedBatch]]:
        """Yield the batches of each step; before each step, load the mixture of both models into the module."""
        for batches in steps:
            self._own = self._space.read()
            self._space.write(torch.lerp(self._shared, self._own, self._mixture))
            yield batches
            self._restore_own()  # if the step was skipped

    @torch.no_grad()
    def add(self, scale: float = 1.0) -> None:
        """Convert gradients at the mixture to gradients of the personal model, and load the personal model's weights.

        Args:
            scale: scale of the existing gradients (`torch.amp.GradScaler`).
        """
        if self._own is None:
            raise ConfigurationError(
                "APFL takes one gradient per step, and the module's optimizer evaluates its closure "
                "several times: use SGD or Adam"
            )
        away = self._own - self._shared
        slope = away.new_zeros(())
        for param, active, part in self._space.entries(away):
            if param.grad is not None:
                grad = param.grad.reshape(-1)
                grad = grad if active is None else grad.index_select(0, active)
                slope += (grad.to(part.dtype) * part.reshape(-1)).sum() / scale
                param.grad.mul_(self._mixture)
        self._slopes.append(slope)
        self._restore_own()

    def value(self) -> Tensor:
        """Raise ConfigurationError, because APFL does not support LBFGS."""
        raise ConfigurationError("APFL does not work with LBFGS: use SGD or Adam")

    def _restore_own(self) -> None:
        if self._own is not None:
            self._space.write(self._own)
            self._own = None

    def adapted(self, rate: float) -> float:
        """Return α, the personal model's share of the mixture, after one gradient step on α, in [0, 1]."""
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
