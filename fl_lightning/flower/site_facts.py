"""What a site says of itself when it is greeted: its clients, how they train, what else all must agree on.

`constants_digest`: frozen weights and constants in buffers do not travel, and must be the same on both sides.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import torch
from torch import nn

from fl_lightning.client.local_training import LocalTrainer
from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.plain_json import MessageError, check_hex, check_whole, shown
from fl_lightning.flower.documents import check_fields, read_document
from fl_lightning.flower.messages import Answer

STAGES = ("validation", "test")  # for which clients hold out examples


def _check_key(what: str, key: Any, digits: int) -> None:
    if key != "":
        check_hex(what, key, digits)


# of a client: the server makes room for all
Examples = Annotated[int, partial(check_whole, most=10**9)]
Positive = Annotated[int, partial(check_whole, least=1)]


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
        >>> from fl_lightning.flower.documents import document_of
        >>> none = {"validation": {3: 0}, "test": {3: 0}}
        >>> facts = SiteFacts(
        ...     clients={3: 90}, held_out=none, batch_size=32, drop_last=False, precision="32-true",
        ...     signing="", sum_key="", most_bytes=1000,
        ... )
        >>> read_document(SiteFacts, document_of(facts)) == facts
        True
    """

    clients: Mapping[int, Examples]
    held_out: Mapping[str, Mapping[int, Examples]]
    batch_size: Positive
    drop_last: bool
    precision: str
    signing: Annotated[str, partial(_check_key, digits=64)]
    sum_key: Annotated[str, partial(_check_key, digits=16)]
    most_bytes: Positive

    def __post_init__(self) -> None:
        check_fields(self)
        if sorted(self.held_out) != sorted(STAGES):
            raise MessageError(
                f"held_out must be of {', '.join(STAGES)}, got {shown(self.held_out)}"
            )
        for stage, sizes in self.held_out.items():
            if sizes.keys() != self.clients.keys():
                raise MessageError(f"held_out: {stage} is of other clients")


def facts_of(answers: Mapping[str, Answer]) -> dict[str, SiteFacts]:
    """Return what sites have said of themselves, by name.

    Raises:
        ConfigurationError: naming a site that has not.
    """
    found: dict[str, SiteFacts] = {}
    for site, answer in answers.items():
        try:
            found[site] = read_document(SiteFacts, dict(answer.options))
        except MessageError as error:
            raise ConfigurationError(f"site {site}: what it says of itself: {error}") from None
    return found


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
