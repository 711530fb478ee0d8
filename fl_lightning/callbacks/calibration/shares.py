"""Every process visits its share of the owners of examples; what fails in one, fails in all."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from lightning.pytorch import Trainer

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.whole_numbers import Integers
from fl_lightning.federation.processes.cores import shares
from fl_lightning.federation.processes.ranks import Ranks


def own_share(trainer: Trainer, owners: Integers, work: Integers) -> Integers:
    """Return the positions of the owners that this process visits, increasing.

    Args:
        trainer: whose processes.
        owners: ids.
        work: of each of them, in examples.
    """
    ranks = Ranks(trainer)
    if ranks.size == 1:
        return np.arange(len(owners))
    return shares(work, ranks.size)[ranks.rank]


def visit_together(trainer: Trainer, visit: Callable[[], None]) -> None:
    """Do this process's part; to be called by all of them.

    Raises:
        Exception: what went wrong here; in the other processes a `ConfigurationError` that says it.
    """
    failure: Exception | None = None
    try:
        visit()
    except Exception as error:  # noqa: BLE001 - a process that ended here would leave others waiting
        failure = error
    told = Ranks(trainer).gather(
        None if failure is None else f"{type(failure).__name__}: {failure}"
    )
    if failure is not None:
        raise failure
    if elsewhere := [words for words in told if words is not None]:
        raise ConfigurationError(f"another process failed: {elsewhere[0]}")
