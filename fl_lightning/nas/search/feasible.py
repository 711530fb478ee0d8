"""Architectures that meet constraints: steps towards them, draws among them, changes of them.

A draw is uniform while that succeeds; where constraints leave little, a uniform draw is walked
towards them, one decision at a time, in random order. Those are not uniform any more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from fl_lightning.nas.spaces.sizes import SizeSpace
from fl_lightning.nas.spaces.space import Architecture, SearchSpace

UNIFORM_DRAWS = 30
# by how much an architecture misses the constraints
Excess = Callable[[Architecture], float]


def best_by_steps(space: SearchSpace, loss: Callable[[Architecture], float]) -> Architecture:
    """Return an architecture of which no single decision can be changed to lower a loss.

    Where decisions add to the loss by themselves, as they do to costs, it is the lowest there is.

    Args:
        space: of the architectures.
        loss: of an architecture.
    """
    starts = [space.architecture([0] * len(space.decisions))]
    if isinstance(space, SizeSpace):
        starts.append(space.largest)
    ends = [_descended(start, loss, range(len(space.decisions))) for start in starts]
    return min(ends, key=loss)


def draw(space: SearchSpace, excess: Excess, generator: torch.Generator) -> Architecture | None:
    """Return a random architecture that meets constraints; None: this attempt found none.

    Args:
        space: to draw from.
        excess: of an architecture over the constraints.
        generator: of the draws.
    """
    drawn = space.sample(generator)
    for _ in range(UNIFORM_DRAWS):
        if excess(drawn) == 0:
            return drawn
        drawn = space.sample(generator)
    order = torch.randperm(len(space.decisions), generator=generator).tolist()
    walked = _descended(drawn, excess, order, enough=0)
    return walked if excess(walked) == 0 else None


def mutated(
    architecture: Architecture, probability: float, generator: torch.Generator
) -> Architecture:
    """Return an architecture of which each choice is drawn anew with a probability.

    Args:
        architecture: to change.
        probability: in [0, 1], of each decision.
        generator: of the draws.
    """
    space, choices = architecture.space, awake(architecture, generator)
    for index, decision in enumerate(space.decisions):
        if float(torch.rand((), generator=generator)) < probability:
            choices[index] = _drawn(len(decision.options), generator)
    return space.architecture(choices)


def with_one_change(architecture: Architecture, generator: torch.Generator) -> Architecture:
    """Return an architecture of which one choice, drawn among those with an effect, is another."""
    space, choices = architecture.space, awake(architecture, generator)
    active = space.active(architecture.choices) if isinstance(space, SizeSpace) else None
    open_ = [
        index
        for index, decision in enumerate(space.decisions)
        if len(decision.options) > 1 and (active is None or active[index])
    ]
    if not open_:
        return architecture
    index = open_[_drawn(len(open_), generator)]
    others = len(space.decisions[index].options) - 1
    choices[index] = (choices[index] + 1 + _drawn(others, generator)) % (others + 1)
    return space.architecture(choices)


def crossed(first: Architecture, second: Architecture, generator: torch.Generator) -> Architecture:
    """Return an architecture that has each choice from one of two, drawn uniformly."""
    pairs = list(zip(awake(first, generator), awake(second, generator), strict=True))
    sides = torch.randint(2, (len(pairs),), generator=generator).tolist()
    return first.space.architecture([pair[side] for pair, side in zip(pairs, sides, strict=True)])


def awake(architecture: Architecture, generator: torch.Generator) -> list[int]:
    """Return the choices, with random ones where they have no effect.

    Blocks beyond a stage's depth are such: a change that makes the stage deeper would else always
    add the smallest block.
    """
    space, choices = architecture.space, list(architecture.choices)
    if isinstance(space, SizeSpace):
        for index, active in enumerate(space.active(choices)):
            if not active:
                choices[index] = _drawn(len(space.decisions[index].options), generator)
    return choices


def _descended(
    start: Architecture,
    loss: Callable[[Architecture], float],
    order: Sequence[int],
    enough: float = -math.inf,
) -> Architecture:
    """Change one decision after the other to its best option, until none helps or it is enough."""
    best, lowest = start, loss(start)
    space, moved = start.space, True
    while moved and lowest > enough:
        moved = False
        for index in order:
            for option in range(len(space.decisions[index].options)):
                choices = list(best.choices)
                choices[index] = option
                changed = space.architecture(choices)
                if (value := loss(changed)) < lowest:
                    best, lowest, moved = changed, value, True
    return best


def _drawn(count: int, generator: torch.Generator) -> int:
    return int(torch.randint(count, (), generator=generator))
