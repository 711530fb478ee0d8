"""What the server tells a site, an `Order`, and what the site tells the server, an `Answer`.

Both check themselves when they are made: what can be made can be sent and read, and what is read is
what was made. Equal messages have equal bytes, see `fl_lightning.core.container`.

An answer names its order by the `digest` of the order's bytes. An order that is repeated, byte for
byte, is the same order: its answer counts once.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from importlib.metadata import version
from typing import Any, Literal

from torch import Tensor

from fl_lightning.core.container import form_of, read, scalar_of, scalar_text, write
from fl_lightning.core.plain_json import (
    MessageError,
    check_choice,
    check_form,
    check_hex,
    check_names,
    check_number,
    check_options,
    check_string,
    check_whole,
    fields_of,
    shown,
)
from fl_lightning.flower.failures import CATEGORIES, Failure

__all__ = [
    "CATEGORIES",
    "JSON",
    "KINDS",
    "Answer",
    "ClientAnswer",
    "Failure",
    "Kind",
    "MessageError",
    "Order",
    "check_site",
    "digest",
    "package_version",
]


OWN_VERSION = "fl_lightning"
_SITE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")
_PLACE = re.compile(r"stage/[^/]+/.+", re.DOTALL)


@cache
def package_version() -> str:
    """Return the version of fl_lightning that runs here."""
    return version("fl_lightning")


def check_version(found: object, where: str) -> None:
    """Refuse messages of another version of the package, whose rules may be others.

    Raises:
        MessageError: with both versions.
    """
    if found != package_version():
        raise MessageError(
            f"the {where} has fl_lightning {shown(found)}, here it is {package_version()!r}: "
            "install the same version at the server and the sites"
        )


def check_site(name: Any) -> str:
    """Return the name of a site, which is also a folder's and a file's.

    Example:
        >>> check_site("../etc")
        Traceback (most recent call last):
        ...
        fl_lightning.core.plain_json.MessageError: site must be 1 to 63 letters, digits, _, . or -, \
the first a letter or digit, got '../etc'
    """
    if type(name) is not str or not _SITE.fullmatch(name):
        raise MessageError(
            "site must be 1 to 63 letters, digits, _, . or -, the first a letter or digit, "
            f"got {shown(name)}"
        )
    return name


def check_clients(clients: Any) -> None:
    """Refuse what is not a tuple of different clients."""
    if type(clients) is not tuple:
        raise MessageError(f"clients must be a tuple, got {shown(clients)}")
    for client in clients:
        check_whole("clients: each", client)
    if len(set(clients)) < len(clients):
        raise MessageError(f"clients must be different, got {shown(clients)}")


def is_stage_tensor(name: str) -> bool:
    """True if a tensor's name is ``stage/<key>/<name>``.

    Example:
        >>> is_stage_tensor("stage/corrector/layers.0.weight"), is_stage_tensor("stage/corrector")
        (True, False)
    """
    return _PLACE.fullmatch(name) is not None


def tuple_of(value: Any) -> tuple[Any, ...]:
    """Return the clients of a document, which are a list there."""
    if type(value) is not list:
        raise MessageError(f"clients must be a list, got {shown(value)}")
    return tuple(value)


JSON = Any  # None, bool, int, finite float, str, list and dict of these
Kind = Literal["hello", "calibrate", "train", "sum", "evaluate", "stop"]
KINDS = ("hello", "calibrate", "train", "sum", "evaluate", "stop")


def digest(content: bytes) -> str:
    """Return the SHA-256 of an order's bytes, by which its answer names it."""
    return hashlib.sha256(content).hexdigest()


@dataclass(frozen=True, kw_only=True, eq=False)
class Order:
    """Order of the server to a site.

    Attributes:
        kind: ``hello`` asks for versions and clients, ``calibrate`` for scores or sums for a mask or a
            head, ``sum`` for a stage of a secure sum, ``stop`` ends the run at the site.
        run: 32 hexadecimal digits, of this run, also after it was resumed.
        configuration: SHA-256 of the configuration that both have.
        round: of the run, ≥ 0, with every order.
        clients: that are asked; at least one for ``train``.
        counted: by client, the last round in which its answer counted, -1 for none. All clients
            that are to train are in it: a site takes back what they remember of later rounds.
        options: of the optimizer and of stages, plain JSON.
        tensors: ``model`` (bytes as uint8, see `Packing.model`), ``stage/<key>/<name>``; on the CPU.

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
            if name != "model" and not is_stage_tensor(name):
                raise MessageError(
                    f"tensors of an order are model and stage/<key>/<name>, not {shown(name)}"
                )
        if self.kind == "train":
            _check_training(self.clients, self.counted)

    def to_bytes(self) -> bytes:
        """Return the order as it is sent."""
        return write("order", self._document(), self.tensors)

    @staticmethod
    def from_bytes(content: bytes, *, limit: int) -> Order:
        """Return the order that was sent.

        Args:
            content: from whoever reaches the site.
            limit: of its bytes, by the site's policy.

        Raises:
            MessageError: if `to_bytes` cannot have made it, or in another version of the package.
        """
        document, tensors = read(content, "order", limit=limit)
        check_version(document.get("version"), "order")
        given = dict(fields_of(document, _ORDER_FIELDS, "an order"))
        del given["version"]
        given["clients"] = tuple_of(given["clients"])
        given["counted"] = _by_client(given["counted"])
        order = Order(**given, tensors=tensors)
        check_form(order._document(), document)
        return order

    def _document(self) -> dict[str, JSON]:
        return {
            "version": package_version(),
            "kind": self.kind,
            "run": self.run,
            "configuration": self.configuration,
            "round": self.round,
            "clients": list(self.clients),
            "counted": {str(client): number for client, number in self.counted.items()},
            "options": dict(self.options),
        }


_ORDER_FIELDS = ("version", *(f.name for f in fields(Order) if f.name != "tensors"))


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


def _by_client(counted: Any) -> dict[int, Any]:
    """Return a mapping by client; that ``"01"`` is no client, the only form shows."""
    if type(counted) is not dict or not all(n.isascii() and n.isdigit() for n in counted):
        raise MessageError(f"counted must be a mapping from clients, got {shown(counted)}")
    return {int(client): number for client, number in counted.items() if len(client) < 20}


@dataclass(frozen=True, kw_only=True, eq=False)
class ClientAnswer:
    """One client's part of an answer.

    Attributes:
        client: its global id.
        num_examples: that its update stands for.
        num_steps: local steps.
        optimizer_steps: how many of these the optimizer took, of each optimizer if there are
            several; None for all.
        effective_steps: how many gradients the update adds up to, ≥ 0; None where nobody asks.
        metrics: by name, each a 0-d tensor, which may be NaN.
        facts: by name, finite.
        failure: a category of `CATEGORIES`; then nothing else but the client is given.

    Raises:
        MessageError: for values out of range.
    """

    client: int
    num_examples: int = 0
    num_steps: int = 0
    optimizer_steps: int | tuple[int, ...] | None = None
    effective_steps: float | None = None
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    facts: Mapping[str, float] = field(default_factory=dict)
    failure: str | None = None

    def __post_init__(self) -> None:
        check_whole("client", self.client)
        for name in ("num_examples", "num_steps"):
            check_whole(name, getattr(self, name))
        steps = self.optimizer_steps
        for each in steps if type(steps) is tuple else () if steps is None else (steps,):
            check_whole("optimizer_steps", each)
        if self.effective_steps is not None:
            check_number("effective_steps", self.effective_steps)
            if self.effective_steps < 0:
                raise MessageError(f"effective_steps must be ≥ 0, got {self.effective_steps}")
        check_names("metrics", self.metrics)
        check_names("facts", self.facts)
        for name, metric in self.metrics.items():
            scalar_text(name, metric)
        for name, value in self.facts.items():
            check_number(f"facts: {name}", value)
        if self.failure is not None:
            self._check_failure()

    def _check_failure(self) -> None:
        check_choice("failure of a client", self.failure, CATEGORIES)
        for each in fields(self):
            if each.name not in ("client", "failure") and getattr(self, each.name):
                raise MessageError(f"a client that failed has no {each.name}")
        if self.optimizer_steps is not None or self.effective_steps is not None:
            raise MessageError("a client that failed has no steps")

    def document(self) -> dict[str, Any]:
        """Return it as JSON; what a client that failed does not have is left out."""
        if self.failure is not None:
            return {"client": self.client, "failure": self.failure}
        steps = self.optimizer_steps
        return {
            "client": self.client,
            "num_examples": self.num_examples,
            "num_steps": self.num_steps,
            "optimizer_steps": list(steps) if isinstance(steps, tuple) else steps,
            "effective_steps": self.effective_steps,
            "metrics": {name: scalar_text(name, value) for name, value in self.metrics.items()},
            "facts": dict(self.facts),
        }

    @staticmethod
    def from_document(document: Any) -> ClientAnswer:
        """Return the answer that a document is of.

        Raises:
            MessageError: if it is of none.
        """
        if isinstance(document, dict) and "failure" in document:
            return ClientAnswer(**fields_of(document, ("client", "failure"), "a client's answer"))
        given = dict(fields_of(document, _FIELDS, "a client's answer"))
        if type(given["optimizer_steps"]) is list:
            given["optimizer_steps"] = tuple(given["optimizer_steps"])
        if type(given["metrics"]) is not dict:
            raise MessageError(f"metrics must be a mapping, got {shown(given['metrics'])}")
        given["metrics"] = {name: scalar_of(text) for name, text in given["metrics"].items()}
        return ClientAnswer(**given)


_FIELDS = tuple(each.name for each in fields(ClientAnswer) if each.name != "failure")


NO_RUN = "0" * 32


@dataclass(frozen=True, kw_only=True, eq=False)
class Answer:
    """Answer of a site to an order.

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
        return write("answer", self._document(), self.tensors)

    @staticmethod
    def from_bytes(content: bytes, *, limit: int) -> Answer:
        """Return the answer that was sent.

        Args:
            content: from a site, or from whoever got in its way.
            limit: of its bytes.

        Raises:
            MessageError: if `to_bytes` cannot have made it, or in another version of the package.
        """
        document, tensors = read(content, "answer", limit=limit)
        versions = document.get("versions")
        if isinstance(versions, dict):  # first: other versions may have other fields
            site = check_site(document.get("site"))
            check_version(versions.get(OWN_VERSION), f"answer of {site}")
        given = dict(fields_of(document, _ANSWER_FIELDS, "an answer"))
        given["clients"] = tuple(map(ClientAnswer.from_document, tuple_of(given["clients"])))
        if given["failure"] is not None:
            given["failure"] = Failure(**fields_of(given["failure"], _FAILURE_FIELDS, "a failure"))
        answer = Answer(**given, tensors=tensors)
        check_form(answer._document(), document)
        return answer

    def _document(self) -> dict[str, JSON]:
        failure = self.failure
        return {
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


_ANSWER_FIELDS = tuple(f.name for f in fields(Answer) if f.name != "tensors")
_FAILURE_FIELDS = ("category", "id")
