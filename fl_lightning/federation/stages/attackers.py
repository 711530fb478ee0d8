"""Simulated attackers, to test defences."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, final

import numpy as np

from fl_lightning.core.errors import ConfigurationError, Ranged
from fl_lightning.core.seeds import check_seed, numpy_generator, run_seed
from fl_lightning.core.traits import Trait, Traits
from fl_lightning.data.client_examples import Poison
from fl_lightning.data.federated import FederatedDataModule
from fl_lightning.server.aggregator import Aggregator
from fl_lightning.server.attacks import Forged, Forgery
from fl_lightning.server.robust.rule import RobustRule

_OF_ATTACKS = Traits(
    needs={Trait.SIMULATION: "are simulated only"},
    breaks={Trait.PRIVATE_CLIENTS: "send updates for which no ε is proved"},
    instead=dict.fromkeys((Trait.SIMULATION, Trait.PRIVATE_CLIENTS), "leave attackers out"),
)
_OF_FORGERY = Traits(
    needs={Trait.SINGLE_UPDATES: "make updates by looking at those of all clients (forge)"},
    instead={Trait.SINGLE_UPDATES: "use attackers.poison, or the aggregator Mean"},
)


@final
@dataclass(frozen=True, kw_only=True)
class Attackers(Ranged):
    """Simulated attackers: their number or ids, and their attacks on examples, on updates or on both.

    Args:
        fraction: fraction of all clients that attack, in [0, 1]; the number of clients is rounded.
        poison: change of the attackers' training examples, e.g. `LabelFlip`, `Trigger`.
        forge: change of the attackers' updates, e.g. `SignFlip`, `ALIE`.
        spared: clients that stay honest, e.g. the client that `FLTrust` trusts.
        seed: seed of the choice of attackers and of all other draws; the run's seed if None.

    Raises:
        ConfigurationError: for a fraction out of range.

    Example:
        >>> Attackers(fraction=0.3, seed=0, spared=[0]).choose(10)
        [1, 2, 6]
    """

    fraction: float
    poison: Poison | None = None
    forge: Forgery | None = None
    spared: list[int] = field(default_factory=list)
    seed: int | None = None

    ranges: ClassVar[dict[str, str]] = {
        "fraction": "in [0, 1]: it is the part of the clients that attack"
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        check_seed("attackers", self.seed)

    @property
    def traits(self) -> Traits:
        """Conditions on a round with attackers: a simulation without privacy; forging also needs single updates."""
        return _OF_FORGERY | _OF_ATTACKS if self.forge is not None else _OF_ATTACKS

    def choose(self, num_clients: int) -> list[int]:
        """Draw the attackers among the clients, and return their sorted ids.

        Raises:
            ConfigurationError: if a fraction above 0 is less than one client, or more than those not spared.
        """
        unknown = [client for client in self.spared if not 0 <= client < num_clients]
        if unknown:
            raise ConfigurationError(
                f"federation.attackers.spared must be client ids from 0 to {num_clients - 1}, got {unknown[0]}"
            )
        others = np.setdiff1d(np.arange(num_clients), self.spared)
        count = round(self.fraction * num_clients)
        if self.fraction and not count:
            raise ConfigurationError(
                f"federation.attackers: a fraction of {self.fraction} of {num_clients} clients is less than one "
                "attacker: raise it, or leave attackers out"
            )
        if count > len(others):
            raise ConfigurationError(
                f"federation.attackers: {count} of {num_clients} clients are to attack, but only {len(others)} are "
                "not spared: lower the fraction or spare fewer"
            )
        generator = numpy_generator(run_seed(self.seed), "attackers")
        chosen: list[int] = sorted(generator.choice(others, count, replace=False).tolist())
        return chosen

    def enter(self, data: FederatedDataModule) -> None:
        """Poison the attackers' training data, until `FederatedDataModule.poison` is called again."""
        if self.poison is None and self.forge is None:
            raise ConfigurationError(
                "federation.attackers: set poison, forge or both, because without them there is no attack"
            )
        if self.poison is not None:
            data.poison(self.choose(len(data.clients)), self.poison, run_seed(self.seed))

    def wrap(self, aggregator: Aggregator, num_clients: int) -> Aggregator:
        """Return the aggregator; if `forge` is set, wrapped so that it receives forged updates from the attackers.

        Raises:
            ConfigurationError: if the client that the server trusts is an attacker.
        """
        chosen = self.choose(num_clients)
        rule = aggregator
        if isinstance(rule, RobustRule) and rule.trusted_client in chosen:
            raise ConfigurationError(
                f"{type(rule).__name__} trusts client {rule.trusted_client}, which is one of the attackers: set "
                f"attackers.spared to [{rule.trusted_client}]"
            )
        if self.forge is None:
            return aggregator
        return Forged(aggregator, self.forge, chosen, run_seed(self.seed))
