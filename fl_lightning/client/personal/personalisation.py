"""Personal parameters of a client: part of the model, or a second model besides the shared one.

    z_i: personal tensors of client i, one vector, which the server never sees
    a round of client i:   (x, z_i) → local training → Δ_i to the server, z_i⁺ stays

Personal parts of the model are missing in x; a second model is a copy of all of x. Before its first
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
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import ClassVar, final

from torch import nn

from fl_lightning.core.errors import ConfigurationError, Ranged
from fl_lightning.core.modules import head_names
from fl_lightning.core.traits import Trait, Traits

_OF_OWN_STEPS = Traits(
    breaks={Trait.PRIVATE_EXAMPLES: "takes steps that would cost as well, and which nobody counts"},
    instead={
        Trait.PRIVATE_EXAMPLES: "leave personal out",
        Trait.RETURNED_LOSS: "use Ditto or Personal",
    },
)


class Personalisation(Ranged, ABC):
    """Base of personalisations: which parameters are personal, and how clients train them.

    Attributes:
        beside: whether the personal parameters are a second model besides the shared one.
        pull: strength λ ≥ 0 of the pull of a second model towards the global model.
        mixture: initial share α of the personal model in a mixture of both; None without mixing.
        mixture_rate: learning rate η_α ≥ 0 of the share α, which takes one step after a round.
        own_epochs: epochs of the personal part alone before the shared part trains; None for both together.
    """

    beside: bool = False
    pull: float = 0.0
    mixture: float | None = None
    mixture_rate: float = 0.0
    own_epochs: int | None = None

    @property
    def tuning_steps(self) -> int:
        """Number of fine-tuning steps from the global model before a client is evaluated."""
        return 0

    @property
    def traits(self) -> Traits:
        """Traits of the personalisation; they follow from the other properties."""
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
        own_epochs: epochs in which only personal parameters train, before the local steps of a round,
            in which only shared ones train (FedRep); with 0 personal parameters never train. None trains
            both together.

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
        """Names of the personal tensors, parameters first.

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
                f"Personal: {(*params, *buffers)[0][0]} and all else that is named does not train "
                "(requires_grad is False): unfreeze it, or name other parameters"
            )
        return [name for name, _ in (*params, *buffers)]


def _tensors(module: nn.Module, *, recurse: bool = True) -> Iterator[nn.Parameter]:
    yield from module.parameters(recurse)
    yield from module.buffers(recurse)  # type: ignore[misc]


def name_matches(name: str, pattern: str) -> bool:
    """Return whether a pattern with ``*`` and ``?`` matches a name, or the part after one of its dots."""
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
