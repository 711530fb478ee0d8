"""Why a site, or one of its clients, has no result: a category, and nothing that could hold data.

An exception's text may show examples, paths or names of people. The server learns one of these words
and an id, under which the site's own log has the exception.
"""

from __future__ import annotations

import errno
import secrets
from dataclasses import dataclass, field

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.plain_json import check_choice, check_hex
from fl_lightning.flower.rules.class_paths import Refused

CATEGORIES = {
    "message": "the order could not be read",
    "size": "the order is larger than the site allows",
    "policy": "the site does not allow what the order asks for",
    "run": "the site is in another run",
    "configuration": "the site agreed to another configuration",
    "mask": "the site has another mask, or none yet",
    "round": "the site has answered this round, or a later one, to an order with other content: go on from "
    "the run's last checkpoint with the same configuration, or start a new run",
    "sum": "the site has no part in this secure sum, was started again since, or would tell too much",
    "clients": "a client that was asked is not at the site",
    "model": "the order's model does not fit the site's",
    "setup": "the site cannot run this configuration",
    "data": "the site's data could not be read",
    "training": "training raised an error",
    "not_finite": "a loss or an update is not finite",
    "examples": "a client has no examples",
    "memory": "there was not enough memory",
    "disk": "the site's disk is full or cannot be written to",
    "busy": "the site is at another order",
    "stopped": "the site is being stopped",
    "lost": "the site's process ended without a word",
    "other": "something that has no category",
}


@dataclass(frozen=True)
class Failure:
    """Why there is no result.

    Attributes:
        category: one of `CATEGORIES`.
        id: 16 hexadecimal digits, drawn at random, to be found in the site's log.

    Example:
        >>> Failure("training", "0123456789abcdef").sentence
        "training raised an error; the site's log has more under 0123456789abcdef"
    """

    category: str
    id: str = field(default_factory=lambda: secrets.token_hex(8))

    def __post_init__(self) -> None:
        check_choice("category", self.category, CATEGORIES)
        check_hex("id", self.id, 16)

    @property
    def sentence(self) -> str:
        """For people at the server."""
        return f"{CATEGORIES[self.category]}; the site's log has more under {self.id}"


class OrderRefused(Exception):  # noqa: N818 - nothing broke
    """A site does not follow an order.

    Args:
        category: one of `CATEGORIES`; all that leaves the site.
        reason: for the site's log.
    """

    def __init__(self, category: str, reason: str) -> None:
        super().__init__(reason)
        self.category = category


def category_of(error: BaseException) -> str:
    """Return what may be said of an error outside of the site.

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
