"""How a local step of many clients is stacked."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StackedOptions:
    """How a local step is stacked.

    Attributes:
        num_slots: clients side by side, G.
        weighted: evaluate the loss by example, so that batches may be padded.
        clip_norm: largest norm of a client's gradient; None for no clipping.
        clip_value: largest absolute value of a gradient's numbers; None for no clipping.
        compiled: have the compiler turn the step into one graph.
        direct: have layers computed by `direct_layers`, where that is possible.
        has_pull: clients may be pulled back to where they began.
        has_shift: a vector may be added to a client's gradients.
    """

    num_slots: int
    weighted: bool = True
    clip_norm: float | None = None
    clip_value: float | None = None
    compiled: bool = False
    direct: bool = False
    has_pull: bool = False
    has_shift: bool = False

    @property
    def changes_gradients(self) -> bool:
        """Whether anything happens to gradients before the optimizer steps."""
        is_clipped = self.clip_norm is not None or self.clip_value is not None
        return is_clipped or self.has_pull or self.has_shift
