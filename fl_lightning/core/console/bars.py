"""Pieces of a bar: a time, and how much is done."""

from __future__ import annotations


def duration(seconds: float) -> str:
    """Return a time as a clock shows it.

    Example:
        >>> duration(7.4), duration(75), duration(3 * 3600 + 60)
        ('0:07', '1:15', '3:01:00')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def filled(share: float, width: int) -> str:
    """Return a bar of so many columns, filled from the left.

    Args:
        share: that is filled, in [0, 1].
        width: in columns.

    Example:
        >>> filled(0.5, 8)
        '━━━━────'
    """
    done = round(min(1.0, max(0.0, share)) * width)
    return "━" * done + "─" * (width - done)
