"""The server's correspondence: orders out, answers in, each counted once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.flower.channel import Channel, Lost
from fl_lightning.flower.messages import Answer, MessageError, Order, digest

_POLL_SECONDS = 1.0


@dataclass(frozen=True)
class Reply:
    """What has come back from a site.

    Attributes:
        site: which.
        answer: None if there is none.
        reason: why not.
        bytes_up: of the answer.
        bytes_down: of the order.
    """

    site: str
    answer: Answer | None
    reason: str = ""
    bytes_up: int = 0
    bytes_down: int = 0


class Correspondence:
    """Asks sites.

    Args:
        channel: to them.
        deadline: seconds that a site may take for an order.
        largest: bytes of an answer.
    """

    def __init__(self, channel: Channel, *, deadline: float = 3600.0, largest: int = 2**33) -> None:
        self._channel, self._deadline, self._largest = channel, deadline, largest

    @property
    def sites(self) -> list[str]:
        """Those that are there now."""
        return self._channel.sites()

    def ask(self, orders: Mapping[str, Order]) -> Iterator[Reply]:
        """Send an order to each of some sites, and yield what they reply, as it comes.

        A site that does not answer in time, or whose answer is not one, has no answer.
        """
        contents = {site: order.to_bytes() for site, order in orders.items()}
        waiting = {site: digest(content) for site, content in contents.items()}
        for site, content in contents.items():
            self._channel.send(site, content, self._deadline)
        until = time.monotonic() + self._deadline
        while waiting and (left := until - time.monotonic()) > 0:
            for site, came in self._channel.receive(min(left, _POLL_SECONDS)):
                if site in waiting:  # else it is late
                    read = self._read(site, came, orders[site], waiting.pop(site))
                    size = 0 if isinstance(came, Lost) else len(came)
                    yield Reply(site, *read, bytes_up=size, bytes_down=len(contents[site]))
        for site in waiting:
            reason = f"it did not answer within {self._deadline:g} s"
            yield Reply(site, None, reason, bytes_down=len(contents[site]))

    def _read(
        self, site: str, content: bytes | Lost, order: Order, name: str
    ) -> tuple[Answer | None, str]:
        """Return an answer, or why there is none."""
        if isinstance(content, Lost):
            return None, content.category
        try:
            answer = Answer.from_bytes(content, limit=self._largest)
            answer.check_answers(order, name)
        except MessageError as error:
            return None, f"its answer is not one: {error}"
        if answer.site != site:
            return None, f"its answer says that it is {answer.site}"
        if answer.failure is not None:
            return None, answer.failure.sentence
        return answer, ""


def greet(
    correspondence: Correspondence, make_order: Callable[[str], Order], wanted: int
) -> dict[str, Answer]:
    """Return what sites say of themselves, when as many as wanted are there.

    Raises:
        ConfigurationError: if one refuses.
    """
    while len(correspondence.sites) < wanted:
        time.sleep(_POLL_SECONDS)
    orders = {site: make_order(site) for site in correspondence.sites}
    told: dict[str, Answer] = {}
    for reply in correspondence.ask(orders):
        if reply.answer is None:
            raise ConfigurationError(f"site {reply.site}: {reply.reason}")
        told[reply.site] = reply.answer
    return told
