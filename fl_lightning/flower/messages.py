"""What the server tells a site, an `Order`, and what the site tells the server, an `Answer`.

Both check themselves when they are made, at the sender as at the receiver: what can be made can be
sent and read, and what is read is what was made. Equal messages have equal bytes, see `wire`.

An answer names its order by the SHA-256 of the order's bytes. An order that is repeated, byte for
byte, is the same order: its answer counts once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, Literal, cast

from torch import Tensor

from fl_lightning.flower.client_answer import ClientAnswer
from fl_lightning.flower.failures import Failure
from fl_lightning.flower.fields import (
    OWN_VERSION,
    check_choice,
    check_clients,
    check_hex,
    check_names,
    check_options,
    check_site,
    check_string,
    check_version,
    check_whole,
    fields_of,
    is_stage_tensor,
    package_version,
)
from fl_lightning.flower.plain_json import MessageError, shown, to_text
from fl_lightning.flower.wire import form_of, pack, unpack

__all__ = ["Answer", "ClientAnswer", "Failure", "MessageError", "Order", "digest"]

JSON = Any  # None, bool, int, finite float, str, list and dict of these
Kind = Literal["hello", "train", "evaluate", "stop"]
KINDS = ("hello", "train", "evaluate", "stop")
NO_RUN = "0" * 32


def digest(content: bytes) -> str:
    """Return the SHA-256 of an order's bytes, by which its answer names it."""
    return hashlib.sha256(content).hexdigest()


@dataclass(frozen=True, kw_only=True, eq=False)
class Order:
    """What the server asks of a site.

    Attributes:
        kind: ``hello`` asks for versions and clients, ``stop`` ends the run at the site.
        run: 32 hexadecimal digits, of this run, also after it was resumed.
        configuration: SHA-256 of the configuration that both have.
        round: of the run, ≥ 0, with every order.
        clients: that are asked; at least one for ``train``.
        counted: by client, the last round in which its answer counted, -1 for none. All clients
            that are to train are in it: a site takes back what they remember of later rounds.
        options: of the optimizer and of stages, plain JSON.
        tensors: ``params``, ``buffers``, ``stage/<key>/<name>``, on the CPU.

    Raises:
        MessageError: for values out of range.

    Example:
        >>> order = Order(kind="hello", run="a" * 32, configuration="b" * 64, round=0)
        >>> Order.from_bytes(order.to_bytes(), limit=1000).kind
        'hello'
    """

    kind: Kind
    run: str
    configuration: str
    round: int
    clients: tuple[int, ...] = ()
    counted: Mapping[int, int] = field(default_factory=dict)
    options: Mapping[str, JSON] = field(default_factory=dict)
    tensors: Mapping[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, KINDS)
        check_hex("run", self.run, 32)
        check_hex("configuration", self.configuration, 64)
        check_whole("round", self.round)
        check_clients(self.clients)
        _check_counted(self.counted, self.round)
        check_options(self.options)
        check_names("tensors", self.tensors)
        for name, tensor in self.tensors.items():
            form_of(name, tensor)
            if name not in ("params", "buffers") and not is_stage_tensor(name):
                raise MessageError(
                    f"tensors of an order are params, buffers, stage/<key>/<name>, not {shown(name)}"
                )
        if self.kind == "train":
            _check_training(self.clients, self.counted)

    def to_bytes(self) -> bytes:
        """Return the order as it is sent."""
        return pack(self._document(), self.tensors)

    @staticmethod
    def from_bytes(content: bytes, *, limit: int) -> Order:
        """Return the order that was sent.

        Args:
            content: from whoever reaches the site.
            limit: of its bytes, by the site's policy.

        Raises:
            MessageError: if `to_bytes` cannot have made it, or in another version of the package.
        """
        document, tensors = unpack(content, limit=limit)
        check_version(document.get("version"), "order")
        given = dict(fields_of(document, _ORDER_FIELDS, "an order"))
        check_choice("type of the message", given.pop("message"), ("order",))
        del given["version"]
        given["clients"] = _tuple(given["clients"])
        given["counted"] = _by_client(given["counted"])
        order = Order(**given, tensors=tensors)
        return cast(Order, _checked_form(order, document))

    def _document(self) -> dict[str, JSON]:
        return {
            "message": "order",
            "version": package_version(),
            "kind": self.kind,
            "run": self.run,
            "configuration": self.configuration,
            "round": self.round,
            "clients": list(self.clients),
            "counted": {str(client): number for client, number in self.counted.items()},
            "options": dict(self.options),
        }


@dataclass(frozen=True, kw_only=True, eq=False)
class Answer:
    """What a site answers to an order.

    Attributes:
        kind: of the order; ``refusal`` if the order could not be read, see `refusal`.
        run: of the order.
        round: of the order.
        site: its name.
        order: SHA-256 of the order's bytes, see `digest`.
        versions: of the packages at the site, fl_lightning among them.
        clients: what each client that was asked did.
        options: of stages, plain JSON.
        tensors: ``<client>/payload`` (bytes as uint8) and ``<client>/stage/<key>/<name>`` of clients
            that did not fail, ``stage/<key>/<name>`` of the site as a whole; on the CPU.
        failure: of the order as a whole, and then there is nothing else.

    Raises:
        MessageError: for values out of range.
    """

    kind: Kind | Literal["refusal"]
    run: str
    round: int
    site: str
    order: str
    versions: Mapping[str, str] = field(default_factory=lambda: {OWN_VERSION: package_version()})
    clients: tuple[ClientAnswer, ...] = ()
    options: Mapping[str, JSON] = field(default_factory=dict)
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    failure: Failure | None = None

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, (*KINDS, "refusal"))
        check_hex("run", self.run, 32)
        check_whole("round", self.round)
        check_site(self.site)
        check_hex("order", self.order, 64)
        check_names("versions", self.versions)
        for name, found in self.versions.items():
            check_string(found, f"versions: {name}")
        check_version(self.versions.get(OWN_VERSION), f"answer of {self.site}")
        if type(self.clients) is not tuple or any(
            type(c) is not ClientAnswer for c in self.clients
        ):
            raise MessageError(
                f"clients must be a tuple of ClientAnswer, got {shown(self.clients)}"
            )
        check_clients(tuple(client.client for client in self.clients))
        check_options(self.options)
        self._check_tensors()
        self._check_failure()

    @staticmethod
    def refusal(content: bytes, *, site: str, failure: Failure) -> Answer:
        """Return the answer to bytes that are no order that this site could read."""
        return Answer(
            kind="refusal", run=NO_RUN, round=0, site=site, order=digest(content), failure=failure
        )

    def check_answers(self, order: Order, order_digest: str) -> None:
        """Refuse an answer that does not belong to an order, or is of clients that were not asked.

        Args:
            order: that was sent.
            order_digest: of its bytes, see `digest`.

        Raises:
            MessageError: with what differs.
        """
        if self.order != order_digest:
            raise MessageError(f"{self.site} answers another order, {self.order[:16]}…")
        ours = (order.kind, order.run, order.round)
        if self.kind != "refusal" and (self.kind, self.run, self.round) != ours:
            raise MessageError(
                f"{self.site} answers {self.kind} of round {self.round} of run {self.run}, asked was "
                f"{order.kind} of round {order.round} of run {order.run}"
            )
        asked = set(order.clients)
        if others := [c.client for c in self.clients if order.clients and c.client not in asked]:
            raise MessageError(
                f"{self.site} answers for clients that were not asked: {shown(others)}"
            )

    def to_bytes(self) -> bytes:
        """Return the answer as it is sent."""
        return pack(self._document(), self.tensors)

    @staticmethod
    def from_bytes(content: bytes, *, limit: int) -> Answer:
        """Return the answer that was sent.

        Args:
            content: from a site, or from whoever got in its way.
            limit: of its bytes.

        Raises:
            MessageError: if `to_bytes` cannot have made it, or in another version of the package.
        """
        document, tensors = unpack(content, limit=limit)
        versions = document.get("versions")
        if isinstance(versions, dict):  # first: other versions may have other fields
            site = check_site(document.get("site"))
            check_version(versions.get(OWN_VERSION), f"answer of {site}")
        given = dict(fields_of(document, _ANSWER_FIELDS, "an answer"))
        check_choice("type of the message", given.pop("message"), ("answer",))
        given["clients"] = tuple(map(ClientAnswer.from_document, _tuple(given["clients"])))
        if given["failure"] is not None:
            given["failure"] = Failure(**fields_of(given["failure"], _FAILURE_FIELDS, "a failure"))
        answer = Answer(**given, tensors=tensors)
        return cast(Answer, _checked_form(answer, document))

    @cached_property
    def by_client(self) -> dict[int, ClientAnswer]:
        """The clients' answers by client."""
        return {client.client: client for client in self.clients}

    def _document(self) -> dict[str, JSON]:
        failure = self.failure
        return {
            "message": "answer",
            "kind": self.kind,
            "run": self.run,
            "round": self.round,
            "site": self.site,
            "order": self.order,
            "versions": dict(self.versions),
            "clients": [client.document() for client in self.clients],
            "options": dict(self.options),
            "failure": failure and {"category": failure.category, "id": failure.id},
        }

    def _check_tensors(self) -> None:
        check_names("tensors", self.tensors)
        senders = {str(each.client) for each in self.clients if each.failure is None}
        for name, tensor in self.tensors.items():
            form = form_of(name, tensor)
            client, _, rest = name.partition("/")
            is_payload = client in senders and rest == "payload"
            is_known = is_stage_tensor(name) or (client in senders and is_stage_tensor(rest))
            if not (is_payload or is_known):
                raise MessageError(
                    "tensors of an answer are <client>/payload and <client>/stage/<key>/<name> of "
                    f"clients that did not fail, and stage/<key>/<name>, not {shown(name)}"
                )
            if is_payload and (form[0], len(form[1])) != ("U8", 1):
                raise MessageError(f"{name} must be bytes, a uint8 tensor of one dimension")

    def _check_failure(self) -> None:
        if self.failure is None:
            if self.kind == "refusal":
                raise MessageError("a refusal must have a failure")
        elif type(self.failure) is not Failure:
            raise MessageError(f"failure must be a Failure, got {shown(self.failure)}")
        elif self.clients or self.options or self.tensors:
            raise MessageError("an answer with a failure has no clients, options or tensors")


_ORDER_FIELDS = ("message", "version", *(f.name for f in fields(Order) if f.name != "tensors"))
_ANSWER_FIELDS = ("message", *(f.name for f in fields(Answer) if f.name != "tensors"))
_FAILURE_FIELDS = ("category", "id")


def _check_counted(counted: Any, round_index: int) -> None:
    if not isinstance(counted, Mapping):
        raise MessageError(f"counted must be a mapping, got {shown(counted)}")
    for client, number in counted.items():
        check_whole("counted: each client", client)
        check_whole(f"counted: client {client}", number, -1, round_index)


def _check_training(clients: tuple[int, ...], counted: Mapping[int, int]) -> None:
    if not clients:
        raise MessageError("clients: an order to train names at least one")
    if missing := [client for client in clients if client not in counted]:
        raise MessageError(f"counted: clients {shown(missing)} are to train and not in it")


def _tuple(value: Any) -> tuple[Any, ...]:
    if type(value) is not list:
        raise MessageError(f"clients must be a list, got {shown(value)}")
    return tuple(value)


def _by_client(counted: Any) -> dict[int, Any]:
    """Return a mapping by client; that ``"01"`` is no client, the only form shows."""
    if type(counted) is not dict or not all(n.isascii() and n.isdigit() for n in counted):
        raise MessageError(f"counted must be a mapping from clients, got {shown(counted)}")
    return {int(client): number for client, number in counted.items() if len(client) < 20}


def _checked_form(message: Order | Answer, document: dict[str, Any]) -> Order | Answer:
    if to_text(message._document()) != to_text(document):
        raise MessageError("the message is not in its only form")
    return message
