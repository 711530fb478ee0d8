"""Conflicts between the parts of a run: each part lists the traits that it needs and breaks.

A trait is a property of a round. Two parts conflict if one needs a trait that the other breaks. So a
new part lists its own traits once, and no other part, and no check, has to know about it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from itertools import permutations

from fl_lightning.core.errors import ConfigurationError


class Trait(Enum):
    """A condition on a round that a part (e.g. an aggregator) may need or break."""

    SINGLE_UPDATES = "the server reads the update of each client"
    COHORTS = "the server waits for a cohort, whose clients start from the same model"
    UNCHANGED_UPDATES = "updates arrive as the clients made them"
    EXAMPLE_WEIGHTS = "the aggregator weights updates by num_examples"
    PRIVATE_CLIENTS = "a client moves nothing but a clipped and noisy mean"
    PRIVATE_EXAMPLES = "an example moves nothing but noisy local steps, whose number is known"
    RETURNED_LOSS = "training_step returns its loss, and leaves the optimizer's step to Lightning"
    ONE_OPTIMIZER = "clients have one optimizer"
    ONE_RATE = "all local steps of a round have one learning rate"
    ONE_MASK = "all clients train the same parameters"
    ALL_PARAMETERS = "no mask keeps parameters from training"
    SIMULATION = "all clients are simulated in the server's program"
    CLEAR_SUMS = "the server may read sums over a single client's examples"


Clauses = Mapping[Trait, str]


@dataclass(frozen=True)
class Traits:
    """Conditions on a round that a part (e.g. an aggregator) needs or breaks, with reasons for messages.

    Attributes:
        needs: reasons to need a trait, e.g. ``"weighs each update by its staleness"``.
        breaks: ways to break a trait, e.g. ``"shows the server sums of whole cohorts only"``.
        instead: advice to the user, in the imperative, e.g. ``"leave asynchronous out"``.

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
        """Merge the traits of two parts; the clauses of the second replace those of the first."""
        merged = ({**getattr(self, f.name), **getattr(other, f.name)} for f in fields(self))
        return Traits(*merged)

    def without(self, *traits: Trait) -> Traits:
        """Return a copy without some conditions, for a subclass that neither needs nor breaks them."""
        kept = (
            {t: c for t, c in getattr(self, f.name).items() if t not in traits}
            for f in fields(self)
        )
        return Traits(*kept)


NO_TRAITS = Traits()


def conflicts(parts: Mapping[str, Traits]) -> Iterator[str]:
    """Yield a sentence for each condition that one part of a run needs and another part breaks.

    Args:
        parts: traits of each part, by option and class name, e.g. ``"federation.aggregator Krum"``.
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
    """Raise ConfigurationError if one part of a run breaks a condition that another needs."""
    if problems := list(conflicts(parts)):
        raise ConfigurationError("\n".join(problems))
