"""What helps where a batch of one example is too few, as for batch norm, R² or a spread over a batch."""

from __future__ import annotations

from collections.abc import Iterable

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
