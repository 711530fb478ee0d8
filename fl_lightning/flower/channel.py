"""How the server reaches its sites: orders and answers as bytes, whatever carries them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, get_args

Category = Literal[
    "not there",
    "busy with an earlier order",
    "no answer in time",
    "its process died",
    "its process is silent",
    "its process failed",
    "its app failed",
    "the network lost the message",
]
CATEGORIES: tuple[str, ...] = get_args(Category)


@dataclass(frozen=True)
class Lost:
    """An order that a site will not answer.

    Attributes:
        category: why.

    Example:
        >>> Lost("not there").category
        'not there'
    """

    category: Category


class Channel(Protocol):
    """The way to the sites.

    Every order that is sent has exactly one outcome, an answer or a `Lost`. A site has one order at a
    time: until it is known to be free again, it is not among `sites`, and what is sent to it is lost.
    """

    def sites(self) -> list[str]:
        """Return the names of the sites that are there now and could take an order."""

    def send(self, site: str, message: bytes, ttl: float) -> None:
        """Send an order; what becomes of it, `receive` says.

        Args:
            site: its name.
            message: the order.
            ttl: seconds after which its answer is of no use.
        """

    def receive(self, seconds: float) -> list[tuple[str, bytes | Lost]]:
        """Return what has become of orders, site by site, after at most so many seconds."""
