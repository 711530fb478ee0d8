"""How a network stands: its sites, its runs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from fl_lightning.flower.network.control import Control
from fl_lightning.flower.network.folder import NetworkFolder
from fl_lightning.flower.network.programs import names_file
from fl_lightning.flower.transport.grid import SEEN

_UNKNOWN = "-"


def sites(network: NetworkFolder, control: Control) -> Sequence[Sequence[str]]:
    """Return a row for each site: name, state, when it was last seen, its versions.

    Args:
        network: whose.
        control: of its server.
    """
    nodes = {int(node["node-id"]): node for node in control.nodes()}
    of_sites: dict[str, int] = json.loads(names_file(network).read_text())
    seen_file = names_file(network).with_name(SEEN)
    seen: dict[str, Mapping[str, str]] = (
        json.loads(seen_file.read_text()) if seen_file.exists() else {}
    )
    rows = []
    for name in network.sites:
        node = nodes.get(of_sites.get(name, 0), {})
        facts = seen.get(name, {})
        rows.append(
            [
                name,
                str(node.get("status", "not registered")),
                _last_seen(node),
                *(str(facts.get(part, _UNKNOWN)) for part in ("fl-lightning", "flwr")),
            ]
        )
    return rows


def runs(control: Control) -> Sequence[Sequence[str]]:
    """Return a row for each run, the newest first: number, state, when it was started.

    Args:
        control: of the server.
    """
    return [
        [str(one.get("run-id")), str(one.get("status")), str(one.get("running-at") or _UNKNOWN)]
        for one in control.runs()
    ]


def last_words(network: NetworkFolder) -> str:
    """Return the last line that a run has told, such as its round.

    Args:
        network: whose.
    """
    file = network.server / "log" / "run.log"
    lines = file.read_text().splitlines() if file.exists() else []
    return lines[-1] if lines else _UNKNOWN


def _last_seen(node: Mapping[str, Any]) -> str:
    if node.get("status") == "online":
        return "now"
    return str(node.get("offline-at") or "never")
