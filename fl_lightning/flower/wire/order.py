"""What the server asks of a site, checked when it is made, at the sender as at the receiver."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from torch import Tensor

from fl_lightning.flower.wire.container import form_of, pack, unpack
from fl_lightning.flower.wire.fields import (
    check_choice,
    check_clients,
    check_hex,
    check_names,
    check_options,
    check_version,
    check_whole,
    fields_of,
    is_stage_tensor,
    package_version,
    tuple_of,
)
from fl_lightning.flower.wire.plain_json import MessageError, check_form, shown

JSON = Any  # None, bool, int, finite float, str, list and dict of these
Kind = Literal["hello", "calibrate", "train", "sum", "evaluate", "stop"]
KINDS = ("hello", "calibrate", "train", "sum", "evaluate", "stop")


def digest(content: bytes) -> str:
    """Return the SHA-256 of an order's bytes, by which its answer names it."""
    return hashlib.sha256(content).hexdigest()


@dataclass(frozen=True, kw_only=True, eq=False)
class Order:
    """What the server asks of a site.

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
        given["clients"] = tuple_of(given["clients"])
        given["counted"] = _by_client(given["counted"])
        order = Order(**given, tensors=tensors)
        check_form(order._document(), document)
        return order

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


_ORDER_FIELDS = ("message", "version", *(f.name for f in fields(Order) if f.name != "tensors"))


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
