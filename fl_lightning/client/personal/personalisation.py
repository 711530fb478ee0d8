"""Personal parameters of a client: part of its model, or a model beside the shared one.

    z_i: client i's own tensors, one vector, which the server never sees
    a round of client i:   (x, z_i) → local training → Δ_i to the server, z_i⁺ stays

Where they are part of the model, x lacks them; where they are a copy of it, x is whole. A client
that has not yet taken part has the global model's.

`Personal`: layers that stay with the client, as in FedPer, FedBN and FedRep.

    x = shared parameters,  z_i = client i's own
    FedPer, FedBN:   (y, z_i) ← local steps on both from (x, z_i);   Δ = x - y
    FedRep:          z_i ← epochs with y = x frozen;  then  y ← local steps with z_i frozen

Sources: Arivazhagan et al. 2019, "Federated Learning with Personalization Layers", Algorithms 1
and 2 (the head); Li et al. 2021, "FedBN", Algorithm 1 (normalisation layers, with their running
statistics); Collins et al. 2021, "Exploiting Shared Representations for Personalized Federated
Learning", Algorithm 1 (FedRep).
Differs: the global model, which is validated and saved, has the initial own parameters.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import final

from torch import nn

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.modules import head_names
from fl_lightning.core.traits import Trait, Traits

_OF_OWN_STEPS = Traits(
    breaks={Trait.PRIVATE_EXAMPLES: "takes steps that would cost as well, and which nobody counts"},
    instead={
        Trait.PRIVATE_EXAMPLES: "leave personal out",
        Trait.RETURNED_LOSS: "use Ditto or Personal",
    },
)


class Personalisation(ABC):
    """Which parameters are personal and how clients train them; subclasses are frozen and hold no state."""

    @property
    def beside(self) -> bool:
        """True if it is a copy of the model beside the shared one."""
        return False

    @property
    def pull(self) -> float:
        """λ ≥ 0, with which a copy is pulled to the global model while it trains."""
        return 0.0

    @property
    def mixture(self) -> float | None:
        """α with which clients begin that mix both models in every step; None if they do not."""
        return None

    @property
    def mixture_rate(self) -> float:
        """By how much of its slope α moves after a round, ≥ 0."""
        return 0.0

    @property
    def own_epochs(self) -> int | None:
        """Passes in which a client trains only its own part, before it trains only the shared part.

        None to train both together.
        """
        return None

    @property
    def tuning_steps(self) -> int:
        """Local steps on the client's examples from the global model, when it is evaluated."""
        return 0

    @property
    def traits(self) -> Traits:
        """Traits of the personal model; they follow from how a client trains its own part."""
        needs, ways = {}, {}
        if self.mixture is not None:
            needs[Trait.RETURNED_LOSS] = "takes gradients at a mixture of two models"
        elif self.own_epochs is not None:
            needs[Trait.RETURNED_LOSS] = (
                "freezes one part after the other (own_epochs), so that one optimizer has nothing to train"
            )
            ways[Trait.RETURNED_LOSS] = "leave own_epochs out"
        elif self.tuning_steps > 0:
            needs[Trait.RETURNED_LOSS] = "takes steps of its own on the loss"
        return _OF_OWN_STEPS | Traits(needs, {}, ways)

    @abstractmethod
    def names(self, module: nn.Module) -> list[str]:
        """Return the names of a client's own parameters and buffers in a module.

        Raises:
            ConfigurationError: for a module with which it makes no sense.
        """


@final
@dataclass(frozen=True)
class Personal(Personalisation):
    """Parameters and buffers that stay with each client and are never sent.

    Args:
        parameters: patterns of names, with ``*`` and ``?``; each must match the name of a
            parameter or buffer, or what follows a dot in it: ``head.*`` finds
            ``network.head.weight``.
        head: also the classifier, where the network says which it is (timm's do).
        norms: also parameters and buffers of all normalisation layers (FedBN).
        own_epochs: passes over the client's examples in which only its own parameters train,
            before a round's local steps, in which then only the others do (FedRep); 0 leaves them
            as they are. None trains both together.

    Raises:
        ConfigurationError: at the start of the fit, if something that is named is not there.

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

    def __post_init__(self) -> None:
        if isinstance(self.parameters, str):
            raise ConfigurationError(
                f"Personal: parameters is a list of patterns, got {self.parameters!r}: write "
                f"[{self.parameters}]"
            )
        if not (self.parameters or self.head or self.norms):
            raise ConfigurationError(
                f"Personal: parameters must name what stays with a client, got {list(self.parameters)}: "
                "name some, or set head or norms to true"
            )
        if self.own_epochs is not None and self.own_epochs < 0:
            raise ConfigurationError(
                f"Personal: own_epochs must be at least 0, or null to train everything together, "
                f"got {self.own_epochs}"
            )

    def names(self, module: nn.Module) -> list[str]:
        """Names of the personal tensors, parameters first.

        Raises:
            ConfigurationError: if a pattern matches nothing, if there is no normalisation layer
                or no known head although they are to stay, or if nothing of all that trains.
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
                f"Personal: {(*params, *buffers)[0][0]} and all else that is named does not train "
                "(requires_grad is False): unfreeze it, or name other parameters"
            )
        return [name for name, _ in (*params, *buffers)]


def _tensors(module: nn.Module, *, recurse: bool = True) -> Iterator[nn.Parameter]:
    yield from module.parameters(recurse)
    yield from module.buffers(recurse)  # type: ignore[misc]


def name_matches(name: str, pattern: str) -> bool:
    """Return whether a pattern with ``*`` and ``?`` fits a name, whole or after a dot."""
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
            f"Personal: {type(module).__name__} does not say which layer is its head (no "
            "get_classifier): name its parameters in parameters, e.g. [head.*]"
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
