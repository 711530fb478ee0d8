"""Channel to sites over Flower.

Flower's nodes have numbers. The server knows the site of a node from the key under which the node is registered,
and the node names its site in answer to a query. After a lost order, the site may still work on it: it counts as
present again once it has answered another query.

An order or its answer may be lost: Flower delivers each message once, and the program that has received it may be
killed. So a site that works on an order is queried now and then. If it says twice in a row that it is idle, and
there is no answer, the order is lost.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
from flwr.app import Message, RecordDict
from flwr.serverapp import Grid
from typing_extensions import override

from fl_lightning.core.plain_json import shown
from fl_lightning.core.processes import holder_of, try_lock
from fl_lightning.flower.site.ledger import whole_file
from fl_lightning.flower.transport.channel import Channel, packed, unpacked

log = logging.getLogger(__name__)

NAMES_VARIABLE = "FL_LIGHTNING_SITES"
SEEN = "seen.json"  # file beside it with the reports of sites
_POLL_SECONDS = 1.0
_LOOK_SECONDS = 3.0
_QUERY_TTL = 60.0
_DOUBT_SECONDS = 20.0
# reported by the client app, see `make_client_app`
_FACTS = ("site", "state", "fl-lightning", "flwr")


@dataclass
class _SentOrder:
    """An order that was sent to a site and has no answer yet.

    Attributes:
        id: Flower's id of the message.
        query_at: time from which the site is queried whether it still works on the order.
        idle: number of times in a row that the site has answered that it is idle.
    """

    id: str
    query_at: float
    idle: int = 0


class GridChannel(Channel):
    """Channel from the server to its sites over Flower.

    Args:
        grid: Flower's interface to its nodes.
        names: name of the site of each node, by its registered key; None to believe the nodes.
    """

    def __init__(self, grid: Grid, names: Mapping[int, str] | None = None) -> None:
        self._grid, self._names = grid, names
        self._nodes: dict[str, int] = {}  # nodes of idle sites, by site
        self._orders: dict[str, _SentOrder] = {}  # by site
        self._queries: dict[str, tuple[int, float]] = {}
        self._came: list[tuple[str, bytes | None]] = []
        self._seen: dict[str, Mapping[str, str]] = {}
        self._looked = -_LOOK_SECONDS

    @override
    def sites(self) -> list[str]:
        self._look()
        return sorted(self._nodes.keys() - self._orders.keys())

    @override
    def send(self, site: str, message: bytes, ttl: float) -> None:
        self._look()
        id_ = None
        if site in self._nodes:
            id_ = self._push(packed(message), self._nodes[site], "train", ttl)
        if id_ is None:
            self._lose(site, "it is not there")
        else:
            self._orders[site] = _SentOrder(id_, time.monotonic() + _DOUBT_SECONDS)

    @override
    def receive(self, seconds: float) -> list[tuple[str, bytes | None]]:
        until = time.monotonic() + seconds
        while True:
            self._pull_answers()
            self._look()
            left = until - time.monotonic()
            if self._came or left <= 0:
                came, self._came = self._came, []
                return came
            time.sleep(min(left, _POLL_SECONDS))

    def _pull_answers(self) -> None:
        site_of = {sent.id: site for site, sent in self._orders.items()}
        for reply in self._pull(list(site_of)):
            site = site_of[reply.metadata.reply_to_message_id]
            if reply.has_error():
                self._lose(site, f"Flower's error {reply.error.code}")
            elif (answer := unpacked(reply.content)) is None:
                self._lose(site, "its process has not answered")
            else:
                del self._orders[site]
                self._came.append((site, answer))

    def _lose(self, site: str, reason: str) -> None:
        log.warning("site %s: no reply to its order: %s", site, reason)
        self._orders.pop(site, None)
        self._nodes.pop(site, None)  # until it says that it is free
        self._looked = -_LOOK_SECONDS
        self._came.append((site, None))

    def _look(self) -> None:
        """Update which sites are present; query nodes for their site, and sites that work for long for their state."""
        if time.monotonic() < self._looked + _LOOK_SECONDS:
            return
        self._looked = time.monotonic()
        self._pull_introductions()
        try:
            online = set(self._grid.get_node_ids())
        except httpx.HTTPError as error:
            _wait_for_server(error)
            return
        self._nodes = {name: node for name, node in self._nodes.items() if node in online}
        asked = {node for node, _ in self._queries.values()}
        late = [site for site, sent in self._orders.items() if sent.query_at < self._looked]
        doubted = {self._nodes[site] for site in late if site in self._nodes}
        for node in (online - set(self._nodes.values()) | doubted) - asked:
            if (id_ := self._push(RecordDict(), node, "query", _QUERY_TTL)) is not None:
                self._queries[id_] = node, time.monotonic() + 1.5 * _QUERY_TTL

    def _pull_introductions(self) -> None:
        for reply in self._pull(list(self._queries)):
            node, _ = self._queries.pop(reply.metadata.reply_to_message_id, (None, 0.0))
            if node is not None and not reply.has_error():
                self._identify(node, reply.content)
        now = time.monotonic()
        self._queries = {id_: asked for id_, asked in self._queries.items() if asked[1] > now}

    def _identify(self, node: int, content: RecordDict) -> None:
        told: Any = content.get("site") or {}
        name, state = told.get("site"), told.get("state")
        if self._names is not None and self._names.get(node) != name:
            log.error(
                "node %d says that it is site %s, but its registered key is another site's",
                node,
                shown(name),
            )
        elif not isinstance(name, str) or self._nodes.get(name, node) != node:
            log.error(
                "node %d says that it is site %s, as another node does, or has no name",
                node,
                shown(name),
            )
        elif name in self._orders:
            self._count_idle(name, is_idle=state == "idle")
        elif state != "idle":
            log.warning("site %s: its process is %s", name, shown(state))
        else:
            self._nodes[name] = node
            # shown, because a site may send any text and `status` prints it
            self._note_seen(name, {key: shown(told.get(key)).strip("'") for key in _FACTS})

    def _count_idle(self, site: str, *, is_idle: bool) -> None:
        """Count an order as lost if its site says twice in a row that it is idle."""
        self._pull_answers()  # its own comes ahead of that to the query
        if (sent := self._orders.get(site)) is None:
            return
        sent.idle = sent.idle + 1 if is_idle else 0
        if not is_idle:
            sent.query_at = time.monotonic() + _DOUBT_SECONDS
        elif sent.idle > 1:
            self._lose(site, "the network has lost the message")

    def _note_seen(self, name: str, told: Mapping[str, str]) -> None:
        """Store the report of a site for ``fl-lightning network status``."""
        self._seen[name] = told
        if path := os.environ.get(NAMES_VARIABLE):
            with whole_file(Path(path).with_name(SEEN)) as file:  # `status` may read it now
                file.write(json.dumps(self._seen).encode())

    def _push(self, content: RecordDict, node: int, kind: str, ttl: float) -> str | None:
        message = Message(content, dst_node_id=node, message_type=kind, ttl=ttl)
        try:
            ids = list(self._grid.push_messages([message]))
        except httpx.HTTPError as error:
            _wait_for_server(error)
            return None
        return ids[0] if ids else None

    def _pull(self, ids: list[str]) -> list[Message]:
        if not ids:
            return []
        try:
            return list(self._grid.pull_messages(ids))
        except httpx.HTTPError as error:
            _wait_for_server(error)
            return []


@contextmanager
def turn(channel: GridChannel, options: Mapping[str, object]) -> Iterator[None]:
    """Wait until no other run of this server is active, because sites train for one run at a time.

    Args:
        channel: channel of the run; polling it ends a run that was stopped.
        options: options of the run; runs that wait print its user and folder.
    """
    names = os.environ.get(NAMES_VARIABLE)
    if names is None:
        yield
        return
    about = f" of {options.get('user')}, in {options.get('folder')}, since {datetime.now():%H:%M}"
    said = ""
    with Path(names).with_name("turn.lock").open("a+") as file:
        while not try_lock(file, about):
            if (holder := holder_of(file)) != said:
                print(f"busy: the sites train for process {holder}; this run is next", flush=True)
            said = holder
            channel.sites()
            time.sleep(_POLL_SECONDS)
        yield


def registered_names() -> dict[int, str] | None:
    """Return the site of each node that is registered with Flower; None if the environment names no file of nodes."""
    path = os.environ.get(NAMES_VARIABLE)
    if path is None:
        return None
    registered = json.loads(Path(path).read_text())
    return {int(each["node"]): name for name, each in registered.items()}


def _wait_for_server(error: httpx.HTTPError) -> None:
    """Log that Flower's server does not answer for now; raise if it has refused a request.

    Raises:
        HTTPError: if the server has refused a request.
    """
    if isinstance(error, httpx.HTTPStatusError) and error.response.status_code < 500:
        raise error
    log.warning("Flower's server does not answer: %s", type(error).__name__)
