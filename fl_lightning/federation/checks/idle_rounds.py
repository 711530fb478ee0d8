"""Rounds that move nothing: told, since they cost like others."""

from __future__ import annotations

from collections.abc import Iterator

from torch.optim import Optimizer

from fl_lightning.federation.calendar import Calendar
from fl_lightning.federation.options import Options

_NOTHING = 1e-9  # of the rate at the beginning; torch's cosines end at 1e-18 as well as at 0


def idle_lines(
    number: int, options: Options, calendar: Calendar, clients: Optimizer | None, server: Optimizer
) -> Iterator[str]:
    """Give what to tell before a round in which nobody trains or nothing moves.

    Args:
        number: of the round that begins.
        options: what was asked for.
        calendar: who trains when.
        clients: their optimizer, as its schedule left it; None if its rate moves from step to step.
        server: its optimizer, likewise.
    """
    if num_left_out := calendar.groups.num_left_out(number):
        yield (
            f"round {number}: a cohort of {num_left_out} is too small for "
            f"{type(options.aggregator).__name__}, which hides updates among those of "
            f"{calendar.fewest_clients} clients or more: nobody trains, the model stays as it is"
        )
    line = zero_rate_line(number, clients, server, is_private=options.privacy is not None)
    if line is not None:
        yield line


def zero_rate_line(
    round_index: int, clients: Optimizer | None, server: Optimizer, *, is_private: bool
) -> str | None:
    """Return what to tell of a round in which the clients' or the server's rate is 0; else None.

    Args:
        round_index: of the round that begins.
        clients: their optimizer, as its schedule left it; None if its rate moves from step to step.
        server: its optimizer, likewise.
        is_private: whether noise is added to the round's aggregate or to the steps.

    Example:
        >>> import torch
        >>> moving, idle = (torch.optim.SGD([torch.zeros(1)], lr=rate) for rate in (1.0, 0.0))
        >>> zero_rate_line(3, moving, moving, is_private=False) is None
        True
        >>> zero_rate_line(3, moving, idle, is_private=False)[:60]
        "round 3: a learning rate is 0, so nothing moves (the server'"
    """
    pairs = (("the clients' one", clients), ("the server's", server))
    idle = [whose for whose, made in pairs if made is not None and _is_zero(made)]
    if not idle:
        return None
    noise = "; the noise of privacy is all that is left" if is_private else ""
    return (
        f"round {round_index}: a learning rate is 0, so nothing moves ({' and '.join(idle)}){noise}. "
        "Have the schedule reach 0 after the last round"
    )


def _is_zero(optimizer: Optimizer) -> bool:
    return all(
        float(group["lr"]) <= _NOTHING * float(group.get("initial_lr", 1.0))
        for group in optimizer.param_groups
    )
