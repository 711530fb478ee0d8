"""Where a site's Trainer meets the thread that speaks with the server."""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from types import FrameType
from typing import Any

import numpy.typing as npt
from torch import Tensor

from fl_lightning.core.errors import ClientFailure
from fl_lightning.flower.class_paths import Refused
from fl_lightning.flower.messages import ClientAnswer, Order


@dataclass(frozen=True)
class Done:
    """Outcome of an order.

    Attributes:
        answers: of its clients.
        tensors: that go with them.
        vectors: of clients whose updates the server is not to see, by client; they stay at the site.
        rules: of the sum of these, by the configuration.
        failures: why some have no update.
        error: what ended the fit, instead of all that.
        options: that go with the answers; of the site, ahead of the first order.
    """

    answers: Sequence[ClientAnswer] = ()
    tensors: Mapping[str, Tensor] | None = None
    vectors: Mapping[int, npt.NDArray[Any]] = field(default_factory=dict)
    rules: Mapping[str, Any] = field(default_factory=dict)
    failures: Sequence[ClientFailure] = ()
    error: BaseException | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


class OutOfTime(SystemExit):
    """An order takes longer than the site allows; no client's failure, so it is no `Exception`."""


class Desk:
    """Hands one order at a time to the Trainer, and its answer back.

    Args:
        most_minutes: for the set-up of a fit, and for an order; kept where the fit is in the main thread.
    """

    def __init__(self, most_minutes: float = math.inf) -> None:
        self._most_minutes, self._timer = most_minutes, threading.Timer(0, lambda: None)
        self._orders: SimpleQueue[Order | None] = SimpleQueue()
        self._done: SimpleQueue[Done] = SimpleQueue()
        self._waiting: Order | None = None

    def ask(self, order: Order) -> Done:
        """Result of the Trainer for an order; waits for it."""
        self._orders.put(order)
        return self._done.get()

    def wait(self) -> Done:
        """Facts of the site before the first order; waits for them."""
        return self._done.get()

    def close(self) -> None:
        """Make the Trainer end its fit."""
        self._orders.put(None)

    def start_clock(self) -> None:
        """Raise `OutOfTime` in this thread, unless there is an answer before the time is over."""
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
        """Return the next order; None to end. Waits for it."""
        order, self._waiting = self._waiting, None
        if order is None:
            order = self._orders.get()
        self.start_clock()
        return order

    def first_order(self) -> Order | None:
        """Return the first order, which `next_order` returns again."""
        self._waiting = self._orders.get()
        return self._waiting

    def hello(self, facts: Mapping[str, Any]) -> None:
        """Send the facts of the site's data."""
        self.answer(Done(options=facts))

    def answer(self, done: Done) -> None:
        """Answer the last order."""
        self._timer.cancel()
        self._done.put(done)

    def fail(self, error: BaseException) -> None:
        """Pass on the error that ended the fit during an order, or before the first."""
        is_late = isinstance(error, OutOfTime)
        self.answer(Done(error=Refused(str(error)) if is_late else error))
