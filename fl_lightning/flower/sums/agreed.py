"""What all parties of one secure sum agree on, as it travels with every order of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from hashlib import sha256
from typing import Any

from fl_lightning.core.container import write
from fl_lightning.flower.messages import Order
from fl_lightning.secure.protocol.keys import Directory
from fl_lightning.secure.protocol.session import ProtocolStage, Session, SparseGraph
from fl_lightning.secure.secure_sum import SecureSum

# names of the messages in orders and in answers
TO_CLIENT, FROM_CLIENT = "stage/sum/{}", "stage/sum/message"
TRAINED_ON = "trained_on"  # beside the rules of vectors that are kept


@dataclass(frozen=True)
class Agreed:
    """A session and its clients.

    Args:
        session: of the protocol.
        clients: in the order of their places.
        sites: of each of them.

    Raises:
        ValueError: if there are not as many of each, or a client twice.
    """

    session: Session
    clients: tuple[int, ...]
    sites: tuple[str, ...]

    def __post_init__(self) -> None:
        number = self.session.num_clients
        if not len(set(self.clients)) == len(self.clients) == len(self.sites) == number:
            raise ValueError(
                f"the session is of {number} clients, got {len(self.clients)} at {len(self.sites)} sites"
            )

    def place(self, client: int) -> int:
        """Return the place of a client; ValueError if it has none."""
        return self.clients.index(client)

    def directory(self, keys: Mapping[str, bytes]) -> Directory | None:
        """Return the signing keys by place, given those of sites; None where nothing is signed."""
        if not self.session.active:
            return None
        return Directory({at: keys.get(site, b"") for at, site in enumerate(self.sites)})

    def options(self, stage: ProtocolStage) -> dict[str, Any]:
        """Return it as plain JSON, with the stage that an order is about."""
        return {
            "session": asdict(self.session),
            "clients": list(self.clients),
            "sites": list(self.sites),
            "stage": int(stage),
        }

    @classmethod
    def of_options(cls, options: Mapping[str, Any]) -> tuple[Agreed, ProtocolStage]:
        """Return what `options` wrote.

        Raises:
            ValueError: if it cannot have.
        """
        parts: list[Any] = [options.get(name) for name in ("session", "clients", "sites")]
        session, clients, sites = parts
        known = {field.name for field in fields(Session)}
        if not isinstance(session, Mapping) or session.keys() != known:
            raise ValueError("there is no session, or one of another version")
        for name, value in session.items():
            optional = value is None and name in ("num_neighbours", "min_survivors")
            kind = {"run": str, "purpose": str, "active": bool}.get(name, int)
            if not optional and type(value) is not kind:
                raise ValueError(f"{name} of the session is {value!r}")
        if not _all_of(clients, int) or not _all_of(sites, str):
            raise ValueError("clients and their sites must be lists of ids and of names")
        return cls(Session(**session), tuple(clients), tuple(sites)), ProtocolStage(
            options.get("stage", -1)
        )


def rules_of(secure_sum: SecureSum) -> dict[str, Any]:
    """Return, as plain JSON, what a configuration says of its sums."""
    return {name: value for name, value in asdict(secure_sum).items() if name != "run"}


def trained_on(order: Order) -> str:
    """Return the SHA-256 of what clients train on: run, round, configuration, model, options.

    Every hidden sum is bound to it, whatever its scheme. Vectors that were trained on something else are in no
    sum together: a server could have all clients but one train nothing.
    """
    about = {"run": order.run, "round": order.round, "configuration": order.configuration}
    return sha256(
        write("order", {**about, "options": dict(order.options)}, order.tensors)
    ).hexdigest()


def session_by(rules: Mapping[str, Any], given: Session) -> Session:
    """Return the session that a site has where a server gave one: equal, if it is honest.

    A server that had its own way with thresholds, signatures or neighbours could open more than sums; see also
    `trained_on`.

    Example:
        >>> from dataclasses import replace
        >>> rules = rules_of(SecureSum(bits=20))
        >>> given = Session(run="demo", round_index=0, num_clients=6, size=3, threshold=5, bits=20)
        >>> session_by(rules, given) == given
        True
        >>> lax = replace(given, threshold=4)
        >>> session_by(rules, lax) == lax
        False
    """
    rules = dict(rules)
    purpose, sparse = rules.pop(TRAINED_ON, ""), rules["sparse"]
    graph = None if sparse is None else SparseGraph(**sparse)
    secure_sum = SecureSum(**{**rules, "sparse": graph, "run": given.run})
    session = secure_sum.session(
        given.num_clients,
        size=given.size,
        round_index=given.round_index,
        graph_seed=given.graph_seed,
    )
    return replace(session, purpose=purpose)


def _all_of(values: Any, kind: type) -> bool:
    return isinstance(values, list) and all(type(value) is kind for value in values)
