"""A round in one line: its number, what is monitored first, then other metrics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from fl_lightning.federation import Federation, logged_in_round


def federation_of(trainer: Trainer) -> Federation | None:
    """Return what makes a Trainer's epochs rounds, if anything does."""
    callbacks: list[object] = trainer.callbacks  # type: ignore[attr-defined]
    return next((c for c in callbacks if isinstance(c, Federation)), None)


def unit(trainer: Trainer) -> str:
    """Return what an epoch of a Trainer is called."""
    return "epoch" if federation_of(trainer) is None else "round"


def metrics_in_order(trainer: Trainer) -> dict[str, float]:
    """Return what checkpoints and early stopping watch, then what the module has in its bar.

    Only what the present round has measured: without a validation none of its metrics.
    """
    found: Mapping[str, object] = logged_in_round(trainer)
    watched = {name: found[name] for name in _monitored(trainer) if name in found}
    in_bar = trainer.progress_bar_metrics.items()
    shown = {
        **watched,
        **{n: v for n, v in in_bar if n in found or n.removesuffix("_step") in found},
    }
    return {name: float(value) for name, value in shown.items()}  # type: ignore[arg-type]


def number(value: float) -> str:
    """Return a metric in as many characters from round to round, if it is not very small or large.

    Example:
        >>> number(0.97), number(12.3456), number(1.5e-5), number(123456.0)
        ('0.970', '12.346', '1.5e-05', '1.23e+05')
    """
    return f"{value:.3f}" if value == 0 or 1e-3 <= abs(value) < 1e4 else f"{value:.3g}"


def round_line(trainer: Trainer) -> str:
    """Return a line about the round that has just ended."""
    last = f"/{trainer.max_epochs}" if (trainer.max_epochs or -1) > 0 else ""
    words = [f"{name} {number(value)}" for name, value in metrics_in_order(trainer).items()]
    known = logged_in_round(trainer)
    if "round/cohort_size" in known:
        words.append(f"{int(known['round/cohort_size'])} clients")
    if float(known.get("round/skipped", 0.0)):
        words.append(f"{int(known['round/skipped'])} skipped")
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


def _monitored(trainer: Trainer) -> Iterator[str]:
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, (ModelCheckpoint, EarlyStopping)) and callback.monitor:
            yield callback.monitor
