"""The server's correspondence: orders out, answers in, each counted once."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.flower.messages import (
    CATEGORIES,
    Answer,
    ClientAnswer,
    MessageError,
    Order,
    digest,
)
from fl_lightning.flower.packing import of_stage
from fl_lightning.flower.transport.channel import Channel, Lost

_PAUSE = 1.0  # seconds
# what a site says that was started again, and has not been greeted yet
_OF_RESTARTED = ("run", "stopped", "mask", "busy", "lost")


@dataclass(frozen=True)
class Reply:
    """Reply of a site.

    Attributes:
        site: which.
        order: what it was asked.
        answer: None if there is none.
        reason: why not.
        bytes_up: of the answer.
        bytes_down: of the order.
    """

    site: str
    order: Order
    answer: Answer | None
    reason: str = ""
    bytes_up: int = 0
    bytes_down: int = 0

    @property
    def parts(self) -> Iterator[Part]:
        """The part of each client that was asked."""
        clients, answer = self.order.clients, self.answer
        given = {} if answer is None else {each.client: each for each in answer.clients}
        for client in clients:
            said, reason = given.get(client), self.reason or "its site's answer has nothing of it"
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
    """A client's part of a site's reply.

    Attributes:
        client: which.
        reply: of its site.
        answer: None if it has none, or has failed.
        reason: why.
        tensors: that go with it, by name.
        bytes_up: its part of the site's answer.
        bytes_down: its part of the site's order.
    """

    client: int
    reply: Reply
    answer: ClientAnswer | None
    reason: str
    tensors: Mapping[str, Tensor]
    bytes_up: int
    bytes_down: int


def by_site(clients: Iterable[int], site_of: Mapping[int, str]) -> dict[str, tuple[int, ...]]:
    """Return the clients of each site, in the order given."""
    found: dict[str, list[int]] = {}
    for client in clients:
        found.setdefault(site_of[client], []).append(client)
    return {site: tuple(some) for site, some in found.items()}


@dataclass(eq=False)
class _Asked:
    """An order on its way, or in line behind others of its site.

    Attributes:
        site: that is asked.
        order: what.
        content: its bytes.
        sent: what the site has been sent last: these, or those of a greeting.
        until: when it is given up; None while it is in line.
        again_at: when the site is to be greeted and asked again; None while it works.
    """

    site: str
    order: Order
    content: bytes
    sent: bytes
    until: float | None = None
    again_at: float | None = None


class Correspondence:
    """Asks sites, each one thing at a time: orders to a site that is at work stand in line.

    A site that is lost while it works (killed, restarted, cut off) is greeted and asked again as soon as
    it is there, until the deadline: the same order gives the same answer.

    Args:
        channel: to them.
        deadline: seconds that a site may take for an order.
        largest: bytes of an answer.
    """

    def __init__(self, channel: Channel, *, deadline: float = 3600.0, largest: int = 2**33) -> None:
        self._channel, self._deadline, self._largest = channel, deadline, largest
        self._lines: dict[str, deque[_Asked]] = {}  # of sites; the first is on its way
        self._posted: deque[Reply] = deque()  # replies to what was posted

    def greet(self, write: Callable[[], Order], wanted: int) -> dict[str, Answer]:
        """Answers of the sites to a greeting, once the wanted number is there.

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
        """Send an order to each of some sites, and yield their replies as they come.

        A site that does not answer in time, or whose answer is not one, has no answer. What was posted
        and is on its way is waited for, the rest of it comes after.

        Args:
            orders: by site.
            greet: sites that are greeted anew before.
        """
        greeting = self._write().to_bytes() if greet else b""
        waiting = {
            self._put(site, order, greeting if site in greet else b"", ahead=True)
            for site, order in orders.items()
        }
        try:
            while waiting:
                for asked, reply in self._come():
                    if asked in waiting:
                        waiting.remove(asked)
                        yield reply
                    else:
                        self._posted.append(reply)
        finally:
            for asked in waiting:  # nobody wants to know any more
                self._take_out(asked)

    def post(self, site: str, order: Order) -> None:
        """Put an order in a site's line; `next_reply` returns its reply."""
        self._put(site, order)

    def next_reply(self) -> Reply:
        """Return the next reply to an order that was posted; waits for it."""
        while not self._posted:
            self._posted.extend(reply for _, reply in self._come())
        return self._posted.popleft()

    def forget_posted(self) -> None:
        """Drop the posted orders: those still in line are not sent."""
        self._lines.clear()
        self._posted.clear()

    def _put(
        self, site: str, order: Order, greeting: bytes = b"", *, ahead: bool = False
    ) -> _Asked:
        content = order.to_bytes()
        asked = _Asked(site, order, content, greeting or content)
        line = self._lines.setdefault(site, deque())
        line.insert(1 if ahead else len(line), asked)
        if line[0] is asked:
            self._send(asked)
        return asked

    def _send(self, asked: _Asked) -> None:
        asked.until = time.monotonic() + self._deadline
        self._channel.send(asked.site, asked.sent, self._deadline)

    def _take_out(self, asked: _Asked) -> None:
        """Remove an order; if it was on its way, the next one in the site's line is sent."""
        line = self._lines.get(asked.site, deque())
        if asked not in line:
            return
        was_first = line[0] is asked
        line.remove(asked)
        if line and was_first:
            self._send(line[0])

    def _come(self) -> list[tuple[_Asked, Reply]]:
        """Orders with a reply, and those given up, after at most a second."""
        found, now = [], time.monotonic()
        left = min((a.until - now for a in self._on_their_way() if a.until), default=_PAUSE)
        for site, came in self._channel.receive(max(0.0, min(left, _PAUSE))):
            line = self._lines.get(site)
            if line and (reply := self._reply(came, line[0])):
                found.append((line[0], reply))
                self._take_out(line[0])
        for asked in self._on_their_way():
            if asked.until is not None and time.monotonic() >= asked.until:
                reason, down = f"it did not answer within {self._deadline:g} s", len(asked.content)
                found.append((asked, Reply(asked.site, asked.order, None, reason, bytes_down=down)))
                self._take_out(asked)
        self._ask_again()
        return found

    def _on_their_way(self) -> list[_Asked]:
        return [line[0] for line in self._lines.values() if line]

    def _reply(self, came: bytes | Lost, asked: _Asked) -> Reply | None:
        """Reply of a site to its order; None if the site is asked again."""
        site = asked.site
        answer, reason, is_lost = self._read(site, came, digest(asked.sent))
        if is_lost:
            asked.again_at = time.monotonic() + _PAUSE
            return None
        if answer is not None and asked.sent is not asked.content:  # it has been greeted
            asked.sent = asked.content
            self._channel.send(site, asked.content, self._left(asked))
            return None
        if answer is not None:
            try:
                answer.check_answers(asked.order, digest(asked.content))
            except MessageError as error:
                answer, reason = None, f"its answer is not one: {error}"
        up, down = 0 if isinstance(came, Lost) else len(came), len(asked.content)
        return Reply(site, asked.order, answer, reason, bytes_up=up, bytes_down=down)

    def _ask_again(self) -> None:
        now = time.monotonic()
        due = {
            asked.site: asked
            for asked in self._on_their_way()
            if asked.again_at is not None and asked.again_at <= now
        }
        here = [site for site in self._channel.sites() if site in due] if due else []
        greeting = self._write().to_bytes() if here else b""
        for site in here:
            due[site].again_at, due[site].sent = None, greeting
            self._channel.send(site, greeting, self._left(due[site]))

    def _left(self, asked: _Asked) -> float:
        return max(1.0, (asked.until or 0.0) - time.monotonic())

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
