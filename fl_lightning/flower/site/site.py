"""A site: reads orders as bytes, has its Trainer follow them, and answers with bytes.

    hello       begin a run with this configuration and mask, and report facts about the site
    calibrate   score entries for a mask on these clients' examples, or send sums for a head or batch norms
    train       train these clients in this round, from this model
    sum         pass on messages of a hidden sum to these clients, and send their answers
    evaluate    evaluate this model on the examples that these clients hold out
    stop        end the run

A repeated order gets the same answer, without being followed again. If anything goes wrong, the server gets a
category and an id; the site's log has the rest.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import yaml

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.plain_json import MessageError
from fl_lightning.core.yaml_files import load
from fl_lightning.flower.messages import (
    Answer,
    Failure,
    Order,
    OrderRefused,
    category_of,
    digest,
)
from fl_lightning.flower.packing import OPTION, mask_of
from fl_lightning.flower.policy import Policy, Refused
from fl_lightning.flower.site.fit import Fit
from fl_lightning.flower.site.ledger import Ledger, whole_file
from fl_lightning.flower.site.memory import SiteMemory
from fl_lightning.flower.site.order_queue import OrderQueue, OrderResult
from fl_lightning.flower.site.sums import SiteSums
from fl_lightning.flower.transport.resident import AUDIT

log = logging.getLogger(__name__)
audit = logging.getLogger(AUDIT)


class Site:
    """One site of a federation: reads the server's orders, lets its Trainer follow them, and answers.

    Args:
        policy: policy of the site.
        own: options of the site, which override those of every run.
    """

    def __init__(self, policy: Policy, own: Mapping[str, Any]) -> None:
        self._policy, self._own = policy, own
        self._name, self._folder = policy.name, policy.memory
        self._ledger = Ledger(policy.memory / "privacy.json", policy.most_epsilon)
        self._fits: SimpleQueue[Fit | None] = SimpleQueue()
        self._queue: OrderQueue | None = None
        self._run = self._configuration = ""
        self._facts: Mapping[str, Any] = {}
        self._round = -1
        self._mask = ""  # see `RunMask`
        self._has_rounds = True
        self._sums: SiteSums
        self._last: tuple[str, bytes] = "", b""
        self._last_sum: tuple[str, bytes] = "", b""

    def serve(self, fit: Callable[[Fit], None]) -> None:
        """Run the fits that orders begin, one after the other, in this thread, until `close`.

        Args:
            fit: sets up a Trainer and trains; it calls `OrderQueue.answer` with facts when the data are ready.
        """
        while (asked := self._fits.get()) is not None:
            try:
                fit(asked)
            except BaseException as error:
                asked.queue.fail(error)
                if not isinstance(error, (Exception, SystemExit)):
                    raise
            else:
                asked.queue.fail(RuntimeError("the fit has ended"))

    def close(self) -> None:
        """End the current fit, and make `serve` return."""
        self._stop()
        self._fits.put(None)

    def handle(self, content: bytes) -> bytes:
        """Follow an order and return the answer, both as bytes, and add a line to the audit log."""
        began, told = time.monotonic(), {"order": digest(content)[:16], "bytes_in": len(content)}
        answer = b""
        try:
            answer = self._handled(content, told)
            return answer
        finally:
            told["bytes_out"] = len(answer)
            self._audit(told | {"seconds": round(time.monotonic() - began, 3)})

    def _handled(self, content: bytes, told: dict[str, Any]) -> bytes:
        name = digest(content)
        for known, answered in (self._last, self._last_sum):
            if name == known:
                told["again"] = True
                return answered
        try:
            order = Order.from_bytes(content, limit=self._policy.most_bytes)
        except MessageError as error:
            is_large = len(content) > self._policy.most_bytes
            return self._refusal(name, "size" if is_large else "message", error, told)
        told |= {"kind": order.kind, "run": order.run, "round": order.round}
        told["clients"] = list(order.clients)
        try:
            done = self._follow(order)
            answer = Answer(
                site=self._name,
                order=name,
                clients=tuple(done.answers),
                options=done.options,
                tensors=done.tensors,
            )
            content = answer.to_bytes()
            if order.kind == "train":
                self._keep(order, name, content)
            elif order.kind == "sum":
                self._last_sum = name, content
        except Exception as error:  # noqa: BLE001 - whatever it says may hold data
            return self._refusal(name, category_of(error), error, told)
        told["metrics"] = _names_in(answer)
        return content

    def _refusal(self, name: str, category: str, error: Exception, told: dict[str, Any]) -> bytes:
        """Log an error at the site, and return an answer that has only the error's category and an id."""
        failure = Failure(category)
        told["refusal"] = f"{category}: {error}"
        told["failure"] = failure.id
        log.error("failure %s, %s", failure.id, category, exc_info=error)
        return Answer(site=self._name, order=name, failure=failure).to_bytes()

    def _audit(self, told: dict[str, Any]) -> None:
        """Write a line about an order, with the privacy spent so far, to the audit log."""
        try:
            epsilon = {"epsilon_spent": self._ledger.spent(), "epsilon_left": self._ledger.left()}
        except Refused:  # the ledger cannot be read: orders that need it are refused
            epsilon = {"epsilon_spent": None, "epsilon_left": None}
        now = datetime.now(UTC).isoformat(timespec="seconds")
        audit.info(json.dumps({"time": now, "site": self._name} | told | epsilon))

    def _follow(self, order: Order) -> OrderResult:
        if order.kind == "hello":
            return OrderResult(options=self._hello(order))
        self._check_run(order)
        if order.kind == "stop":
            self._stop()
            return OrderResult()
        self._policy.check_clients(order.clients)
        if order.kind == "sum":
            return self._sums.follow(order)
        if order.kind == "calibrate":
            self._policy.check_unprotected("a calibration")
            return self._asked(order)
        if order.options.get("mask", "") != self._mask:
            raise OrderRefused(
                "mask", f"this site has the mask {self._mask or 'of no calibration'}"
            )
        if order.kind == "evaluate" and not self._policy.log_unprotected:
            self._policy.check_unprotected("an evaluation of clients")
        if order.kind == "train":
            self._check_round(order)
        return self._asked(order)

    def _check_run(self, order: Order) -> None:
        if order.run != self._run:
            raise OrderRefused(
                "run", f"the order is of run {order.run}, this site is in run {self._run or 'none'}"
            )
        if order.configuration != self._configuration:
            raise OrderRefused(
                "configuration", f"the order has another configuration, {order.configuration}"
            )

    def _check_round(self, order: Order) -> None:
        # without rounds each client has its own last round, and its state shows if the server went back
        last = self._round if self._has_rounds else max(order.counted.values())
        if order.round <= last:
            raise OrderRefused(
                "round",
                f"this site has answered round {last} already, and the order is of round {order.round}",
            )

    def _hello(self, order: Order) -> Mapping[str, Any]:
        """Start a run's fit unless it is running, switch to a new mask, and return facts about the site."""
        same = (self._run, self._configuration) == (order.run, order.configuration)
        if not (same and self._queue is not None):
            text = str(order.options["configuration"])
            if digest(text.encode()) != order.configuration:
                raise OrderRefused(
                    "configuration",
                    "the text of the configuration does not have the hash in the order",
                )
            self._start(order, self._policy.site_configuration(_parsed(text), self._own))
        mask = mask_of(order)
        if mask is not None and str(mask) != self._mask:
            self._asked(order)
            self._mask = str(mask)
        return self._facts

    def _start(self, order: Order, configuration: Mapping[str, Any]) -> None:
        self._stop()
        self._run, self._configuration = order.run, order.configuration
        self._queue = OrderQueue(self._policy.most_minutes)
        self._mask = ""
        federation = configuration.get("federation") or {}
        # asynchronous clients of one site train from models of several rounds
        self._has_rounds = not federation.get("asynchronous")
        folder = self._folder / order.run
        self._recall(folder)
        self._sums, self._last_sum = SiteSums(folder, self._policy), ("", b"")
        ledger = replace(self._ledger, run=order.run, configuration=order.configuration)
        self._fits.put(Fit(configuration, self._queue, SiteMemory(folder), self._sums, ledger))
        self._facts = self._asked(None).options

    def _asked(self, order: Order | None) -> OrderResult:
        """Pass an order to the fit and return the result; without an order, return facts about the site."""
        if self._queue is None:
            raise OrderRefused(
                "stopped", "the run has ended at this site: the server must greet it again"
            )
        try:
            return self._queue.ask(order)
        except BaseException:
            self._queue = None  # the fit has ended
            raise

    def _stop(self) -> None:
        if self._queue is not None:
            self._queue.close()
        self._queue = None

    def _keep(self, order: Order, name: str, answer: bytes) -> None:
        """Store the answer to an order to train on disk, so that a restarted process can repeat it."""
        self._round, self._last = order.round, (name, answer)
        with whole_file(self._folder / order.run / "answer") as file:
            file.write(f"{order.round} {name}\n".encode() + answer)

    def _recall(self, folder: Path) -> None:
        """Read the last answer of a run from disk."""
        self._round, self._last = -1, ("", b"")
        file = folder / "answer"
        if file.exists():
            head, _, answer = file.read_bytes().partition(b"\n")
            number, name = head.decode().split()
            self._round, self._last = int(number), (name, answer)


def _parsed(text: str) -> Mapping[str, Any]:
    try:
        configuration = load(text)
    except (yaml.YAMLError, ConfigurationError) as error:
        raise OrderRefused("configuration", f"the configuration is not YAML: {error}") from None
    if not isinstance(configuration, dict):
        raise OrderRefused("configuration", "the configuration is no mapping of options")
    return configuration


def _names_in(answer: Answer) -> list[str]:
    """Return the names of all metrics and facts in an answer."""
    single = {n for each in answer.clients for n in (*each.metrics, *each.facts)}
    return sorted(single | {entry[1] for entry in answer.options.get(OPTION, ())})
