"""ENAS: a controller samples architectures and learns by REINFORCE which are good.

    R̂ = R + 1e-4 · H(π)             H is a number here: no gradient flows through it
    ∇ = E[(R̂ - b) ∇ log π(a)],      b ← 0.95 b + 0.05 R̂

A baseline b of earlier rewards alone leaves the expectation of the gradient as it is; entropy with a
gradient would not: it adds ∇H times log π. The first reward is its own baseline: no step.
Source: Williams 1992; Pham et al. 2018, ENAS, and its code; Dong, Yang 2020 for a table of logits as
a controller (NAS-Bench-201's REINFORCE) and for the LSTM's constants.
Differs: the released code puts a reward into the baseline before it subtracts the baseline, which
scales every gradient by 0.95.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from fl_lightning.core.errors import ConfigurationError


@dataclass(frozen=True, eq=False)
class Sampled:
    """An architecture that a controller sampled.

    Attributes:
        choices: the number of the option taken at every decision.
        log_probability: log π of them, a scalar; gradients flow to the controller.
        entropy: sum of the entropies of the decisions, in nats, a scalar.
    """

    choices: tuple[int, ...]
    log_probability: Tensor
    entropy: Tensor


class Controller(nn.Module, ABC):
    """A distribution over architectures, one decision after the other.

    Args:
        num_options: of every decision (``[len(d.options) for d in space.decisions]``).

    Raises:
        ConfigurationError: if a decision has no option.
    """

    def __init__(self, num_options: Sequence[int]) -> None:
        super().__init__()
        if not num_options or min(num_options) < 1:
            raise ConfigurationError(
                f"a controller needs decisions with at least one option each, got {list(num_options)}"
            )
        self.num_options = tuple(num_options)

    @abstractmethod
    def begin(self) -> Any:
        """Return the state before the first decision."""

    @abstractmethod
    def logits(self, decision: int, previous: int | None, state: Any) -> tuple[Tensor, Any]:
        """Return the logits of a decision's options, (num_options,), and the next state.

        Args:
            decision: its number.
            previous: the option taken at the decision before it; None: there is none.
            state: after that decision.
        """

    def sample(self, generator: torch.Generator) -> Sampled:
        """Return an architecture; the generator is on the CPU."""
        return self._run(None, generator)

    def of(self, choices: Sequence[int]) -> Sampled:
        """Return the same about given choices.

        Raises:
            ValueError: if there is not one for each decision.
        """
        if len(choices) != len(self.num_options):
            raise ValueError(f"{len(self.num_options)} decisions, got {len(choices)} choices")
        return self._run(choices, None)

    def most_likely(self) -> tuple[int, ...]:
        """Return the architecture of the likeliest option at every decision."""
        return self._run(None, None).choices

    def _run(self, given: Sequence[int] | None, generator: torch.Generator | None) -> Sampled:
        choices: list[int] = []
        log_probabilities, entropies = [], []
        state = self.begin()
        for decision in range(len(self.num_options)):
            previous = choices[-1] if choices else None
            logits, state = self.logits(decision, previous, state)
            logs = logits.log_softmax(0)
            choice = _choice(logs, generator) if given is None else given[decision]
            choices.append(choice)
            log_probabilities.append(logs[choice])
            entropies.append(-(logs.exp() * logs).sum())
        return Sampled(
            tuple(choices), torch.stack(log_probabilities).sum(), torch.stack(entropies).sum()
        )


def _choice(logs: Tensor, generator: torch.Generator | None) -> int:
    if generator is None:
        return int(logs.argmax())
    probabilities = logs.detach().cpu().double().exp()
    return int(torch.multinomial(probabilities, 1, generator=generator))


@final
class TableController(Controller):
    """Logits of their own for every decision; uniform at the start.

    Args:
        num_options: of every decision.
    """

    def __init__(self, num_options: Sequence[int]) -> None:
        super().__init__(num_options)
        self.table = nn.ParameterList([nn.Parameter(torch.zeros(count)) for count in num_options])

    def begin(self) -> Any:
        """Return nothing: decisions do not depend on each other."""
        return None

    def logits(self, decision: int, previous: int | None, state: Any) -> tuple[Tensor, Any]:
        """Return the decision's row."""
        return self.table[decision], None


@final
class LSTMController(Controller):
    """An LSTM that reads the option taken before it names the next.

    Args:
        num_options: of every decision.
        hidden: size of its state, at least 1.
        temperature: T > 0 in c · tanh(logits / T).
        tanh_constant: c > 0: no logit is larger.

    Raises:
        ConfigurationError: if a setting is not positive.
    """

    def __init__(
        self,
        num_options: Sequence[int],
        hidden: int = 64,
        temperature: float = 5.0,
        tanh_constant: float = 2.5,
    ) -> None:
        super().__init__(num_options)
        settings = {"hidden": hidden, "temperature": temperature, "tanh_constant": tanh_constant}
        for name, value in settings.items():
            if not value > 0:
                raise ConfigurationError(f"{name} of the controller must be positive, got {value}")
        self._temperature, self._tanh_constant = temperature, tanh_constant
        self.start = nn.Parameter(torch.empty(1, hidden))
        self.embeddings = nn.ModuleList(nn.Embedding(count, hidden) for count in num_options[:-1])
        self.cell = nn.LSTMCell(hidden, hidden)
        self.heads = nn.ModuleList(nn.Linear(hidden, count) for count in num_options)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -0.1, 0.1)

    def begin(self) -> Any:
        """Return no state: the cell starts from zeros."""
        return None

    def logits(self, decision: int, previous: int | None, state: Any) -> tuple[Tensor, Any]:
        """Return what the LSTM says after the previous option."""
        if previous is None:
            x = self.start
        else:
            x = self.embeddings[decision - 1](torch.tensor([previous], device=self.start.device))
        state = self.cell(x, state)
        logits = self.heads[decision](state[0])[0]
        return self._tanh_constant * torch.tanh(logits / self._temperature), state


@final
class Reinforce:
    """The loss whose gradient is REINFORCE's, and the moving average of rewards.

    Args:
        decay: of the baseline, in [0, 1).
        entropy_weight: of the entropy in the reward, at least 0.

    Raises:
        ConfigurationError: if one is out of its range.
    """

    def __init__(self, decay: float = 0.95, entropy_weight: float = 1e-4) -> None:
        if not 0 <= decay < 1:
            raise ConfigurationError(f"decay of the baseline must be in [0, 1), got {decay}")
        if not entropy_weight >= 0:
            raise ConfigurationError(f"entropy_weight must be at least 0, got {entropy_weight}")
        self._decay, self._entropy_weight = decay, entropy_weight
        self.baseline: float | None = None

    def loss(self, sampled: Sampled, reward: float) -> Tensor:
        """Return -(R̂ - b) log π, and move the baseline.

        Args:
            sampled: by the controller as it is now.
            reward: of it, e.g. its accuracy on a batch of the validation half.

        Raises:
            ValueError: if the reward is not finite.
        """
        reward = float(reward) + self._entropy_weight * float(sampled.entropy.detach())
        if not abs(reward) < float("inf"):
            raise ValueError(f"the reward of an architecture must be finite, got {reward}")
        baseline = reward if self.baseline is None else self.baseline
        self.baseline = self._decay * baseline + (1 - self._decay) * reward
        return -(reward - baseline) * sampled.log_probability

    def state_dict(self) -> dict[str, Any]:
        """Return the baseline."""
        return {"baseline": self.baseline}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up where `state_dict` left off."""
        self.baseline = state["baseline"]
