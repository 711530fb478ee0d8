"""What the options of robust rules must be."""

from __future__ import annotations

from fl_lightning.core.errors import ConfigurationError


def check_num_attackers(rule: object, num_attackers: int) -> None:
    """Refuse a negative number of attackers.

    Raises:
        ConfigurationError: naming the rule.
    """
    if num_attackers < 0:
        raise ConfigurationError(
            f"{type(rule).__name__}: num_attackers must be at least 0 clients, got {num_attackers}"
        )
