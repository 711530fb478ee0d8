"""Exceptions, checks of options' ranges, and hints: a name that is close, a client with one example."""

from __future__ import annotations

import math
import re
import signal
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from functools import partial
from typing import Any, ClassVar


class ConfigurationError(ValueError):
    """Raised for an invalid setting; the message names the option, its value and the allowed values.

    The command line prints the message alone, without a traceback.
    """


def raise_together(*checks: Callable[[], object]) -> None:
    """Run all checks, and raise their ConfigurationErrors as one error, one line per check.

    Another exception ends the list: it is probably a consequence of an earlier problem.

    Raises:
        ConfigurationError: if a check raises one.

    Example:
        >>> def refuse(what):
        ...     raise ConfigurationError(f"no {what}")
        >>> raise_together(lambda: refuse("clients"), lambda: None, lambda: refuse("rounds"))
        Traceback (most recent call last):
        ...
        fl_lightning.core.errors.ConfigurationError: no clients
        no rounds
    """
    problems: list[ConfigurationError] = []
    for check in checks:
        try:
            check()
        except ConfigurationError as problem:
            problems.append(problem)
        except Exception:
            if not problems:
                raise
            break
    if len(problems) == 1:
        raise problems[0]
    if problems:
        said = dict.fromkeys(map(str, problems))  # without duplicates
        raise ConfigurationError("\n".join(said))


def check_range(what: str, value: float | None, allowed: str, advice: str = "") -> None:
    """Raise ConfigurationError if an option's value is out of range; the range is given in words.

    Args:
        what: owner and name of the option, e.g. ``"QFedAvg: q"``.
        value: value of the option; None is always allowed.
        allowed: the range: ``at least 1 client``, ``above 0``, ``greater than 0``, ``a finite number``,
            ``in [0, 1)``, ``from 1 to 8``. Infinity is out of range unless ``or inf`` allows it, and so are
            true and false, which Python counts as 1 and 0.
        advice: end of the message.

    Example:
        >>> check_range("bits", 9, "from 1 to 8", ": fewer bits are shorter")
        Traceback (most recent call last):
        ...
        fl_lightning.core.errors.ConfigurationError: bits must be from 1 to 8, got 9: fewer bits are shorter
    """
    if value is None:
        return
    bounds = [float(bound) for bound in re.findall(r"-?\d[\d.]*", allowed)]
    low = bounds[0] if bounds else -math.inf
    high = bounds[1] if bounds[1:] else math.inf
    is_above = value > low if allowed.startswith(("above", "greater", "in (")) else value >= low
    is_below = value < high if allowed.endswith(")") else value <= high
    is_infinite = abs(value) == math.inf and not allowed.endswith(" or inf")
    if is_infinite or isinstance(value, bool) or not (is_above and is_below):
        finite = " and finite" if is_infinite and "finite" not in allowed else ""
        raise ConfigurationError(f"{what} must be {allowed}{finite}, got {value}{advice}")


def did_you_mean(name: str, known: Mapping[str, str]) -> str:
    """Return a question that suggests known names for a misspelt name; empty if no name is close.

    Args:
        name: the misspelt name.
        known: known names, and how each is written in the question.

    Example:
        >>> did_you_mean("Fed", {"FedProx": "fl_lightning.FedProx", "FedDyn": "fl_lightning.FedDyn"})
        'Did you mean fl_lightning.FedDyn or fl_lightning.FedProx?'
    """
    longer = sorted(each for each in known if name and each.startswith(name))
    close = longer[:3] or get_close_matches(name, known, n=1)
    return f"Did you mean {' or '.join(known[each] for each in close)}?" if close else ""


def close_to(name: str, names: Iterable[str], most: int = 30) -> str:
    """Return a sentence that suggests names similar to a misspelt one, or lists all names if they are few.

    Example:
        >>> close_to("lossy", ["loss", "accuracy"]), close_to("x", ["loss"])
        ("Did you mean 'loss'?", 'There are loss.')
    """
    known = {each: repr(each) for each in names}
    if hint := did_you_mean(name, known):
        return hint
    is_short = 0 < len(known) <= most
    return f"There are {', '.join(known)}." if is_short else "See --help for the options."


class Ranged:
    """Base of dataclasses that check the ranges of all their options on construction.

    Attributes:
        ranges: range of each option in words, see `check_range`, if wanted with advice after a colon. The
            ranges of base classes hold as well.

    Example:
        >>> from dataclasses import dataclass
        >>> @dataclass
        ... class Clip(Ranged):
        ...     norm: float
        ...     ranges: ClassVar[dict[str, str]] = {"norm": "greater than 0 or inf: inf clips nothing"}
        >>> Clip(norm=-1.0)
        Traceback (most recent call last):
        ...
        fl_lightning.core.errors.ConfigurationError: Clip: norm must be greater than 0 or inf, got -1.0: inf \
clips nothing
    """

    ranges: ClassVar[dict[str, str]] = {}

    def __post_init__(self) -> None:
        """Raise ConfigurationError for options out of range."""
        checks = []
        for kind in type(self).__mro__:
            for option, text in vars(kind).get("ranges", {}).items():
                what, (allowed, *advice) = f"{type(self).__name__}: {option}", text.partition(":")
                value = getattr(self, option)
                checks.append(partial(check_range, what, value, allowed, "".join(advice)))
        raise_together(*checks)


class ClientFailure(RuntimeError):  # noqa: N818 - "failure" is the field's word
    """Raised for a client (`client_id`) whose update cannot be used, e.g. because it is not finite.

    Example:
        >>> raise ClientFailure(7, "its loss is nan")
        Traceback (most recent call last):
        ...
        fl_lightning.core.errors.ClientFailure: client 7: its loss is nan
    """

    def __init__(self, client_id: int, reason: str) -> None:
        super().__init__(f"client {client_id}: {reason}")
        self.client_id = client_id
        self.reason = reason

    def __reduce__(self) -> tuple[Any, ...]:
        # by default an exception is rebuilt from its message alone
        return type(self), (self.client_id, self.reason), {"args": self.args}


class EnginesDiffer(ConfigurationError):  # noqa: N818 - says what is wrong
    """Raised if training a client in slots (many clients as one batch) and alone gives different results.

    It needs another setting, so it is never skipped as a client's failure is.
    """

    def __init__(self, client_id: int, message: str) -> None:
        super().__init__(message)
        self.client_id = client_id

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.client_id, *self.args)


class RoundFailure(RuntimeError):  # noqa: N818
    """Raised for a round without a usable result, e.g. because too few clients replied."""


class ProcessFailure(RuntimeError):  # noqa: N818
    """Raised if a process of a run ended without an error message; the other processes were stopped."""


class CheckpointFailure(RuntimeError):  # noqa: N818
    """Raised for a checkpoint that could not be written or read."""


class Interrupted(BaseException):
    """Raised if a run is stopped by Ctrl-C (SIGINT) or SIGTERM; `signum` is the signal.

    It is no `Exception`, so that it is never skipped as a client's failure, and no `KeyboardInterrupt`,
    after which Lightning would end the process in its own way.

    Example:
        >>> Interrupted(signal.SIGINT).exit_code
        130
    """

    def __init__(self, signum: int, *details: str) -> None:
        super().__init__(signum, *details)
        self.signum = signum

    def __str__(self) -> str:
        how = "Ctrl-C" if self.signum == signal.SIGINT else signal.Signals(self.signum).name
        return " ".join([f"stopped by {how}", *self.args[1:]])

    @property
    def exit_code(self) -> int:
        """Exit code that shells expect of a process ended by this signal: 128 + signal number."""
        return 128 + self.signum


# One example is too few for batch norm, R² or a standard deviation: these are raised by such layers,
# metrics and losses, and after a step squeezes an axis of length one away.
_RAISED = (ValueError, RuntimeError, IndexError)


def help_with_one_example(error: Exception | None, batch_sizes: Iterable[int]) -> str:
    """Return a hint for a client that failed on a batch of one example; empty if another cause is likely.

    Args:
        error: the exception, or None if a number was not finite.
        batch_sizes: sizes of the batches that were being processed.

    Example:
        >>> help_with_one_example(KeyError("y"), [1]), help_with_one_example(ValueError(), [8])
        ('', '')
        >>> help_with_one_example(ValueError("Expected more than 1 value per channel"), [1])[:48]
        ' (the batch has one example: if that is too few,'
    """
    if 1 not in batch_sizes or not (error is None or isinstance(error, _RAISED)):
        return ""
    return (
        " (the batch has one example: if that is too few, set drop_last in the source's loader, which "
        "leaves a smaller last batch out, or another data.batch_size; for clients that have one example "
        "in all, a partition with min_examples of 2 or more, fewer clients, or "
        "federation.on_client_failure: skip)"
    )
