"""Queue of orders and results between a site's Trainer and the thread that answers the server."""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from queue import SimpleQueue
from types import FrameType
from typing import Any

from torch import Tensor

from fl_lightning.flower.class_paths import Refused
from fl_lightning.flower.messages import ClientAnswer, Order


@dataclass(eq=False)
class OrderResult:
    """Result of an order, to which a round adds client by client.

    Attributes:
        answers: answers of the clients of the order.
        tensors: tensors of the answers.
        options: options of the answer; before the first order, facts about the site.
    """

    answers: list[ClientAnswer] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)


class OutOfTime(SystemExit):
    """Raised if an order takes longer than the site allows; not an `Exception`, to blame no client."""


class OrderQueue:
    """Passes one order at a time to the Trainer, and the result back.

    Args:
        most_minutes: most minutes for the set-up of a fit, and for an order; they are enforced if the fit
            runs in the main thread.
    """

    def __init__(self, most_minutes: float = math.inf) -> None:
        self._most_minutes, self._timer = most_minutes, threading.Timer(0, lambda: None)
        self._orders: SimpleQueue[Order | None] = SimpleQueue()
        self._done: SimpleQueue[OrderResult | BaseException] = SimpleQueue()
        self._waiting: Order | None = None

    def ask(self, order: Order | None) -> OrderResult:
        """Pass an order to the Trainer, and wait for the result.

        Args:
            order: the order; None to wait for the facts of the site, which are the first result.

        Raises:
            BaseException: the error that has ended the fit.
        """
        if order is not None:
            self._orders.put(order)
        done = self._done.get()
        if isinstance(done, BaseException):
            raise done
        return done

    def close(self) -> None:
        """Make the Trainer end its fit."""
        self._orders.put(None)

    def start_clock(self) -> None:
        """Start the time limit: `OutOfTime` is raised in this thread if no answer comes in time."""
        main = threading.main_thread()
        if threading.current_thread() is not main or not math.isfinite(self._most_minutes):
            return
        assert main.ident is not None
        signal.signal(signal.SIGUSR2, self._stop)
        given = [main.ident, signal.SIGUSR2]
        self._timer = threading.Timer(60 * self._most_minutes, signal.pthread_kill, given)
        self._timer.daemon = True
        self._timer.start()

    def _stop(self, signum: int, frame: FrameType | None) -> None:
        if self._timer.finished.is_set():
            raise OutOfTime(
                f"this takes longer than most_minutes of site.yaml, {self._most_minutes:g}"
            )

    def next_order(self) -> Order | None:
        """Wait for the next order and return it; None to end the fit."""
        order, self._waiting = self._waiting, None
        if order is None:
            order = self._orders.get()
        self.start_clock()
        return order

    def first_order(self) -> Order | None:
        """Wait for the first order and return it; `next_order` returns it again."""
        self._waiting = self._orders.get()
        return self._waiting

    def answer(self, done: OrderResult) -> None:
        """Return the result of the last order; before the first one, facts about the site."""
        self._timer.cancel()
        self._done.put(done)

    def fail(self, error: BaseException) -> None:
        """Make `ask` raise the error that has ended the fit."""
        self._timer.cancel()
        self._done.put(Refused(str(error)) if isinstance(error, OutOfTime) else error)
