"""Numbers in half precision: two bytes each.

    T(x)_i = x_i rounded to the nearest number of bfloat16 (8 bits of precision) or float16 (11 bits)

What is beyond the format's range becomes its largest number, so that everything stays finite.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, final

import torch

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.updates.payload import Dense, Payload, Sparse
from fl_lightning.updates.transform import Transform


@final
@dataclass(frozen=True)
class Cast(Transform):
    """Sends numbers in half precision; after a choice like `TopK` or `PowerSGD`, those chosen.

    Args:
        dtype: ``bfloat16``, which has float32's range, or ``float16``, which is finer between
            6e-8 and 65,504.

    Raises:
        ConfigurationError: for another dtype.

    Example:
        >>> payload = Cast("float16").on_client(Dense(torch.tensor([0.1, 1e9])), seed=0)
        >>> payload.to_dense()
        tensor([9.9976e-02, 6.5504e+04])
    """

    dtype: Literal["bfloat16", "float16"] = "bfloat16"

    def __post_init__(self) -> None:
        if self.dtype not in ("bfloat16", "float16"):
            raise ConfigurationError(f"dtype must be 'bfloat16' or 'float16', got {self.dtype!r}")

    @property
    def name(self) -> str:
        """What it is."""
        return self.dtype

    def on_client(self, payload: Payload, seed: int) -> Payload:
        """Round."""
        if isinstance(payload, Dense):
            dtype: torch.dtype = getattr(torch, self.dtype)
            largest = torch.finfo(dtype).max
            return Dense(payload.to_dense().clamp(-largest, largest).to(dtype))
        if isinstance(payload, Sparse) and isinstance(payload.values, Dense):
            values = self.on_client(payload.values, seed)
            assert isinstance(values, Dense)
            return replace(payload, values=values)
        raise ValueError(f"{self.name}: the numbers are quantised already, quantise once")
