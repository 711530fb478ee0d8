"""The server's correspondence: orders out, answers in, each counted once."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from lightning.pytorch.utilities import rank_zero_info

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.flower.channel import Channel, Lost
from fl_lightning.flower.messages import Answer, MessageError, Order, digest

_PAUSE = 1.0  # seconds
# what a site says that was started again, and has not been greeted yet
_OF_RESTARTED = ("run", "stopped", "mask", "busy", "lost")


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


@dataclass
class _Asked:
    """An order on its way.

    Attributes:
        order: what a site is asked.
        content: its bytes.
        sent: what the site has been sent last: these, or those of a greeting.
        again_at: when it is to be greeted and asked again; None while it works.
    """

    order: Order
    content: bytes
    sent: bytes
    again_at: float | None = None


class Correspondence:
    """Asks sites.

    A site that is lost while it works (killed, restarted, cut off) is greeted and asked again as soon as
    it is there, until the deadline: the same order gives the same answer.

    Args:
        channel: to them.
        deadline: seconds that a site may take for an order.
        largest: bytes of an answer.
    """

    def __init__(self, channel: Channel, *, deadline: float = 3600.0, largest: int = 2**33) -> None:
        self._channel, self._deadline, self._largest = channel, deadline, largest

    def greet(self, write: Callable[[], Order], wanted: int) -> dict[str, Answer]:
        """Return what sites say of themselves, when as many as wanted are there.

        Args:
            write: writes the ``hello`` as it is at the moment; sites that come back later are greeted so too.
            wanted: how many.

        Raises:
            ConfigurationError: if one refuses.
        """
        self._write, order = write, write()
        told: Sequence[str] | None = None
        while len(present := self._channel.sites()) < wanted:
            if told != present:
                there = ", ".join(present) or "none"
                rank_zero_info(f"waiting until {wanted} sites are there: {there} there so far")
            told = present
            time.sleep(_PAUSE)
        answers: dict[str, Answer] = {}
        for reply in self.ask(dict.fromkeys(present, order)):
            if reply.answer is None:
                raise ConfigurationError(f"site {reply.site}: {reply.reason}")
            answers[reply.site] = reply.answer
        return answers

    def ask(self, orders: Mapping[str, Order], greet: Collection[str] = ()) -> Iterator[Reply]:
        """Send an order to each of some sites, and yield what they reply, as it comes.

        A site that does not answer in time, or whose answer is not one, has no answer.

        Args:
            orders: by site.
            greet: sites that are greeted anew before.
        """
        until = time.monotonic() + self._deadline
        waiting: dict[str, _Asked] = {}
        greeting = self._write().to_bytes() if greet else b""
        for site, order in orders.items():
            content = order.to_bytes()
            waiting[site] = _Asked(order, content, greeting if site in greet else content)
            self._channel.send(site, waiting[site].sent, self._deadline)
        while waiting and (left := until - time.monotonic()) > 0:
            for site, came in self._channel.receive(min(left, _PAUSE)):
                if site in waiting and (reply := self._reply(site, came, waiting[site], left)):
                    del waiting[site]
                    yield reply
            self._ask_again(waiting, until)
        for site, asked in waiting.items():
            reason = f"it did not answer within {self._deadline:g} s"
            yield Reply(site, None, reason, bytes_down=len(asked.content))

    def _reply(self, site: str, came: bytes | Lost, asked: _Asked, left: float) -> Reply | None:
        """Return what a site replies to its order; None if it is asked on or again."""
        answer, reason, is_lost = self._read(site, came, digest(asked.sent))
        if is_lost:
            asked.again_at = time.monotonic() + _PAUSE
            return None
        if answer is not None and asked.sent is not asked.content:  # it has been greeted
            asked.sent = asked.content
            self._channel.send(site, asked.content, left)
            return None
        if answer is not None:
            try:
                answer.check_answers(asked.order, digest(asked.content))
            except MessageError as error:
                answer, reason = None, f"its answer is not one: {error}"
        size = 0 if isinstance(came, Lost) else len(came)
        return Reply(site, answer, reason, bytes_up=size, bytes_down=len(asked.content))

    def _ask_again(self, waiting: Mapping[str, _Asked], until: float) -> None:
        now = time.monotonic()
        due = {s: a for s, a in waiting.items() if a.again_at is not None and a.again_at <= now}
        here = [site for site in self._channel.sites() if site in due] if due else []
        greeting = self._write().to_bytes() if here else b""
        for site in here:
            due[site].again_at, due[site].sent = None, greeting
            self._channel.send(site, greeting, until - now)

    def _read(self, site: str, came: bytes | Lost, name: str) -> tuple[Answer | None, str, bool]:
        """Return an answer, or why there is none and whether the site is only lost for a while."""
        if isinstance(came, Lost):
            return None, came.category, True
        try:
            answer = Answer.from_bytes(came, limit=self._largest)
        except MessageError as error:
            return None, f"its answer is not one: {error}", False
        if answer.site != site:
            return None, f"its answer says that it is {answer.site}", False
        if answer.order != name:
            return None, "its answer is to another order", True
        if answer.failure is not None:
            is_lost = answer.failure.category in _OF_RESTARTED
            return None, answer.failure.sentence, is_lost
        return answer, "", False
