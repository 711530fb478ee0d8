"""What a site answers to an order, checked when it is made, at the sender as at the receiver."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Literal

from torch import Tensor

from fl_lightning.flower.wire.client_answer import ClientAnswer
from fl_lightning.flower.wire.container import form_of, pack, unpack
from fl_lightning.flower.wire.failures import Failure
from fl_lightning.flower.wire.fields import (
    OWN_VERSION,
    check_choice,
    check_clients,
    check_hex,
    check_names,
    check_options,
    check_site,
    check_version,
    check_whole,
    fields_of,
    is_stage_tensor,
    package_version,
    tuple_of,
)
from fl_lightning.flower.wire.order import JSON, KINDS, Kind, Order, digest
from fl_lightning.flower.wire.plain_json import MessageError, check_form, check_string, shown

NO_RUN = "0" * 32


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
        given["clients"] = tuple(map(ClientAnswer.from_document, tuple_of(given["clients"])))
        if given["failure"] is not None:
            given["failure"] = Failure(**fields_of(given["failure"], _FAILURE_FIELDS, "a failure"))
        answer = Answer(**given, tensors=tensors)
        check_form(answer._document(), document)
        return answer

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


_ANSWER_FIELDS = ("message", *(f.name for f in fields(Answer) if f.name != "tensors"))
_FAILURE_FIELDS = ("category", "id")
