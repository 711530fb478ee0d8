"""What does not go with updates that the server cannot read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fl_lightning.client.corrections.correction import Correction
from fl_lightning.core.errors import ConfigurationError
from fl_lightning.federation.stages.attackers import Attackers
from fl_lightning.server.aggregator import Aggregator
from fl_lightning.server.robust.rule import RobustRule
from fl_lightning.server.server import as_aggregator
from fl_lightning.server.staleness import AsyncRule
from fl_lightning.updates.path import Step
from fl_lightning.updates.transform import as_step


def check_secure(
    aggregator: Aggregator | RobustRule | None,
    *,
    updates: Sequence[Step],
    correction: Correction | None,
    asynchronous: AsyncRule | None,
    attackers: Attackers | None,
) -> None:
    """Refuse what needs single updates, if the aggregator does not show them.

    Raises:
        ConfigurationError: one line for each.
    """
    if as_aggregator(aggregator).protection is None:
        return
    name = type(aggregator).__name__
    problems = [*_update_problems(name, updates)]
    if correction is not None and correction.needs_mean:
        problems.append(
            f"with {type(correction).__name__} each client sends the change of what it remembers "
            f"besides its update, which {name} does not hide: use FedProx, or no correction"
        )
    if asynchronous is not None:
        problems.append(
            f"asynchronous weighs each update by its staleness, and with {name} the server sees "
            "only sums of whole cohorts: leave asynchronous out"
        )
    if attackers is not None and attackers.forge is not None:
        problems.append(
            f"attackers.forge makes updates by looking at those of all clients, which nobody sees "
            f"with {name}: use attackers.poison, or the aggregator Mean"
        )
    if problems:
        raise ConfigurationError("federation: " + "; ".join(problems))


def _update_problems(name: str, updates: Sequence[Step]) -> Iterator[str]:
    for step in updates:
        option = as_step(step).option_of_sums
        if option is not None and name == "SecureMean":
            yield (
                f"updates: {type(step).__name__} draws other coordinates for every client: give it to "
                f"the aggregator, as {option} of SecureMean, which draws the same for all"
            )
        else:
            yield (
                f"updates: {type(step).__name__} makes something of each update that does not add "
                f"up (coordinates chosen by value, other levels for every client), and with {name} "
                "only sums arrive: leave it out"
                + ("; SecureMean has random_k, levels and bits" if name == "SecureMean" else "")
            )
