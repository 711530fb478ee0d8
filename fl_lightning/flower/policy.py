"""The policy of a site: its name, clients and permissions, in ``site.yaml``, which only the site's people write.

    name: hospital_a
    server: fl.example.org:8443
    clients: [3, 4]              # global ids; or {3: 0, 4: 1}, with positions in the site's own data
    socket: site.sock            # relative to the folder of this file
    memory: memory
    most_epsilon: {epsilon: 1.0, delta: 1.0e-5, per: year} # a number alone: for ever, at δ 1e-5
    classes: [my_project.*]      # beside `class_paths.DEFAULT`

``name``, ``clients``, ``socket`` and ``memory`` are required; `Policy` has all options.
"""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.plain_json import MessageError, check_hex, check_whole, shown
from fl_lightning.core.yaml_files import read
from fl_lightning.flower.class_paths import DEFAULT, Refused, checked
from fl_lightning.flower.documents import Positive, errors_in
from fl_lightning.flower.layers import laid_over, shared_part, without_callbacks
from fl_lightning.flower.messages import Site
from fl_lightning.flower.site.ledger import PrivacyBudget
from fl_lightning.flower.transport.resident import check_socket_path

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

__all__ = ["Policy", "Refused"]

KEY_SIZE = 32  # bytes
MEASURES = ("flops", "params", "activations")  # of the cost of a network, see `fl_lightning.nas`
MOST_THREADS, MOST_ROUNDS, MOST_CLIENTS = 64, 1_000_000, 10_000_000
_PATTERN = re.compile(r"[^\W\d]\w*(\.\w+)*(\.\*)?")


def _check_clients(what: str, clients: Any) -> None:
    is_table = isinstance(clients, Mapping) and len(clients) > 0
    numbers = [*clients.keys(), *clients.values()] if is_table else [None]
    if any(type(n) is not int or n < 0 for n in numbers):
        raise MessageError(
            f"{what} must be a non-empty list of client ids, or a mapping from client ids to positions in "
            f"the site's data (all integers ≥ 0), got {shown(clients)}"
        )
    if len(set(clients.values())) < len(clients):
        raise MessageError(
            f"{what} must have different positions in the site's data, got {shown(clients)}"
        )


def _check_path(what: str, path: Any) -> None:
    if not isinstance(path, str | Path) or not str(path):
        raise MessageError(f"{what} must be a path, got {shown(path)}")


def _check_socket(what: str, path: Any) -> None:
    _check_path(what, path)
    try:
        check_socket_path(Path(path))
    except ConfigurationError as error:
        raise MessageError(str(error)) from None


def _check_text(what: str, text: Any) -> None:
    if type(text) is not str or not text:
        raise MessageError(f"{what} must be a non-empty text, got {shown(text)}")


def _check_costs(what: str, costs: Any) -> None:
    numbers = costs.items() if isinstance(costs, Mapping) else ()
    is_cost = [n in MEASURES and type(c) in (int, float) and 0 < c < math.inf for n, c in numbers]
    if not is_cost or not all(is_cost):
        raise MessageError(
            f"{what} must be a mapping from {', '.join(MEASURES)} to numbers above 0, got {shown(costs)}"
        )


def _check_key_file(what: str, file: Any) -> None:
    if not isinstance(file, Path) or not file.is_file() or file.stat().st_size != KEY_SIZE:
        raise MessageError(
            f"{what} must be a file of {KEY_SIZE} bytes, as network init writes it, got "
            f"{str(file) if isinstance(file, Path) else shown(file)}"
        )


def _check_pattern(what: str, pattern: Any) -> None:
    if type(pattern) is not str or not _PATTERN.fullmatch(pattern) or "." not in pattern:
        raise MessageError(
            f"{what} must be a full path like my_project.Net, or a package like my_project.*, got "
            f"{shown(pattern)}"
        )


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Policy of a site, from its ``site.yaml``: its clients, and what it permits the server.

    Attributes:
        name: name of the site.
        server: address of the server, ``host:port``.
        clients: position of each client in the site's own data, by global id.
        socket: path of the Unix socket at which the site's resident process listens.
        memory: folder of the clients' state.
        fewest_in_secure_sum: smallest number of clients in a secure sum, at least 2.
        most_epsilon: privacy budget of each client, over all runs of a period, see `PrivacyBudget`; None
            for no limit, which also allows runs without privacy.
        log_unprotected: True if metrics and norms that have no noise may leave the site.
        metrics: patterns (``*``, ``?``) of the names of metrics and facts that may leave.
        most_bytes: largest size of an order, in bytes.
        most_steps: most local batches of a client per order, those of accumulated steps included.
        most_parameters: most numbers in the tensors that are made when the model is built (`cli/network/site.py`).
        most_minutes: most minutes for an order, and for the set-up of a run.
        most_cost: largest cost of the sub-networks of a `OneShot` that clients train, for one example: ``flops``,
            ``params`` or ``activations``; None for no limit.
        classes: patterns of the class paths that the server may name, see `class_paths`; those in a file
            are added to the default.
        signing_key: file with the key, 32 bytes, that signs the site's messages in secure sums.
        sum_key: file with the key, 32 bytes, that all sites share and the server never has, for EncryptedMean.
        peers: public signing keys of all sites, this one included, by name, 64 hexadecimal digits each.
        seeded_noise: True to draw noise from the seed if a run has ``secure_noise: false``. The server can
            then remove the noise: only for tests that compare a network with its simulation.

    Raises:
        ConfigurationError: naming all values that are out of range.
    """

    name: Site
    clients: Annotated[Mapping[int, int], _check_clients]
    socket: Annotated[Path, _check_socket]
    memory: Annotated[Path, _check_path]
    server: str = ""
    fewest_in_secure_sum: Annotated[int, partial(check_whole, least=2)] = 3
    most_epsilon: PrivacyBudget | None = None
    log_unprotected: bool = False
    metrics: tuple[Annotated[str, _check_text], ...] = ("*",)
    most_bytes: Positive = 2_000_000_000
    most_steps: Positive = 100_000
    most_parameters: Positive = 2_000_000_000
    most_minutes: Positive = 720
    most_cost: Annotated[Mapping[str, float], _check_costs] | None = None
    classes: tuple[Annotated[str, _check_pattern], ...] = DEFAULT
    signing_key: Annotated[Path, _check_key_file] | None = None
    sum_key: Annotated[Path, _check_key_file] | None = None
    peers: Mapping[str, Annotated[str, partial(check_hex, digits=64)]] = field(default_factory=dict)
    seeded_noise: bool = False

    def __post_init__(self) -> None:
        errors = list(errors_in(self))
        if self.seeded_noise is True and self.most_epsilon is not None:
            errors.append(
                "seeded_noise: true and most_epsilon exclude each other, because the server can subtract seeded "
                "noise: leave one out"
            )
        if errors:
            raise ConfigurationError("\n".join(errors))

    @property
    def private_key(self) -> Ed25519PrivateKey | None:
        """Private key that signs the site's messages in secure sums; None if the site has no key."""
        if self.signing_key is None:
            return None
        # not above: without a key a site needs no cryptography
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        return Ed25519PrivateKey.from_private_bytes(self.signing_key.read_bytes())

    @property
    def public_key(self) -> str:
        """Public half of the signing key, 64 hexadecimal digits; empty if the site has no key."""
        key = self.private_key
        return "" if key is None else key.public_key().public_bytes_raw().hex()

    @property
    def sum_key_fingerprint(self) -> str:
        """Hash that shows whether two sites have the same `sum_key`; empty if the site has no key."""
        if self.sum_key is None:
            return ""
        from fl_lightning.flower.sums import SumKey

        return SumKey(self.sum_key).fingerprint

    def site_configuration(
        self, shared: Mapping[str, Any], own: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the configuration that the site trains with: the server's options, overridden by the site's own.

        Options that only the site sets, see `fl_lightning.flower.layers`, are dropped from the server's
        configuration, and the rest is checked. The site's own options are trusted.

        Args:
            shared: configuration of the run, from the server.
            own: options of the site: data, devices, precision.

        Raises:
            Refused: if the server's configuration names a class that is not allowed, or has a number that
                is too large.
        """
        lower = checked(shared_part(shared), self.classes)
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
        """Raise if a secure sum has fewer clients than `fewest_in_secure_sum`.

        Raises:
            Refused: with both numbers.
        """
        if num_clients < self.fewest_in_secure_sum:
            raise Refused(
                f"fewest_in_secure_sum is {self.fewest_in_secure_sum} at this site, and the sum is "
                f"over {num_clients} clients: use larger cohorts"
            )

    def check_unprotected(self, what: str) -> None:
        """Raise if the site has a privacy budget, which forbids results without the site's own noise.

        Args:
            what: name of the results, for the error.

        Raises:
            Refused: naming the results.
        """
        if self.most_epsilon is not None:
            raise Refused(
                f"most_epsilon is {self.most_epsilon} at this site, and {what} would show clients' data without "
                "noise of the site's own: use LocalDP, or DistributedDP with SecureMean"
            )

    def check_clients(self, asked: tuple[int, ...]) -> None:
        """Raise if the server names a client that is not at this site.

        Raises:
            Refused: naming the clients.
        """
        if others := [client for client in asked if client not in self.clients]:
            raise Refused(
                f"clients: {shown(others)} are not at this site, which has "
                f"{shown(sorted(self.clients))}"
            )


def check_most(what: str, number: Any, most: float) -> None:
    """Raise if a number in the server's configuration, perhaps as text, is above the site's limit."""
    try:
        given = float(number or 0)
    except (TypeError, ValueError):
        return  # the parser says what is wrong
    if not given <= most:
        raise Refused(
            f"{what} is {given:g} in the server's configuration: this site allows at most {most}"
        )


def read_policy(path: str | Path) -> Policy:
    """Read the policy of a site from a file.

    Raises:
        ConfigurationError: if the file cannot be read, or has missing, unknown or wrong values.
    """
    given = read(Path(path), "", remedy="fl-lightning network init writes one")
    known = [field.name for field in fields(Policy)]
    if unknown := sorted(map(str, given.keys() - set(known))):
        close = difflib.get_close_matches(unknown[0], known, n=1)
        advice = f"Did you mean {close[0]!r}?" if close else f"Known keys: {', '.join(known)}."
        raise ConfigurationError(f"{path}: {unknown[0]!r} is not known. {advice}")
    if missing := [n for n in ("name", "clients", "socket", "memory") if n not in given]:
        raise ConfigurationError(f"{path}: {', '.join(missing)} is missing: give it a value")
    try:
        return Policy(**_in_types(given, Path(path).resolve().parent))
    except ConfigurationError as error:
        lines = str(error).splitlines()
        raise ConfigurationError("\n".join(f"{path}: {line}" for line in lines)) from None


def _in_types(given: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Convert the values of a policy file, as YAML gives them, to the types of `Policy`'s fields."""
    found = dict(given)
    found["clients"] = _table(found["clients"])
    for name in ("socket", "memory", "signing_key", "sum_key"):
        if isinstance(found.get(name), str) and found[name]:
            found[name] = folder / Path(found[name]).expanduser()
    for name, first in (("metrics", ()), ("classes", DEFAULT)):
        if isinstance(found.get(name), list):
            found[name] = (*first, *found[name])
    if found.get("most_epsilon") is not None:
        found["most_epsilon"] = PrivacyBudget.of(found["most_epsilon"])
    return found


def _table(clients: Any) -> Any:
    """Return each client's position in the site's data by its global id; a list gives positions 0, 1, 2, …."""
    if not isinstance(clients, list):
        return clients
    names = [client if isinstance(client, int) else str(client) for client in clients]
    if len(set(names)) < len(names):
        raise ConfigurationError(f"clients must be different, got {shown(clients)}")
    return {name: place for place, name in enumerate(names)}
