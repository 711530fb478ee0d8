"""How many clients take part: a share of them, or a number."""

from __future__ import annotations

from fl_lightning.core.errors import ConfigurationError


def check_fraction(fraction: float) -> None:
    """Refuse a share of clients outside (0, 1]."""
    if not 0 < fraction <= 1:
        raise ConfigurationError(
            f"fraction must be in (0, 1], got {fraction}: it is the share of all clients that "
            "takes part in a round. Use size for a number of clients."
        )


def check_cohort_size(
    sampler: str, fraction: float | None, size: int | None, min_size: int
) -> None:
    """Refuse settings that do not say how many clients take part.

    Raises:
        ConfigurationError: unless exactly one of fraction and size is given, each in its range.
    """
    if (fraction is None) == (size is None):
        raise ConfigurationError(
            f"{sampler} needs either fraction or size, got fraction={fraction} and size={size}"
        )
    if fraction is not None:
        check_fraction(fraction)
    if size is not None and size < 1:
        raise ConfigurationError(f"size must be at least 1 client, got {size}")
    if min_size < 1:
        raise ConfigurationError(f"min_size must be at least 1 client, got {min_size}")


def cohort_size(fraction: float | None, size: int | None, min_size: int, num_clients: int) -> int:
    """Return the number of clients in every round.

    Raises:
        ConfigurationError: if there are fewer.

    Example:
        >>> cohort_size(0.25, None, 1, num_clients=10), cohort_size(None, 7, 1, num_clients=10)
        (2, 7)
    """
    if size is None:
        assert fraction is not None
        size = max(min_size, round(fraction * num_clients))
    if size > num_clients:
        raise ConfigurationError(
            f"the cohort has {size} clients but there are only {num_clients}: "
            "lower size or min_size, or raise data.num_clients"
        )
    return size
