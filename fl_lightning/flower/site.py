"""A site: takes orders as bytes, has its Trainer follow them, answers with bytes.

    hello   here is the configuration of a run; who are you, and how many examples have your clients?
    train   train these clients in this round, from this model
    stop    the run is over

An order that comes again is answered with the same bytes, without being followed again. Whatever goes
wrong here, the server gets a category and an id; this site's log has the rest.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.flower.desk import Desk, Done
from fl_lightning.flower.messages import Answer, Failure, MessageError, Order
from fl_lightning.flower.site_memory import SiteMemory

log = logging.getLogger(__name__)


class Fit(NamedTuple):
    """A fit that a site is to start.

    Attributes:
        configuration: of the run, as YAML.
        desk: where it gets orders.
        memory: what clients remember.
    """

    configuration: str
    desk: Desk
    memory: SiteMemory


class Site:
    """One site of a federation.

    Args:
        name: its own.
        folder: for what it keeps.
        check: refuses configurations that this site does not allow.
        largest: bytes of an order.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        check: Callable[[str], None] = lambda configuration: None,
        largest: int = 2**33,
    ) -> None:
        self._name, self._folder, self._check, self._largest = name, folder, check, largest
        self._fits: SimpleQueue[Fit | None] = SimpleQueue()
        self._desk: Desk | None = None
        self._run = self._configuration = ""
        self._facts: Mapping[str, Any] = {}
        self._round = -1
        self._last: tuple[str, bytes] = "", b""

    def serve(self, fit: Callable[[Fit], None]) -> None:
        """Run one fit after the other, in this thread, until `close`.

        Args:
            fit: sets up and trains; says `Desk.hello` when its data are there.
        """
        while (asked := self._fits.get()) is not None:
            try:
                fit(asked)
            except BaseException as error:
                asked.desk.fail(error)
                if not isinstance(error, (Exception, SystemExit)):
                    raise
            else:
                asked.desk.fail(RuntimeError("the fit has ended"))

    def close(self) -> None:
        """End the present fit, and `serve`."""
        if self._desk is not None:
            self._desk.close()
        self._fits.put(None)

    def handle(self, content: bytes) -> bytes:
        """Return the answer to an order."""
        digest = hashlib.sha256(content).hexdigest()
        if digest == self._last[0]:
            return self._last[1]
        try:
            order = Order.from_bytes(content, limit=self._largest)
        except MessageError as error:
            return self._failed("hello", "", 0, digest, "not understood", error)
        try:
            answer = self._follow(order, digest)
        except Exception as error:  # whatever it says may hold data
            category = "refused" if isinstance(error, ConfigurationError) else "error"
            return self._failed(order.kind, order.run, order.round, digest, category, error)
        told = answer.to_bytes()
        if order.kind == "train":
            self._keep(order, digest, told)
        return told

    def _failed(
        self, kind: Any, run: str, number: int, digest: str, category: str, error: Exception
    ) -> bytes:
        id_ = secrets.token_hex(8)
        log.error("failure %s, %s", id_, category, exc_info=error)
        answer = Answer(
            kind=kind,
            run=run,
            round=number,
            site=self._name,
            order=digest,
            failure=Failure(category=category, id=id_),
        )
        return answer.to_bytes()

    def _follow(self, order: Order, digest: str) -> Answer:
        if order.kind == "hello":
            return self._told(order, digest, options=self._hello(order))
        if (order.run, order.configuration) != (self._run, self._configuration):
            raise ConfigurationError(
                f"the order is of run {order.run} with another configuration than this site agreed to"
            )
        if order.kind == "stop":
            if self._desk is not None:
                self._desk.close()
            self._desk = None
            return self._told(order, digest)
        if order.round <= self._round:
            raise ConfigurationError(
                f"the order is of round {order.round} with other content, and this site has answered "
                f"round {self._round}"
            )
        done = self._asked(order)
        for failure in done.failures:
            log.warning("round %d, %s", order.round, failure, exc_info=failure.__cause__)
        return self._told(order, digest, done=done)

    def _told(
        self,
        order: Order,
        digest: str,
        *,
        options: Mapping[str, Any] | None = None,
        done: Done | None = None,
    ) -> Answer:
        done = done or Done()
        return Answer(
            kind=order.kind,
            run=order.run,
            round=order.round,
            site=self._name,
            order=digest,
            clients=tuple(done.answers),
            options=options or {},
            tensors=done.tensors or {},
        )

    def _hello(self, order: Order) -> Mapping[str, Any]:
        """Start the fit of a configuration, unless it is there, and say what this site has."""
        same = (self._run, self._configuration) == (order.run, order.configuration)
        if not (same and self._desk is not None):
            text = str(order.options["configuration"])
            if hashlib.sha256(text.encode()).hexdigest() != order.configuration:
                raise ConfigurationError(
                    "the configuration is not the one of which it is said to be"
                )
            self._check(text)
            self._start(order, text)
        return self._facts

    def _start(self, order: Order, configuration: str) -> None:
        if self._desk is not None:
            self._desk.close()
        self._run, self._configuration, self._desk = order.run, order.configuration, Desk()
        folder = self._folder / order.run
        self._recall(folder)
        self._fits.put(Fit(configuration, self._desk, SiteMemory(folder)))
        done = self._desk.wait()
        if done.error is not None:
            self._desk = None
            raise done.error
        self._facts = done.facts

    def _asked(self, order: Order) -> Done:
        if self._desk is None:
            raise ConfigurationError("the run has ended at this site: say hello again")
        done = self._desk.ask(order)
        if done.error is not None:
            self._desk = None
            raise done.error
        return done

    def _keep(self, order: Order, digest: str, answer: bytes) -> None:
        """Write down an answer, so that it is the same also after this process was killed."""
        self._round, self._last = order.round, (digest, answer)
        file = self._folder / order.run / "answer"
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(".part")
        partial.write_bytes(f"{order.round} {digest}\n".encode() + answer)
        partial.replace(file)

    def _recall(self, folder: Path) -> None:
        """Know the last answer of a run."""
        self._round, self._last = -1, ("", b"")
        file = folder / "answer"
        if file.exists():
            head, _, answer = file.read_bytes().partition(b"\n")
            number, digest = head.decode().split()
            self._round, self._last = int(number), (digest, answer)
