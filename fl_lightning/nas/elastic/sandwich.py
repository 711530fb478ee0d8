"""Which sub-networks a step trains, and what the largest teaches the others.

    sandwich: the largest, the smallest, and n drawn ones a step; their gradients add up
    loss of the others = -Σ_k p_k log q_k,   p: softmax of the largest's logits, fixed; q: of their own

The gradient of that loss at a sub-network's logits is q - p. What is drawn is a pure function of (seed,
round, client, step): a run that goes on draws what it would have drawn.
Source: Yu et al. 2020, ECCV (BigNAS), section 3.1.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.seeds import torch_generator
from fl_lightning.nas.spaces.sizes import SizeSpace
from fl_lightning.nas.spaces.space import Architecture, SearchSpace

# draws an architecture
Draw = Callable[[torch.Generator], Architecture]


def step_generator(seed: int, *, round_: int, client: int | None, step: int) -> torch.Generator:
    """Return the generator of a step's draws.

    Args:
        seed: of the run.
        round_: of the federation, or epoch without one.
        client: None: all clients draw the same in a step.
        step: of the client in this round.

    Example:
        >>> def draw(client, step):
        ...     generator = step_generator(0, round_=3, client=client, step=step)
        ...     return int(torch.randint(1000, (), generator=generator))
        >>> draw(5, 1) == draw(5, 1), draw(5, 1) == draw(6, 1), draw(None, 1) == draw(None, 2)
        (True, False, False)
    """
    return torch_generator(seed, "sub-networks", round_, 0 if client is None else client + 1, step)


def single(
    space: SearchSpace, generator: torch.Generator, draw: Draw | None = None
) -> Architecture:
    """Return the one sub-network of a step: a single path, as Once-for-All trains."""
    return (draw or space.sample)(generator)


def sandwich(
    space: SizeSpace,
    generator: torch.Generator,
    *,
    num_drawn: int = 2,
    draw: Draw | None = None,
    largest: Architecture | None = None,
) -> list[Architecture]:
    """Return the sub-networks of a step: the largest first, then the smallest, then drawn ones.

    Args:
        space: of sizes.
        generator: of the step.
        num_drawn: how many are drawn.
        draw: draws one; None: every size uniformly.
        largest: what a client can afford; None: the space's.

    Raises:
        ConfigurationError: if ``num_drawn`` is negative.
    """
    if num_drawn < 0:
        raise ConfigurationError(f"num_drawn must be at least 0, got {num_drawn}")
    drawn = [(draw or space.sample)(generator) for _ in range(num_drawn)]
    return [largest or space.largest, space.smallest, *drawn]


def distillation_loss(student: Tensor, teacher: Tensor) -> Tensor:
    """Return the cross-entropy of a sub-network to the largest's probabilities, mean over examples.

    Args:
        student: its logits, (batch, num_classes).
        teacher: the largest's logits; no gradient flows into them.

    Example:
        >>> student, teacher = torch.tensor([[1.0, 1.0, 0.0]]), torch.tensor([[2.0, 0.0, -1.0]])
        >>> round(distillation_loss(student, teacher).item(), 6)
        0.904005
    """
    return -(teacher.detach().softmax(-1) * student.log_softmax(-1)).sum(-1).mean()
