"""Queue of orders and results between a site's Trainer and the thread that answers the server."""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from queue import SimpleQueue
from types import FrameType
from typing import Any, NoReturn

from torch import Tensor

from fl_lightning.flower.class_paths import Refused
from fl_lightning.flower.messages import ClientAnswer, Order


@dataclass(eq=False)
class OrderResult:
    """Result of an order at a site, filled client by client.

    Attributes:
        answers: answers of the clients of the order.
        tensors: tensors of the answers.
        options: options of the answer; before the first order, facts about the site.
    """

    answers: list[ClientAnswer] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)


class OutOfTime(SystemExit):
    """Raised if an order takes longer than the site allows; code that skips failed clients does not catch it."""


class OrderQueue:
    """Passes orders one at a time to a site's Trainer, and results back to the thread that answers the server.

    Args:
        most_minutes: most minutes for the set-up of a fit, and for an order; enforced only if the fit runs in
            the main thread, which alone can be interrupted.
    """

    def __init__(self, most_minutes: float = math.inf) -> None:
        self._most_minutes = most_minutes
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
        """Start an order's time limit: `OutOfTime` is raised in this thread if its answer comes too late."""
        if self._is_timed:
            signal.signal(signal.SIGALRM, self._stop)
            signal.setitimer(signal.ITIMER_REAL, 60 * self._most_minutes)

    def _stop_clock(self) -> None:
        if self._is_timed:
            signal.setitimer(signal.ITIMER_REAL, 0)

    @property
    def _is_timed(self) -> bool:
        in_main = threading.current_thread() is threading.main_thread()
        return in_main and math.isfinite(self._most_minutes)

    def _stop(self, signum: int, frame: FrameType | None) -> NoReturn:
        raise OutOfTime(
            f"the set-up or an order takes longer than most_minutes of site.yaml, {self._most_minutes:g}"
        )

    def next_order(self) -> Order | None:
        """Wait for the next order and return it; None if the fit is to end."""
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
        """Pass the result of the last order to `ask`; a fit's first result has facts about the site."""
        self._stop_clock()
        self._done.put(done)

    def fail(self, error: BaseException) -> None:
        """Make `ask` raise the error that has ended the fit."""
        self._stop_clock()
        self._done.put(Refused(str(error)) if isinstance(error, OutOfTime) else error)
