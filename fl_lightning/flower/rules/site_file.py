"""A site's ``site.yaml``, which only the site's people write.

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
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.plain_json import shown
from fl_lightning.core.yaml_files import read
from fl_lightning.flower.policy import Policy
from fl_lightning.flower.rules.class_paths import DEFAULT
from fl_lightning.flower.site.ledger import PrivacyBudget


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
    """Return what a file says in the types of `Policy`, as far as that is possible."""
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
