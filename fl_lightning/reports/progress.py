"""The progress bar of a run: completed rounds, time left and metrics, the monitored metric first.

    round 12/50  ━━━━━━────────────────────  1:03 left  val/accuracy 0.861  val/loss 0.412
      clients 3/5  ━━━━━━━━━━━━━━━━━━──────────── 0:07

A round that takes more than five seconds has a second bar below. If standard error is no terminal, a line is
logged for every round instead.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, ProgressBar
from lightning.pytorch.utilities import rank_zero_info
from rich.console import RenderableType
from rich.padding import Padding
from rich.progress_bar import ProgressBar as Bar
from rich.table import Column, Table
from typing_extensions import override

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.federation import Federation, begin_round, logged_in_round
from fl_lightning.reports.layout import duration
from fl_lightning.reports.screen import StatusLines

SECONDS_OF_A_SHORT_ROUND = 5.0
_SECONDS_BETWEEN_DRAWINGS = 0.1


class RoundProgressBar(ProgressBar):
    """Progress bar that counts rounds; printed text and log messages appear above it.

    Args:
        refresh_rate: number of batches between two drawings, ≥ 0; 0 shows no bar.

    Raises:
        ConfigurationError: if the rate is negative.
    """

    def __init__(self, refresh_rate: int = 1) -> None:
        super().__init__()
        if refresh_rate < 0:
            raise ConfigurationError(
                f"refresh_rate must be a whole number, at least 0 (no bar), got {refresh_rate}"
            )
        self.refresh_rate = refresh_rate
        self.is_enabled = refresh_rate > 0
        self._screen = StatusLines(self._show)
        self._pace = Pace()
        self._inner: Inner | None = None
        self._run_bar: Table | None = None
        self._metrics: dict[str, float] = {}  # of the last completed round
        self._has_begun = False  # False while a mask is calibrated, before the first round
        self._drawn_at = 0.0

    @property
    def logs_rounds(self) -> bool:
        """True if the callback logs a line per round instead of a bar, because there is no terminal."""
        return self.is_enabled and not self._screen.is_open

    @override
    def disable(self) -> None:
        self.is_enabled = False

    @override
    def enable(self) -> None:
        self.is_enabled = self.refresh_rate > 0

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Store the Trainer, and enable the progress bar."""
        self._trainer = trainer
        self.enable()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Show the progress bar; from now on, output of all processes appears above it."""
        self._pace, self._metrics, self._has_begun = Pace(trainer.current_epoch), {}, True
        if self.is_enabled:
            self._open()
        self._draw(at_once=True)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start to count the finished clients of a round, or batches of an epoch, for the progress bar."""
        begin_round(trainer)
        federation = federation_of(trainer)
        if federation is None or federation.rounds is None:
            self._inner = Inner("batches", trainer.num_training_batches)
        else:
            rounds, before = federation.rounds, federation.rounds.record

            def num_done() -> int:
                is_new = rounds.record is not before
                return len(rounds.record.finished) * trainer.world_size if is_new else 0

            self._inner = Inner("clients", rounds.run.cohorts.num_clients, num_done)
        self._pace.begin()
        self._draw()

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Update the progress bar after a training batch."""
        if self._inner is not None:
            self._inner.done = batch_idx + 1
        self._draw(batch_idx)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Count the completed round in the progress bar; without a terminal, log a line about it."""
        self._inner = None
        self._pace.end()
        self._metrics = metrics_in_order(trainer)
        if self.logs_rounds:
            rank_zero_info(round_line(trainer))
        self._draw(at_once=True)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Remove the progress bar of the current round, which shows its clients or batches."""
        self._inner = None
        self._draw(at_once=True)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Show a bar that counts the batches of a validation, a test or a prediction."""
        if trainer.sanity_checking:
            return
        if trainer.testing:
            what, batches = "test", trainer.num_test_batches
        elif trainer.predicting:
            what, batches = "predict", trainer.num_predict_batches
        else:
            what, batches = "validation", trainer.num_val_batches
        self._inner = Inner(what, sum(batches))
        if trainer.state.fn != "fit" and self.is_enabled:
            self._open()
        self._draw()

    on_test_start = on_predict_start = on_validation_start

    def on_validation_batch_end(self, trainer: Trainer, *args: Any) -> None:
        """Count a batch of the validation in its bar."""
        if self._inner is not None and not trainer.sanity_checking:
            self._inner.done += 1
            self._draw()

    on_test_batch_end = on_predict_batch_end = on_validation_batch_end  # type: ignore[assignment]

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Remove the progress bar of the validation."""
        self._inner = None
        self._draw()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Print the run's progress bar a last time, above the exception's message."""
        self._close()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Print the run's progress bar a last time, as an ordinary line of text."""
        self._close()

    @contextmanager
    def counting(self, trainer: Trainer, what: str, total: float) -> Iterator[Callable[[], None]]:
        """Show a second bar inside a ``with`` block, and yield a function that advances it by one."""
        self._trainer = (
            trainer  # `setup` did not run in this process if the fit ran in child processes
        )
        was_open, self._inner = self._screen.is_open, Inner(what, total)
        if self.is_enabled:
            self._open()
        self._show()

        def tick() -> None:
            if self._inner is not None:
                self._inner.done += 1
                self._draw()

        try:
            yield tick
        finally:
            self._inner = None
            if not was_open:
                self._screen.close()

    @override
    def print(self, *args: Any, **kwargs: Any) -> None:
        print(*args, **kwargs)  # appears above the bar, like all printed text

    def _draw(self, index: int = 0, *, at_once: bool = False) -> None:
        now = time.monotonic()
        is_due = index % max(1, self.refresh_rate) == 0
        is_due = is_due and now - self._drawn_at > _SECONDS_BETWEEN_DRAWINGS
        if self._screen.is_open and self.trainer.is_global_zero and (at_once or is_due):
            self._drawn_at = now
            is_shown = self._has_begun and self.trainer.state.fn == "fit"
            self._run_bar = self._run_line(self._screen.width) if is_shown else None
            self._show()

    def _show(self) -> None:
        """Redraw the progress bars; called every second, so that their clocks advance."""
        width, inner = self._screen.width, self._inner
        lines: list[RenderableType] = [] if self._run_bar is None else [self._run_bar]
        if inner is not None and (not lines or inner.seconds > SECONDS_OF_A_SHORT_ROUND):
            indent = 2 * len(lines)
            lines.append(Padding.indent(inner.line(width - indent), indent))
        self._screen.show(*lines)

    def _open(self) -> None:
        self._screen.open(draws=self.trainer.is_global_zero)

    def _run_line(self, width: int, *, has_ended: bool = False) -> Table:
        total = self.trainer.max_epochs if (self.trainer.max_epochs or -1) > 0 else None
        label = f"{unit(self.trainer)} {self._pace.done}{f'/{total}' if total else ''}"
        share = None if total is None else self._pace.done / total
        clock = self._pace.words(None if has_ended else total)
        metrics = {**self._metrics, **metrics_in_order(self.trainer)}
        return run_line(label, share, clock, metrics, width)

    def _close(self) -> None:
        if self._screen.is_open:  # False in a parent process, whose children draw the bar
            is_fit = self.trainer.state.fn == "fit" and self.trainer.is_global_zero
            left = [self._run_line(self._screen.width, has_ended=True)] if is_fit else []
            self._screen.close(*left)
        self._inner = self._run_bar = None
        self._has_begun = False


_WIDEST_BAR, _NARROWEST_BAR = 30, 8


class Pace:
    """Counts a run's completed rounds, and estimates the time that is left.

    Args:
        done: number of rounds completed before the fit, by the run that is resumed.
    """

    def __init__(self, done: int = 0) -> None:
        self.done = done
        self._started = self._began = time.monotonic()
        self._seconds: list[float] = []

    def begin(self) -> None:
        """Note the time at which a round starts."""
        self._began = time.monotonic()

    def end(self) -> None:
        """Count a completed round, and store how many seconds it took."""
        self.done += 1
        self._seconds.append(time.monotonic() - self._began)

    def words(self, total: int | None) -> str:
        """Return the estimated time left in words; after the last round, or without a limit, the time taken.

        Args:
            total: number of rounds of the run; None if it has no limit.
        """
        if total is None or self.done >= total:
            return f"in {duration(time.monotonic() - self._started)}"
        # the first round takes longer: engines are measured and compiled in it
        known = self._seconds[1:][-10:] or self._seconds
        if not known:
            return ""
        return f"{duration((total - self.done) * sum(known) / len(known))} left"


class Inner:
    """Second progress bar, within a round: how many of its clients or batches are done.

    Args:
        what: name of the things that are counted.
        total: number of things; infinite if unknown, 0 for work without a count.
        count: returns the number of things that are done; if None, the caller increments `done`.
    """

    def __init__(self, what: str, total: float, count: Callable[[], int] | None = None) -> None:
        self.what, self.total, self.done = what, total, 0
        self._count, self._began = count, time.monotonic()

    @property
    def seconds(self) -> float:
        """Seconds since this bar was made."""
        return time.monotonic() - self._began

    def line(self, width: int) -> Table:
        """Return the bar as a line of text, ``width`` columns wide."""
        is_known = 0 < self.total < float("inf")
        if self._count is not None:
            self.done = min(self._count(), int(self.total))
        count = f" {self.done}{f'/{self.total:.0f}' if is_known else ''}" if self.total else ""
        label = f"{self.what}{count}"
        share = self.done / self.total if is_known else None
        return run_line(label, share, duration(self.seconds), {}, width)


def run_line(
    label: str, share: float | None, clock: str, metrics: Mapping[str, float], width: int
) -> Table:
    """Return a line with a progress bar and metrics; metrics that do not fit are left out, the last first.

    Args:
        label: name and count, as ``round 12/50``.
        share: completed fraction, in [0, 1]; None for no bar.
        clock: time left or taken, in words.
        metrics: values by name.
        width: width of the line in columns.

    Example:
        >>> from fl_lightning.reports.screen import plain
        >>> plain(run_line("round 12/50", 0.25, "1:03 left", {"val/accuracy": 0.861}, 60), 60)
        'round 12/50  ━━━━              1:03 left  val/accuracy 0.861'
    """
    words = [label, *filter(None, [clock])]
    parts = [f"{name} {number(value)}" for name, value in metrics.items()]
    bar = 0 if share is None else _NARROWEST_BAR
    if parts and _length([*words, parts[0]]) + bar > width:
        bar = 0  # the first metric is more important than the bar
    while parts and _length([*words, *parts]) + bar > width:
        parts.pop()
    cells: list[RenderableType] = [*words, *parts]
    if bar:
        cells.insert(
            1, Bar(1.0, share or 0.0, width=min(_WIDEST_BAR, width - _length([*words, *parts])))
        )
    line = Table.grid(*[Column(no_wrap=True) for _ in cells], padding=(0, 2))
    line.add_row(*cells)
    return line


def _length(words: Sequence[str]) -> int:
    """Return the width in columns of words on a line, with two spaces after each word."""
    return len("  ".join([*words, ""]))


@contextmanager
def progress_bar(trainer: Trainer, what: str, total: float) -> Iterator[Callable[[], None]]:
    """Show a progress bar inside a ``with`` block, and yield the function that advances it by one.

    The bar is part of a `RoundProgressBar`; without one, nothing is shown.
    """
    own = trainer.progress_bar_callback
    if isinstance(own, RoundProgressBar):
        with own.counting(trainer, what, total) as tick:
            yield tick
    else:
        yield lambda: None


def federation_of(trainer: Trainer) -> Federation | None:
    """Return the `Federation` callback of a Trainer, or None for central training."""
    callbacks: list[object] = trainer.callbacks  # type: ignore[attr-defined]
    return next((c for c in callbacks if isinstance(c, Federation)), None)


def unit(trainer: Trainer) -> str:
    """Return what a Trainer's epoch is called: ``round`` with a federation, otherwise ``epoch``."""
    return "epoch" if federation_of(trainer) is None else "round"


def metrics_in_order(trainer: Trainer) -> dict[str, float]:
    """Return the round's metrics for the progress bar; metrics that callbacks monitor come first.

    The others are those that the module logs with ``prog_bar=True``.
    """
    found: Mapping[str, object] = logged_in_round(trainer)
    callbacks: list[object] = trainer.callbacks  # type: ignore[attr-defined]
    monitors = [str(c.monitor) for c in callbacks if isinstance(c, ModelCheckpoint | EarlyStopping)]
    watched: dict[str, Any] = {name: found[name] for name in monitors if name in found}
    in_bar = trainer.progress_bar_metrics.items()
    shown = {n: v for n, v in in_bar if n in found or n.removesuffix("_step") in found}
    return {name: float(value) for name, value in {**watched, **shown}.items()}


def number(value: float) -> str:
    """Format a metric's value: three digits after the point, or an exponent if very small or large.

    Example:
        >>> number(0.97), number(12.3456), number(1.5e-5), number(123456.0)
        ('0.970', '12.346', '1.5e-05', '1.23e+05')
    """
    return f"{value:.3f}" if value == 0 or 1e-3 <= abs(value) < 1e4 else f"{value:.3g}"


def round_line(trainer: Trainer) -> str:
    """Return a line of text about the round that has just ended: its metrics, clients and seconds."""
    last = f"/{trainer.max_epochs}" if (trainer.max_epochs or -1) > 0 else ""
    words = [f"{name} {number(value)}" for name, value in metrics_in_order(trainer).items()]
    known = logged_in_round(trainer)
    if "round/cohort_size" in known:
        sampled = int(known["round/cohort_size"])
        absent = {name: int(known.get(f"round/{name}", 0)) for name in ("skipped", "lost")}
        told = ", ".join(f"{count} {name}" for name, count in absent.items() if count)
        clients = f"{sampled} client{'s' * (sampled != 1)}"
        words.append(f"{sampled - sum(absent.values())} of {clients} ({told})" if told else clients)
    if "round/seconds" in known:
        words.append(f"{float(known['round/seconds']):.1f} s")
    federation = federation_of(trainer)
    if federation is not None and federation.clients_side is not None:  # over a network
        words += [
            f"{float(known[f'round/total_bytes_{way}']) / 1e6:.2f} MB {way}"
            for way in ("down", "up")
            if f"round/total_bytes_{way}" in known
        ]
    return f"{unit(trainer)} {trainer.current_epoch + 1}{last}: {', '.join(words) or 'done'}"
