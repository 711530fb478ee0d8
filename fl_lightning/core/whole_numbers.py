"""Types of integer arrays and of a source of random words."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]
# maps a count to that many random words, uniform on 64 bits
Draw = Callable[[int], Words]
