"""Exchange of messages with sites: the server sends orders, and gets one reply to each."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.plain_json import MessageError, shown
from fl_lightning.flower.messages import (
    CATEGORIES,
    Answer,
    ClientAnswer,
    Order,
    digest,
)
from fl_lightning.flower.packing import of_stage
from fl_lightning.flower.transport.channel import LARGEST, Channel

_PAUSE = 1.0  # seconds
# failures of a site that was restarted, and has not been greeted since
_OF_RESTARTED = ("run", "stopped", "mask", "busy", "lost")


@dataclass(frozen=True)
class Reply:
    """Answer of a site to an order, or the reason that there is none.

    Attributes:
        site: name of the site.
        order: order that was sent.
        answer: answer of the site; None without one.
        reason: reason that there is no answer.
        bytes_up: size of the answer.
        bytes_down: size of the order.
    """

    site: str
    order: Order
    answer: Answer | None
    reason: str = ""
    bytes_up: int = 0
    bytes_down: int = 0

    @property
    def parts(self) -> Iterator[Part]:
        """Parts of the reply, one for each client of the order."""
        clients, answer = self.order.clients, self.answer
        given = {} if answer is None else {each.client: each for each in answer.clients}
        for client in clients:
            said, reason = (
                given.get(client),
                self.reason or "the answer of its site does not contain it",
            )
            if said is not None and said.failure is not None:
                reason, said = CATEGORIES[said.failure], None
            yield Part(
                client,
                self,
                said,
                reason,
                {} if answer is None else of_stage(f"{client}/", answer.tensors),
                self.bytes_up // len(clients),
                self.bytes_down // len(clients),
            )


class Part(NamedTuple):
    """One client's part of a site's reply.

    Attributes:
        client: id of the client.
        reply: reply of its site.
        answer: answer of the client; None without one, or if the client failed.
        reason: reason that there is no answer.
        tensors: tensors of the client, by name.
        bytes_up: share of the size of the site's answer.
        bytes_down: share of the size of the order.
    """

    client: int
    reply: Reply
    answer: ClientAnswer | None
    reason: str
    tensors: Mapping[str, Tensor]
    bytes_up: int
    bytes_down: int


def in_order(clients: Sequence[int], parts: Iterable[Part]) -> Iterator[Part]:
    """Yield clients' parts of replies in the given order of clients; a part waits for all parts before it."""
    came: dict[int, Part] = {}
    waiting = deque(clients)
    for part in parts:
        came[part.client] = part
        while waiting and waiting[0] in came:
            yield came.pop(waiting.popleft())


@dataclass(eq=False)
class _PendingOrder:
    """An order that was sent to a site, or that waits until the site has replied to an earlier order.

    Attributes:
        site: name of the site.
        order: the order.
        content: bytes of the order.
        sent: bytes that the site was sent last: those of the order or of a greeting.
        until: time at which the order is given up; None while it waits.
        again_at: time at which the site is greeted and asked again; None while it works.
    """

    site: str
    order: Order
    content: bytes
    sent: bytes
    until: float | None = None
    again_at: float | None = None


class Correspondence:
    """Sends orders to sites and returns their replies; a site gets one order at a time, further ones wait.

    A site that is lost while it works (killed, restarted, cut off) is greeted and asked again as soon as
    it is back, until the deadline: the same order gives the same answer.

    Args:
        channel: transport to the sites.
        deadline: seconds that a site may take for an order.
    """

    def __init__(self, channel: Channel, *, deadline: float = 3600.0) -> None:
        self._channel, self._deadline = channel, deadline
        self._lines: dict[str, deque[_PendingOrder]] = {}  # orders by site; the first one was sent
        self._posted: deque[Reply] = deque()  # replies to posted orders

    def greet(self, write: Callable[[], Order], wanted: int) -> dict[str, Answer]:
        """Wait until enough sites are connected, send each the run's first order (``hello``), and return their answers.

        Args:
            write: makes the ``hello``; it is called again for sites that come back later.
            wanted: number of sites to wait for.

        Raises:
            ConfigurationError: if a site refuses.
        """
        self._write, order = write, write()
        told: Sequence[str] | None = None
        while len(present := self._channel.sites()) < wanted:
            if told != present:
                there = ", ".join(present) or "none"
                rank_zero_info(f"waiting for {wanted} sites; connected so far: {there}")
            told = present
            time.sleep(_PAUSE)
        answers: dict[str, Answer] = {}
        for reply in self.ask(dict.fromkeys(present, order)):
            if reply.answer is None:
                raise ConfigurationError(f"site {reply.site}: {reply.reason}")
            answers[reply.site] = reply.answer
        return answers

    def ask(self, orders: Mapping[str, Order], *, greet: bool = False) -> Iterator[Reply]:
        """Send an order to each site, and yield the replies in the order of their arrival.

        A late or invalid answer gives a reply without an answer. These orders overtake posted orders that
        still wait in line.

        Args:
            orders: orders by site.
            greet: True to greet each site first, before the same deadline.
        """
        greeting = self._write().to_bytes() if greet else b""
        waiting = {self._put(site, one, greeting, ahead=True) for site, one in orders.items()}
        try:
            while waiting:
                for asked, reply in self._receive():
                    if asked in waiting:
                        waiting.remove(asked)
                        yield reply
                    else:
                        self._posted.append(reply)
        finally:
            for asked in waiting:  # if the caller has stopped iterating
                self._remove(asked)

    def post(self, site: str, order: Order) -> None:
        """Queue an order for a site; `next_reply` returns the reply."""
        self._put(site, order)

    def next_reply(self) -> Reply:
        """Wait for the next reply to an order that `post` has queued, and return it."""
        while not self._posted:
            self._posted.extend(reply for _, reply in self._receive())
        return self._posted.popleft()

    def forget_posted(self) -> None:
        """Drop all orders in the sites' queues, sent or not, and all replies that were not read."""
        self._lines.clear()
        self._posted.clear()

    def _put(
        self, site: str, order: Order, greeting: bytes = b"", *, ahead: bool = False
    ) -> _PendingOrder:
        content = order.to_bytes()
        asked = _PendingOrder(site, order, content, greeting or content)
        line = self._lines.setdefault(site, deque())
        line.insert(1 if ahead else len(line), asked)
        if line[0] is asked:
            self._send(asked)
        return asked

    def _send(self, asked: _PendingOrder) -> None:
        asked.until = time.monotonic() + self._deadline
        self._channel.send(asked.site, asked.sent, self._deadline)

    def _remove(self, asked: _PendingOrder) -> None:
        """Remove an order from its site's queue; if it was the first, send the next order."""
        line = self._lines.get(asked.site, deque())
        if asked not in line:
            return
        was_first = line[0] is asked
        line.remove(asked)
        if line and was_first:
            self._send(line[0])

    def _receive(self) -> list[tuple[_PendingOrder, Reply]]:
        """Wait at most a second, and return the orders that were answered or given up, with their replies."""
        found, now = [], time.monotonic()
        left = min((a.until - now for a in self._in_progress() if a.until), default=_PAUSE)
        for site, came in self._channel.receive(max(0.0, min(left, _PAUSE))):
            line = self._lines.get(site)
            if line and (reply := self._reply(came, line[0])):
                found.append((line[0], reply))
                self._remove(line[0])
        for asked in self._in_progress():
            if asked.until is not None and time.monotonic() >= asked.until:
                reason, down = f"it did not answer within {self._deadline:g} s", len(asked.content)
                found.append((asked, Reply(asked.site, asked.order, None, reason, bytes_down=down)))
                self._remove(asked)
        self._ask_again()
        return found

    def _in_progress(self) -> list[_PendingOrder]:
        return [line[0] for line in self._lines.values() if line]

    def _reply(self, came: bytes | None, asked: _PendingOrder) -> Reply | None:
        """Return a site's reply to its order; None if there is none yet and the order is sent again."""
        site = asked.site
        found = self._read(site, came, digest(asked.sent))
        if found is None:
            asked.again_at = time.monotonic() + _PAUSE
            return None
        if isinstance(found, Answer) and asked.sent != asked.content:  # it has been greeted
            asked.sent = asked.content
            self._channel.send(site, asked.content, self._left(asked))
            return None
        answer, reason = (found, "") if isinstance(found, Answer) else (None, found)
        clients = () if answer is None else answer.clients
        if others := [c.client for c in clients if c.client not in asked.order.clients]:
            answer, reason = None, f"its answer is for clients that were not asked: {shown(others)}"
        up, down = 0 if came is None else len(came), len(asked.content)
        return Reply(site, asked.order, answer, reason, bytes_up=up, bytes_down=down)

    def _ask_again(self) -> None:
        now = time.monotonic()
        due = {
            asked.site: asked
            for asked in self._in_progress()
            if asked.again_at is not None and asked.again_at <= now
        }
        here = [site for site in self._channel.sites() if site in due] if due else []
        greeting = self._write().to_bytes() if here else b""
        for site in here:
            due[site].again_at, due[site].sent = None, greeting
            self._channel.send(site, greeting, self._left(due[site]))

    def _left(self, asked: _PendingOrder) -> float:
        return max(1.0, (asked.until or 0.0) - time.monotonic())

    def _read(self, site: str, came: bytes | None, name: str) -> Answer | str | None:
        """Return a site's decoded answer, or why it cannot be used; None if the order has to be sent again."""
        if came is None:
            return None
        try:
            answer = Answer.from_bytes(came, limit=LARGEST)
        except MessageError as error:
            return f"its answer cannot be read: {error}"
        if answer.site != site:
            return f"its answer has the name of site {answer.site}"
        if answer.order != name:
            return None
        if answer.failure is None:
            return answer
        is_restarted = answer.failure.category in _OF_RESTARTED
        return None if is_restarted else answer.failure.sentence
