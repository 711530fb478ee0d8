"""What a site says of itself when it is greeted: its clients, how they train, what else all must agree on.

`constants_digest`: frozen weights and constants in buffers do not travel, and must be the same on both sides.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn

from fl_lightning.client.local_training import LocalTrainer
from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.plain_json import (
    MessageError,
    check_hex,
    check_string,
    check_whole,
    fields_of,
    shown,
)
from fl_lightning.flower.messages import Answer

STAGES = ("validation", "test")  # for which clients hold out examples
_DIGITS = {"signing": 64, "sum_key": 16}
_MOST_EXAMPLES = 10**9  # of a client: the server makes room for all


@dataclass(frozen=True, kw_only=True)
class SiteFacts:
    """Facts that a site reports of itself.

    Attributes:
        clients: numbers of examples by client.
        held_out: numbers of examples that clients hold out, by stage of `STAGES` and client.
        batch_size: of local batches.
        drop_last: whether a smaller last batch is left out.
        precision: in which it trains.
        signing: public key with which it signs what it says in secure sums, in hexadecimal digits; may be
            empty.
        sum_key: fingerprint of the key of encrypted sums, in hexadecimal digits; may be empty.
        most_bytes: of an order.

    Raises:
        MessageError: for values out of range.

    Example:
        >>> none = {"validation": {3: 0}, "test": {3: 0}}
        >>> facts = SiteFacts(
        ...     clients={3: 90}, held_out=none, batch_size=32, drop_last=False, precision="32-true",
        ...     signing="", sum_key="", most_bytes=1000,
        ... )
        >>> SiteFacts.of_options(facts.options()) == facts
        True
    """

    clients: Mapping[int, int]
    held_out: Mapping[str, Mapping[int, int]]
    batch_size: int
    drop_last: bool
    precision: str
    signing: str
    sum_key: str
    most_bytes: int

    def __post_init__(self) -> None:
        _check_sizes("clients", self.clients)
        if sorted(self.held_out) != sorted(STAGES):
            raise MessageError(
                f"held_out must be of {', '.join(STAGES)}, got {shown(self.held_out)}"
            )
        for stage, sizes in self.held_out.items():
            _check_sizes(f"held_out: {stage}", sizes)
            if sizes.keys() != self.clients.keys():
                raise MessageError(f"held_out: {stage} is of other clients")
        check_whole("batch_size", self.batch_size, 1)
        if type(self.drop_last) is not bool:
            raise MessageError(f"drop_last must be true or false, got {shown(self.drop_last)}")
        check_string(self.precision, "precision")
        for name, digits in _DIGITS.items():
            if getattr(self, name) != "":
                check_hex(name, getattr(self, name), digits)
        check_whole("most_bytes", self.most_bytes, 1)

    def options(self) -> dict[str, Any]:
        """Return it as plain JSON."""
        told = {field.name: getattr(self, field.name) for field in fields(self)}
        held_out = {stage: _pairs(sizes) for stage, sizes in self.held_out.items()}
        return told | {"clients": _pairs(self.clients), "held_out": held_out}

    @classmethod
    def of_options(cls, options: Mapping[str, Any]) -> SiteFacts:
        """Return what `options` wrote.

        Raises:
            MessageError: if it cannot have.
        """
        given = dict(fields_of(dict(options), tuple(f.name for f in fields(cls)), "it"))
        if type(given["held_out"]) is not dict:
            raise MessageError(f"held_out must be a mapping, got {shown(given['held_out'])}")
        held_out = {stage: _sizes(stage, told) for stage, told in given["held_out"].items()}
        return cls(**given | {"clients": _sizes("clients", given["clients"]), "held_out": held_out})


def facts_of(answers: Mapping[str, Answer]) -> dict[str, SiteFacts]:
    """Return what sites have said of themselves, by name.

    Raises:
        ConfigurationError: naming a site that has not.
    """
    found: dict[str, SiteFacts] = {}
    for site, answer in answers.items():
        try:
            found[site] = SiteFacts.of_options(answer.options)
        except MessageError as error:
            raise ConfigurationError(f"site {site}: what it says of itself: {error}") from None
    return found


def _check_sizes(what: str, sizes: Mapping[int, int]) -> None:
    for client, size in sizes.items():
        check_whole(f"{what}: each client", client)
        check_whole(f"{what}: client {client}", size, most=_MOST_EXAMPLES)


def _pairs(sizes: Mapping[int, int]) -> list[list[int]]:
    return [[client, size] for client, size in sorted(sizes.items())]


def _sizes(what: str, told: Any) -> dict[int, int]:
    """Return numbers by client of a list of pairs."""
    if type(told) is not list or not all(type(pair) is list and len(pair) == 2 for pair in told):
        raise MessageError(f"{what} must be a list of pairs, got {shown(told)}")
    sizes = {client: size for client, size in told if type(client) is int}
    if len(sizes) < len(told):
        raise MessageError(f"{what} must be of different clients, got {shown(told)}")
    return sizes


def constants_digest(module: nn.Module, local: LocalTrainer) -> str:
    """Return a SHA-256 of a module's numbers that neither travel nor are a client's own.

    A site whose frozen backbone came from another file would train another model, without a word.

    Args:
        module: that trains.
        local: knows what travels and what clients have for themselves.
    """
    elsewhere = {*local.space.names, *local.buffers.names, *local.own.names}
    named = [*module.named_parameters(), *module.named_buffers()]
    digest = hashlib.sha256()
    for name, tensor in sorted(named, key=lambda pair: pair[0]):
        if name not in elsewhere and tensor.is_floating_point():
            digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} ".encode())
            flat = tensor.detach().cpu().contiguous().reshape(-1)
            digest.update(flat.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
