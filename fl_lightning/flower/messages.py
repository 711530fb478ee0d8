"""Messages: an `Order` from the server to a site, and the site's `Answer`.

Both check their fields when they are made, see `fl_lightning.flower.documents`. Equal messages have equal
bytes, see `fl_lightning.core.container`.

An answer names its order by the `digest` of the order's bytes. An order that is sent again with the same
bytes is the same order, and its answer counts once.

The server is told a failure as a category and an id. The exception is in the site's own log under this id,
because its text may show examples, paths or names of people.
"""

from __future__ import annotations

import errno
import hashlib
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache, partial
from importlib.metadata import version
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

from torch import Tensor

from fl_lightning.core.container import form_of, read, write
from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.plain_json import (
    MessageError,
    check_choice,
    check_hex,
    check_number,
    check_whole,
    shown,
)
from fl_lightning.flower.class_paths import Refused
from fl_lightning.flower.documents import (
    Number,
    Options,
    Real,
    Tensors,
    check_fields,
    document_of,
    read_document,
)

_SITE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")
_PLACE = re.compile(r"stage/[^/]+/.+", re.DOTALL)
CATEGORIES = {
    "message": "the order could not be read",
    "size": "the order is larger than most_bytes of the site's site.yaml",
    "policy": "the site's policy forbids the order",
    "run": "the site is in another run",
    "configuration": "the site has another configuration for this run",
    "mask": "the site has another mask, or none yet",
    "round": "the site has answered this round, or a later one, to an order with other content: go on from "
    "the run's last checkpoint with the same configuration, or start a new run",
    "sum": "the site does not take part in this secure sum, was restarted during it, or would reveal too much",
    "clients": "a client that was asked is not at the site",
    "model": "the order's model does not fit the site's",
    "setup": "the site cannot run this configuration",
    "data": "the site's data could not be read",
    "training": "training raised an error",
    "not_finite": "a loss or an update is not finite",
    "examples": "a client has no examples",
    "memory": "there was not enough memory",
    "disk": "the site's disk is full or cannot be written to",
    "busy": "the site is working on another order",
    "stopped": "the site is being stopped",
    "lost": "the site's process ended without an error message",
    "other": "an error of no other category",
}

Category = Annotated[str, partial(check_choice, choices=CATEGORIES)]


@dataclass(frozen=True)
class Failure:
    """Error at a site as the server learns of it: its category, and the id under which the site has logged it.

    Attributes:
        category: one of `CATEGORIES`.
        id: 16 random hexadecimal digits, under which the site's log has the exception.

    Example:
        >>> Failure("training", "0123456789abcdef").sentence
        "training raised an error; the site's log has more under 0123456789abcdef"
    """

    category: Category
    id: Annotated[str, partial(check_hex, digits=16)] = field(
        default_factory=lambda: secrets.token_hex(8)
    )

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def sentence(self) -> str:
        """Sentence for people at the server: what kind of error it is, and its id in the site's log."""
        return f"{CATEGORIES[self.category]}; the site's log has more under {self.id}"


class OrderRefused(Exception):  # noqa: N818 - nothing broke
    """Raised at a site that refuses an order of the server.

    Args:
        category: category that the server is told.
        reason: explanation for the site's own log.
    """

    def __init__(self, category: str, reason: str) -> None:
        super().__init__(reason)
        self.category = category


def category_of(error: BaseException) -> str:
    """Return the category of an error, which may leave the site; the error's text may not.

    Example:
        >>> category_of(MemoryError()), category_of(OSError(28, "no space left on device"))
        ('memory', 'disk')
    """
    if isinstance(error, OrderRefused):
        return error.category
    if isinstance(error, MemoryError):
        return "memory"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
        return "disk"
    if isinstance(error, Refused):
        return "policy"
    if isinstance(error, (ConfigurationError, SystemExit)):
        return "setup"
    return "other"


@cache
def package_version() -> str:
    """Return the installed version of fl_lightning."""
    return version("fl_lightning")


def check_site(name: Any, what: str = "site") -> str:
    """Check the name of a site, which is also used as a file name, and return it.

    Example:
        >>> check_site("../etc")
        Traceback (most recent call last):
        ...
        fl_lightning.core.plain_json.MessageError: site must be 1 to 63 letters, digits, _, . or -, \
the first a letter or digit, got '../etc'
    """
    if type(name) is not str or not _SITE.fullmatch(name):
        raise MessageError(
            f"{what} must be 1 to 63 letters, digits, _, . or -, the first a letter or digit, "
            f"got {shown(name)}"
        )
    return name


def _check_clients(what: str, clients: Any) -> None:
    """Refuse a value that is not a tuple of different clients."""
    if type(clients) is not tuple:
        raise MessageError(f"{what} must be a list, in Python a tuple, got {shown(clients)}")
    for client in clients:
        check_whole(f"{what}: each", client)
    if len(set(clients)) < len(clients):
        raise MessageError(f"{what} must name every client once, got {shown(clients)}")


Site = Annotated[str, lambda what, name: check_site(name, what)]
Clients = Annotated[tuple[int, ...], _check_clients]
Digest = Annotated[str, partial(check_hex, digits=64)]
Kind = Literal["hello", "calibrate", "train", "sum", "evaluate", "stop"]
KINDS: tuple[str, ...] = get_args(Kind)


def digest(content: bytes) -> str:
    """Return the SHA-256 of an order's bytes, which the answer to this order repeats."""
    return hashlib.sha256(content).hexdigest()


@dataclass(frozen=True, kw_only=True, eq=False)
class _Message:
    """Fields that an order of the server and the answer of a site have in common.

    Attributes:
        options: further values, plain JSON.
        tensors: tensors on the CPU, by name.
        version: version of fl_lightning, which must be the same at the server and the sites.

    Raises:
        MessageError: for values out of range.
    """

    NAME: ClassVar[str]
    options: Options = field(default_factory=dict)
    tensors: Tensors = field(default_factory=dict)
    version: str = field(default_factory=lambda: package_version())

    def __post_init__(self) -> None:
        self._check_version(vars(self))
        check_fields(self)

    def to_bytes(self) -> bytes:
        """Return the order or answer as bytes."""
        return write(self.NAME, document_of(self), self.tensors)

    @classmethod
    def from_bytes(cls, content: bytes, *, limit: int) -> Self:
        """Read an order or answer from untrusted bytes.

        Args:
            content: untrusted bytes.
            limit: largest number of bytes that is read.

        Raises:
            MessageError: if `to_bytes` cannot have made the bytes, or made them in another version.
        """
        document, tensors = read(content, cls.NAME, limit=limit)
        cls._check_version(document)  # first: other versions may have other fields
        return read_document(cls, document, f"an {cls.NAME}", tensors=tensors)

    @classmethod
    def _check_version(cls, told: Mapping[str, Any]) -> None:
        found, of_site = told.get("version"), ""
        if "site" in told:
            of_site = f" of {check_site(told['site'])}"
        if found != package_version():
            raise MessageError(
                f"the {cls.NAME}{of_site} has fl_lightning {shown(found)}, here it is "
                f"{package_version()!r}: install the same version at the server and the sites"
            )


@dataclass(frozen=True, kw_only=True, eq=False)
class Order(_Message):
    """Message by which the server asks a site to do something, such as to train or evaluate clients.

    Attributes:
        kind: ``hello`` begins a run and asks for facts about the site, ``calibrate`` asks for scores or
            sums for a mask, a head or batch norm statistics, ``train`` for updates, ``sum`` for a stage of a
            hidden sum, ``evaluate`` for metrics; ``stop`` ends the run at the site.
        run: id of the run, 32 hexadecimal digits; a resumed run keeps its id.
        round: number of the round, ≥ 0.
        configuration: SHA-256 of the configuration of the run.
        clients: clients of the order; at least one for ``train``.
        counted: last round in which each client's update was used, -1 for none; a site discards client
            state of later rounds. It contains at least the clients of an order to train.
        tensors: ``model`` (bytes as uint8, see `Packing.model`), ``stage/<key>/<name>``.

    Example:
        >>> order = Order(kind="hello", run="a" * 32, configuration="b" * 64, round=0)
        >>> Order.from_bytes(order.to_bytes(), limit=1000).kind
        'hello'
    """

    NAME = "order"
    kind: Kind
    run: Annotated[str, partial(check_hex, digits=32)]
    round: Number
    configuration: Digest
    clients: Clients = ()
    counted: Mapping[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        for client, number in self.counted.items():
            check_whole(f"counted: client {client}", number, -1, self.round)
        for name in self.tensors:
            if name != "model" and not is_stage_tensor(name):
                raise MessageError(
                    f"tensors of an order are model and stage/<key>/<name>, not {shown(name)}"
                )
        if self.kind == "train" and not self.clients:
            raise MessageError("clients: an order to train must name at least one client")
        missing = [client for client in self.clients if client not in self.counted]
        if self.kind == "train" and missing:
            raise MessageError(
                f"counted must contain all clients of an order to train; missing: {shown(missing)}"
            )


def is_stage_tensor(name: str) -> bool:
    """True if a message's tensor belongs to a stage of the run, by its name ``stage/<key>/<name>``.

    Example:
        >>> is_stage_tensor("stage/corrector/layers.0.weight"), is_stage_tensor("stage/corrector")
        (True, False)
    """
    return _PLACE.fullmatch(name) is not None


def _check_steps(what: str, steps: Any) -> None:
    check_number(what, steps)
    if steps < 0:
        raise MessageError(f"{what} must be ≥ 0, got {steps}")


@dataclass(frozen=True, kw_only=True, eq=False)
class ClientAnswer:
    """One client's part of a site's answer: its counts, metrics and facts, or why it failed.

    Attributes:
        client: global id of the client.
        num_examples: number of examples of the client.
        num_steps: number of local steps.
        optimizer_steps: number of local steps that the optimizer took, of each optimizer if there are
            several; None for all.
        effective_steps: number of gradients that the update sums up, ≥ 0; None if the aggregator does
            not need it.
        metrics: 0-d tensors by name, which may be NaN.
        facts: finite numbers by name.
        failure: category in `CATEGORIES` of a client that failed; its other fields have their defaults.

    Raises:
        MessageError: for values out of range.
    """

    client: Number
    num_examples: Number = 0
    num_steps: Number = 0
    optimizer_steps: Number | tuple[Number, ...] | None = None
    effective_steps: Annotated[float, _check_steps] | None = None
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    facts: Mapping[str, Real] = field(default_factory=dict)
    failure: Category | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.failure is None:
            return
        nothing = ClientAnswer(client=self.client)
        for name in (each.name for each in fields(self) if each.name != "failure"):
            if getattr(self, name) != getattr(nothing, name):
                raise MessageError(f"{name} must be left out for a client that failed")


@dataclass(frozen=True, kw_only=True, eq=False)
class Answer(_Message):
    """Message by which a site answers an order of the server: its clients' results, or a failure.

    Attributes:
        site: name of the site.
        order: SHA-256 of the order's bytes, see `digest`; it stands for kind, run and round of the order.
        clients: results of the clients of the order.
        tensors: ``<client>/payload`` (bytes as uint8) and ``<client>/stage/<key>/<name>`` of clients
            that did not fail, ``stage/<key>/<name>`` of the site as a whole.
        failure: failure of the whole order; then there are no clients, options or tensors.
    """

    NAME = "answer"
    site: str
    order: Digest
    clients: tuple[ClientAnswer, ...] = ()
    failure: Failure | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_clients("clients", tuple(client.client for client in self.clients))
        senders = {str(each.client) for each in self.clients if each.failure is None}
        for name, tensor in self.tensors.items():
            client, _, rest = name.partition("/")
            is_payload = client in senders and rest == "payload"
            is_known = is_stage_tensor(name) or (client in senders and is_stage_tensor(rest))
            if not (is_payload or is_known):
                raise MessageError(
                    "tensors of an answer are <client>/payload and <client>/stage/<key>/<name> of "
                    f"clients that did not fail, and stage/<key>/<name>, not {shown(name)}"
                )
            form = form_of(name, tensor)
            if is_payload and (form[0], len(form[1])) != ("U8", 1):
                raise MessageError(f"{name} must be bytes, a uint8 tensor of one dimension")
        if self.failure is not None and (self.clients or self.options or self.tensors):
            raise MessageError("an answer with a failure has no clients, options or tensors")
