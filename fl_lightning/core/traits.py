"""Which parts of a run go together: each part says what it needs, what it breaks, and the way out.

A trait is a property of a round. Two parts conflict where one needs a trait that the other breaks. So
a new part says its own traits once, and no other part, and no check, has to know about it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from itertools import permutations

from fl_lightning.core.errors import ConfigurationError


class Trait(Enum):
    """A property of a round, in words that complete "the part needs that …"."""

    SINGLE_UPDATES = "the server reads the update of each client"
    COHORTS = "the server waits for a cohort, whose clients start from the same model"
    UNCHANGED_UPDATES = "updates arrive as the clients made them"
    PRIVATE_CLIENTS = "a client moves nothing but a clipped and noisy mean"
    PRIVATE_EXAMPLES = "an example moves nothing but noisy local steps, whose number is known"
    RETURNED_LOSS = "training_step returns its loss, and leaves the optimizer's step to Lightning"
    ONE_OPTIMIZER = "clients have one optimizer"
    ONE_RATE = "all local steps of a round have one learning rate"
    ONE_MASK = "all clients train the same parameters"
    ALL_PARAMETERS = "no mask keeps parameters from training"
    SIMULATION = "all clients are simulated in the server's program"


Clauses = Mapping[Trait, str]


@dataclass(frozen=True)
class Traits:
    """Traits of a part, each with a clause that completes a sentence about the part.

    Attributes:
        needs: why a trait is needed, e.g. ``"weighs each update by its staleness"``.
        breaks: how a trait is broken, e.g. ``"shows the server sums of whole cohorts only"``.
        instead: what the user can do, in the imperative, e.g. ``"leave asynchronous out"``.

    Example:
        >>> one = Traits(needs={Trait.COHORTS: "compares clients"}, instead={Trait.COHORTS: "use FedProx"})
        >>> other = Traits(breaks={Trait.COHORTS: "waits for nobody"})
        >>> list(conflicts({"Scaffold": one, "FedBuff": other}))
        ['Scaffold compares clients, and FedBuff waits for nobody: use FedProx']
    """

    needs: Clauses = field(default_factory=dict)
    breaks: Clauses = field(default_factory=dict)
    instead: Clauses = field(default_factory=dict)

    def __or__(self, other: Traits) -> Traits:
        """Merge the traits of two; the second's clauses replace the first's."""
        merged = ({**getattr(self, f.name), **getattr(other, f.name)} for f in fields(self))
        return Traits(*merged)

    def without(self, *traits: Trait) -> Traits:
        """Drop some traits: those of a base that a derived part lacks."""
        kept = (
            {t: c for t, c in getattr(self, f.name).items() if t not in traits}
            for f in fields(self)
        )
        return Traits(*kept)


NO_TRAITS = Traits()


def conflicts(parts: Mapping[str, Traits]) -> Iterator[str]:
    """Give a sentence for each trait that one part needs and another breaks.

    Args:
        parts: traits by the name of their part, with its option: ``"federation.aggregator Krum"``.
    """
    for (needing, its), (breaking, others) in permutations(parts.items(), 2):
        for trait in its.needs:
            if trait in others.breaks:
                ways = [each.instead[trait] for each in (its, others) if trait in each.instead]
                yield (
                    f"{needing} {its.needs[trait]}, and {breaking} {others.breaks[trait]}: "
                    + ", or ".join(dict.fromkeys(ways))
                )


def check_together(parts: Mapping[str, Traits]) -> None:
    """Refuse parts that conflict.

    Raises:
        ConfigurationError: with a line for each conflict.
    """
    if problems := list(conflicts(parts)):
        raise ConfigurationError("\n".join(problems))
