"""The name, the data and the permissions of a site, by its ``site.yaml``, which only the site's people write.

    name: hospital_a
    server: fl.example.org:8443  # where it connects to
    clients: [3, 4]              # global ids; or {3: 0, 4: 1}, to the places in the site's own data
    socket: site.sock            # beside this file, unless the path is absolute
    memory: memory               # folder of what clients remember between rounds
    fewest_in_secure_sum: 3      # clients, this site's among them
    most_epsilon: {epsilon: 1.0, delta: 1.0e-5, per: year} # of each client, over all runs; a number alone: for
                                 # ever, at δ 1e-5; null: also runs without privacy
    log_unprotected: false       # whether metrics and norms leave that clients' noise does not cover
    metrics: ["*"]               # patterns of the names that may leave
    most_bytes: 2000000000       # of an order
    most_steps: 100000           # of a client in an order
    most_parameters: 2000000000  # of a model
    most_minutes: 720            # of an order
    classes: [my_project.*]      # that may be built, beside those of `class_paths.DEFAULT`
    signing_key: signing.key     # 32 bytes; signs what the site says in secure sums
    sum_key: sum.key             # 32 bytes that all sites share and the server never has, for EncryptedMean
    peers: {hospital_a: …}       # public signing keys of all sites, as `network init` wrote them

The first four must be there.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

from fl_lightning.core.errors import ConfigurationError, raise_together
from fl_lightning.core.plain_json import MessageError, shown
from fl_lightning.core.yaml_files import read
from fl_lightning.flower.class_paths import DEFAULT, Refused, checked
from fl_lightning.flower.layers import laid_over, shared_part, without_callbacks
from fl_lightning.flower.messages import check_site
from fl_lightning.flower.site.ledger import PrivacyBudget

__all__ = ["Policy", "Refused"]

KEY_SIZE = 32  # bytes
MOST_THREADS, MOST_ROUNDS, MOST_CLIENTS = 64, 1_000_000, 10_000_000
MOST_SOCKET_CHARACTERS = 100  # the system's limit is 107 bytes
_KEY = re.compile(r"[0-9a-f]{64}")
_PATTERN = re.compile(r"[^\W\d]\w*(\.\w+)*(\.\*)?")


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Policy of a site: its clients and its permissions.

    Attributes:
        name: of the site.
        server: where it connects to, ``host:port``.
        clients: by global id, the client's place in the site's own data.
        socket: where the site's resident process listens.
        memory: folder of what its clients remember.
        fewest_in_secure_sum: clients of a secure sum, at least 2: with fewer it hides too little.
        most_epsilon: that each client of this site may spend, over all runs of a period, see
            `PrivacyBudget`; None for no limit, and then runs without privacy are allowed too.
        log_unprotected: whether metrics and norms may leave that the clients' noise does not cover.
        metrics: patterns (``*``, ``?``) of names of metrics and facts that may leave.
        most_bytes: of an order.
        most_steps: local steps, or batches, of a client in an order.
        most_parameters: numbers in the tensors that the model is built of.
        most_minutes: that an order may take, and the set-up of a run.
        classes: patterns of class paths that an order may have built, see `class_paths`. In a file
            they come on top of the default.
        signing_key: file of the key, 32 bytes, with which the site signs what it says in secure sums.
        sum_key: file of the key, 32 bytes, that all sites share and the server never has, for EncryptedMean.
        peers: public signing keys of all sites, this one's too, by name, 64 hexadecimal digits each.
        seeded_noise: whether noise comes from the seed where a run says ``secure_noise: false``, so that
            the server can take it off: for tests that compare a network with its simulation.

    Raises:
        ConfigurationError: for values out of range, all of them at once.
    """

    name: str
    clients: Mapping[int, int]
    socket: Path
    memory: Path
    server: str = ""
    fewest_in_secure_sum: int = 3
    most_epsilon: PrivacyBudget | None = None
    log_unprotected: bool = False
    metrics: tuple[str, ...] = ("*",)
    most_bytes: int = 2_000_000_000
    most_steps: int = 100_000
    most_parameters: int = 2_000_000_000
    most_minutes: int = 720
    classes: tuple[str, ...] = DEFAULT
    signing_key: Path | None = None
    sum_key: Path | None = None
    peers: Mapping[str, str] = field(default_factory=dict)
    seeded_noise: bool = False

    def __post_init__(self) -> None:
        raise_together(
            partial(_check_name, self.name),
            partial(_check_clients, self.clients),
            partial(_check_socket, self.socket),
            partial(_check_whole, "fewest_in_secure_sum", self.fewest_in_secure_sum, 2, "clients"),
            partial(_check_budget, self.most_epsilon, self.seeded_noise),
            partial(_check_yes, "log_unprotected", self.log_unprotected),
            partial(_check_yes, "seeded_noise", self.seeded_noise),
            partial(_check_texts, "metrics", self.metrics),
            partial(_check_whole, "most_bytes", self.most_bytes, 1, "bytes"),
            partial(_check_whole, "most_steps", self.most_steps, 1, "steps"),
            partial(_check_whole, "most_parameters", self.most_parameters, 1, "numbers"),
            partial(_check_whole, "most_minutes", self.most_minutes, 1, "minutes"),
            partial(_check_patterns, self.classes),
            partial(_check_peers, self.peers),
            partial(_check_key_file, "signing_key", self.signing_key),
            partial(_check_key_file, "sum_key", self.sum_key),
        )

    @property
    def public_key(self) -> str:
        """The public half of the signing key, 64 hexadecimal digits; empty if there is no key."""
        if self.signing_key is None:
            return ""
        # not above: without a key a site needs no cryptography
        from fl_lightning.secure.protocol.keys import SigningKey

        return SigningKey(self.signing_key.read_bytes()).public.hex()

    @property
    def sum_key_fingerprint(self) -> str:
        """Equal at sites whose `sum_key` is the same; empty if there is none."""
        if self.sum_key is None:
            return ""
        from fl_lightning.flower.sums import SumKey

        return SumKey(self.sum_key).fingerprint

    def check_configuration(self, configuration: Mapping[str, Any]) -> dict[str, Any]:
        """Refuse a configuration that names a class that may not be built; import none before.

        Args:
            configuration: the command line's, as nested mappings.

        Returns:
            It with full paths instead of the short names of fl_lightning's classes.

        Raises:
            Refused: naming the option and the path.
        """
        found: dict[str, Any] = checked(dict(configuration), self.classes)
        return found

    def site_configuration(
        self, shared: Mapping[str, Any], own: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Configuration that the site trains with: its own layer over the server's options.

        Options that are the site's own, see `fl_lightning.flower.layers`, are dropped from the shared
        configuration; what is left of it is checked. The site's own layer is not: it is trusted.

        Args:
            shared: the run's configuration, as the server has it.
            own: the site's, with its data, devices and precision.

        Raises:
            Refused: if what is left of the shared one names a class that may not be built, or has a number
                that is too large.
        """
        lower = self.check_configuration(shared_part(shared))
        for place, most in (
            (("num_threads",), max(MOST_THREADS, os.cpu_count() or 1)),
            (("trainer", "max_epochs"), MOST_ROUNDS),
            (("federation", "local_steps"), self.most_steps),
        ):
            given: Any = lower
            for name in place:
                given = given.get(name) if isinstance(given, dict) else None
            check_most(".".join(place), given, most)
        merged: dict[str, Any] = laid_over(lower, without_callbacks(own))
        return merged

    def allows_metric(self, name: str) -> bool:
        """True if a metric or fact of this name may leave the site."""
        return any(fnmatchcase(name, pattern) for pattern in self.metrics)

    def check_secure_sum(self, num_clients: int) -> None:
        """Refuse a secure sum over too few clients.

        Raises:
            Refused: with both numbers.
        """
        if num_clients < self.fewest_in_secure_sum:
            raise Refused(
                f"fewest_in_secure_sum is {self.fewest_in_secure_sum} at this site, and the sum is "
                f"over {num_clients} clients: ask larger cohorts"
            )

    def check_unprotected(self, what: str) -> None:
        """Refuse a release without the clients' own noise, if their privacy has a limit.

        Args:
            what: would show it.

        Raises:
            Refused: naming it.
        """
        if self.most_epsilon is not None:
            raise Refused(
                f"most_epsilon is {self.most_epsilon} at this site, and {what} shows clients without noise "
                "that they add themselves: use LocalDP, or DistributedDP with SecureMean"
            )

    def clients_here(self, asked: tuple[int, ...]) -> list[int]:
        """Return the local places of clients that are asked.

        Raises:
            Refused: if one is not at this site.
        """
        if others := [client for client in asked if client not in self.clients]:
            raise Refused(
                f"clients: {shown(others)} are not at this site, which has "
                f"{shown(sorted(self.clients))}"
            )
        return [self.clients[client] for client in asked]


def check_most(what: str, number: Any, most: float) -> None:
    """Refuse a number above a site's limit; text that is one, too."""
    try:
        given = float(number or 0)
    except (TypeError, ValueError):
        return  # the parser says what is wrong
    if not given <= most:
        raise Refused(f"{what} is {given:g} in the server's configuration, at most {most} here")


def _check_name(name: Any) -> None:
    try:
        check_site(name)
    except MessageError as error:
        raise ConfigurationError(f"name: {error}") from None


def _check_clients(clients: Any) -> None:
    is_table = isinstance(clients, Mapping) and len(clients) > 0
    numbers = [*clients.keys(), *clients.values()] if is_table else [None]
    if any(type(n) is not int or n < 0 for n in numbers):
        raise ConfigurationError(
            "clients must be a list of global ids, or a mapping from them to places in the site's "
            f"data, whole numbers from 0, at least one, got {shown(clients)}"
        )
    if len(set(clients.values())) < len(clients):
        raise ConfigurationError(f"clients must have places of their own, got {shown(clients)}")


def _check_peers(peers: Any) -> None:
    is_table = isinstance(peers, Mapping) and all(type(key) is str for key in peers.values())
    if not is_table or not all(_KEY.fullmatch(key) for key in peers.values()):
        raise ConfigurationError(
            "peers must be a mapping from names of sites to 64 hexadecimal digits each, got "
            f"{shown(peers)}"
        )


def _check_key_file(name: str, file: Any) -> None:
    if file is None:
        return
    is_path = isinstance(file, Path)
    if not is_path or not file.is_file() or file.stat().st_size != KEY_SIZE:
        raise ConfigurationError(
            f"{name} must be a file of {KEY_SIZE} bytes, as network init writes it, got "
            f"{str(file) if is_path else shown(file)}"
        )


def _check_socket(socket: Path) -> None:
    if len(str(socket).encode()) > MOST_SOCKET_CHARACTERS:
        raise ConfigurationError(
            f"socket: {str(socket)!r} has more than {MOST_SOCKET_CHARACTERS} characters, which a Unix "
            "socket cannot have: give a shorter path"
        )


def _check_whole(name: str, value: Any, least: int, unit: str) -> None:
    if type(value) is not int or value < least:
        raise ConfigurationError(
            f"{name} must be a whole number of {unit}, at least {least}, got {shown(value)}"
        )


def _check_budget(budget: Any, seeded_noise: Any) -> None:
    if budget is not None and not isinstance(budget, PrivacyBudget):
        PrivacyBudget.of(budget)
        raise ConfigurationError(f"most_epsilon must be a PrivacyBudget, got {shown(budget)}")
    if budget is not None and seeded_noise:
        raise ConfigurationError("seeded_noise protects nobody: leave it out, or most_epsilon")


def _check_yes(name: str, value: Any) -> None:
    if type(value) is not bool:
        raise ConfigurationError(f"{name} must be true or false, got {shown(value)}")


def _check_texts(name: str, texts: Any) -> None:
    if type(texts) is not tuple or any(type(text) is not str or not text for text in texts):
        raise ConfigurationError(f"{name} must be a list of texts, got {shown(texts)}")


def _check_patterns(patterns: Any) -> None:
    _check_texts("classes", patterns)
    for pattern in patterns:
        if not _PATTERN.fullmatch(pattern) or "." not in pattern:
            raise ConfigurationError(
                "classes must be full paths like my_project.Net, or packages like my_project.*, got "
                f"{shown(pattern)}"
            )


def read_policy(path: str | Path) -> Policy:
    """Return the policy in a file.

    Raises:
        ConfigurationError: if it cannot be read or does not say what it must.
    """
    given = read(Path(path), "", remedy="fl-lightning network init writes one")
    known = [field.name for field in fields(Policy)]
    if unknown := sorted(map(str, given.keys() - set(known))):
        close = difflib.get_close_matches(unknown[0], known, n=1)
        advice = f"Did you mean {close[0]!r}?" if close else f"There are {', '.join(known)}."
        raise ConfigurationError(f"{path}: {unknown[0]!r} is not known. {advice}")
    if missing := [n for n in ("name", "clients", "socket", "memory") if n not in given]:
        raise ConfigurationError(f"{path}: {', '.join(missing)} is missing: give it a value")
    try:
        return Policy(**_in_types(given, Path(path).resolve().parent))
    except ConfigurationError as error:
        lines = str(error).splitlines()
        raise ConfigurationError("\n".join(f"{path}: {line}" for line in lines)) from None


def _in_types(given: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Values of a file in the types of `Policy`, as far as that is possible."""
    found = dict(given)
    found["clients"] = _table(found["clients"])
    for name in ("socket", "memory"):
        if not isinstance(found[name], str) or not found[name]:
            raise ConfigurationError(f"{name} must be a path, got {shown(found[name])}")
        found[name] = folder / Path(found[name]).expanduser()
    for name in ("signing_key", "sum_key"):
        if isinstance(found.get(name), str):
            found[name] = folder / Path(found[name]).expanduser()
    for name, first in (("metrics", ()), ("classes", DEFAULT)):
        if isinstance(found.get(name), list):
            found[name] = (*first, *found[name])
    if found.get("most_epsilon") is not None:
        with suppress(ConfigurationError):  # `Policy` says it, with all that is wrong
            found["most_epsilon"] = PrivacyBudget.of(found["most_epsilon"])
    return found


def _table(clients: Any) -> Any:
    """Return clients by global id; a list says their places by its order."""
    if not isinstance(clients, list):
        return clients
    names = [client if isinstance(client, int) else str(client) for client in clients]
    if len(set(names)) < len(names):
        raise ConfigurationError(f"clients must be different, got {shown(clients)}")
    return {name: place for place, name in enumerate(names)}
