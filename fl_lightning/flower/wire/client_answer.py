"""What one client of a site has done for an order, apart from its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from torch import Tensor

from fl_lightning.flower.wire.container import scalar_of, scalar_text
from fl_lightning.flower.wire.failures import CATEGORIES
from fl_lightning.flower.wire.fields import (
    check_choice,
    check_names,
    check_number,
    check_whole,
    fields_of,
)
from fl_lightning.flower.wire.plain_json import MessageError, shown


@dataclass(frozen=True, kw_only=True, eq=False)
class ClientAnswer:
    """One client's part of an answer.

    Attributes:
        client: its global id.
        num_examples: that its update stands for.
        num_steps: local steps.
        optimizer_steps: how many of these the optimizer took, of each optimizer if there are
            several; None for all.
        effective_steps: how many gradients the update adds up to, ≥ 0; None where nobody asks.
        metrics: by name, each a 0-d tensor, which may be NaN.
        facts: by name, finite.
        failure: a category of `CATEGORIES`; then nothing else but the client is given.

    Raises:
        MessageError: for values out of range.
    """

    client: int
    num_examples: int = 0
    num_steps: int = 0
    optimizer_steps: int | tuple[int, ...] | None = None
    effective_steps: float | None = None
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    facts: Mapping[str, float] = field(default_factory=dict)
    failure: str | None = None

    def __post_init__(self) -> None:
        check_whole("client", self.client)
        for name in ("num_examples", "num_steps"):
            check_whole(name, getattr(self, name))
        steps = self.optimizer_steps
        for each in steps if type(steps) is tuple else () if steps is None else (steps,):
            check_whole("optimizer_steps", each)
        if self.effective_steps is not None:
            check_number("effective_steps", self.effective_steps)
            if self.effective_steps < 0:
                raise MessageError(f"effective_steps must be ≥ 0, got {self.effective_steps}")
        check_names("metrics", self.metrics)
        check_names("facts", self.facts)
        for name, metric in self.metrics.items():
            scalar_text(name, metric)
        for name, value in self.facts.items():
            check_number(f"facts: {name}", value)
        if self.failure is not None:
            self._check_failure()

    def _check_failure(self) -> None:
        check_choice("failure of a client", self.failure, CATEGORIES)
        for each in fields(self):
            if each.name not in ("client", "failure") and getattr(self, each.name):
                raise MessageError(f"a client that failed has no {each.name}")
        if self.optimizer_steps is not None or self.effective_steps is not None:
            raise MessageError("a client that failed has no steps")

    def document(self) -> dict[str, Any]:
        """Return it as JSON; what a client that failed does not have is left out."""
        if self.failure is not None:
            return {"client": self.client, "failure": self.failure}
        steps = self.optimizer_steps
        return {
            "client": self.client,
            "num_examples": self.num_examples,
            "num_steps": self.num_steps,
            "optimizer_steps": list(steps) if isinstance(steps, tuple) else steps,
            "effective_steps": self.effective_steps,
            "metrics": {name: scalar_text(name, value) for name, value in self.metrics.items()},
            "facts": dict(self.facts),
        }

    @staticmethod
    def from_document(document: Any) -> ClientAnswer:
        """Return the answer that a document is of.

        Raises:
            MessageError: if it is of none.
        """
        if isinstance(document, dict) and "failure" in document:
            return ClientAnswer(**fields_of(document, ("client", "failure"), "a client's answer"))
        given = dict(fields_of(document, _FIELDS, "a client's answer"))
        if type(given["optimizer_steps"]) is list:
            given["optimizer_steps"] = tuple(given["optimizer_steps"])
        if type(given["metrics"]) is not dict:
            raise MessageError(f"metrics must be a mapping, got {shown(given['metrics'])}")
        given["metrics"] = {name: scalar_of(text) for name, text in given["metrics"].items()}
        return ClientAnswer(**given)


_FIELDS = tuple(each.name for each in fields(ClientAnswer) if each.name != "failure")
