"""What can go wrong, by who can mend it.

What helps where a batch of one example is too few, as for batch norm, R² or a spread over a batch.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable
from typing import Any


class ConfigurationError(ValueError):
    """A setting that cannot work: the message names it, what was given, what is allowed.

    The command line prints the message alone, without a traceback.
    """


def raise_together(*checks: Callable[[], object]) -> None:
    """Run all checks, and raise what they refuse as one error, a line for each.

    A check that stumbles over what an earlier one has refused ends the list.

    Raises:
        ConfigurationError: with all problems.

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
        said = dict.fromkeys(map(str, problems))  # once, if two checks say the same
        raise ConfigurationError("\n".join(said))


class ClientFailure(RuntimeError):  # noqa: N818 - "failure" is the field's word
    """A client whose update cannot be used; `client_id` says whose.

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
        # an exception is by default rebuilt from its message, of which there is more than one part
        return type(self), (self.client_id, self.reason), {"args": self.args}


class EnginesDiffer(ConfigurationError):  # noqa: N818 - says what is wrong
    """A client to whom two ways to train gave more than rounding apart; `client_id` says whose.

    It asks for another setting, so that no failure of a client that is skipped is one.
    """

    def __init__(self, client_id: int, message: str) -> None:
        super().__init__(message)
        self.client_id = client_id

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.client_id, *self.args)


class NotFinite(ArithmeticError):  # noqa: N818 - it may be nobody's error
    """A number or a norm of updates that were not multiplied out so far is NaN or infinite."""


class RoundFailure(RuntimeError):  # noqa: N818
    """A round that cannot be trusted: too few clients replied."""


class ProcessFailure(RuntimeError):  # noqa: N818
    """One of several processes ended without a word; the others were stopped."""


class CheckpointFailure(RuntimeError):  # noqa: N818
    """A checkpoint that could not be written or read."""


class Interrupted(BaseException):
    """A run that was asked to stop: by Ctrl-C (SIGINT) or by SIGTERM; `signum` says by which.

    Not an `Exception`: what skips a client's failure must not skip it. Not a `KeyboardInterrupt`, with
    which Lightning ends the process in its own way.

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
        """What a shell expects of a process that ended like this."""
        return 128 + self.signum


# as such layers, metrics and losses raise; and what follows where a step squeezes the one away
_RAISED = (ValueError, RuntimeError, IndexError)


def help_with_one_example(
    error: Exception | None, batch_sizes: Iterable[int], num_examples: int
) -> str:
    """Return what to add to a client's failure; nothing if another reason is likely.

    Args:
        error: what was raised; None if a number came out that is not finite.
        batch_sizes: of the batches that were at work.
        num_examples: that the client trains on.

    Example:
        >>> help_with_one_example(KeyError("y"), [1], 9), help_with_one_example(ValueError(), [8], 9)
        ('', '')
        >>> help_with_one_example(ValueError("Expected more than 1 value per channel"), [1], 1)[:49]
        ' (the client has one example: if that is too few,'
    """
    if 1 not in batch_sizes or not (error is None or isinstance(error, _RAISED)):
        return ""
    if num_examples == 1:
        return (
            " (the client has one example: if that is too few, use a partition with min_examples of 2 "
            "or more, fewer clients, or federation.on_client_failure: skip)"
        )
    return (
        " (the batch has one example: if that is too few, set drop_last in the source's loader, which "
        "leaves a smaller last batch out, or another data.batch_size; for clients that have one example "
        "in all, a partition with min_examples of 2 or more)"
    )
