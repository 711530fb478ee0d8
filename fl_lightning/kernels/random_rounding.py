"""Random rounding and random indices in one pass over memory: `random_rounding.c`, see `c_library`.

PyTorch and NumPy need several passes, and draw one number at a time. Results are bit-identical to theirs.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fl_lightning.core.seeds import Integers, Words
from fl_lightning.kernels.c_library import c_function, c_library

SOURCE = Path(__file__).parent / "c" / "random_rounding.c"
_FLAGS = ("-fno-math-errno", "-fno-trapping-math")  # else it rounds one number after the other


def rounds_in_one_pass(values: Tensor) -> bool:
    """True if the C functions of this file support a tensor: float32 on a CPU, with a C compiler."""
    is_plain = values.is_cpu and values.dtype == torch.float32
    return is_plain and c_library(SOURCE, _FLAGS) is not None


def rounded_at_random(
    values: Tensor, steps: Tensor, seed: int, limits: tuple[int, int], shift: float
) -> Tensor:
    """Round ``values / steps + shift`` stochastically to int8, shape (n,).

    Args:
        values: values, shape (n,).
        steps: nonzero step sizes, shape (n,), or (1,) for all values.
        seed: seed of the `torch.Generator` whose `torch.rand` decides the rounding.
        limits: smallest and largest result, to which results are clamped.
        shift: number added before rounding.

    Example:
        >>> values = torch.tensor([2.0, -4.0])
        >>> if rounds_in_one_pass(values):
        ...     assert rounded_at_random(values, torch.ones(1), 0, (-3, 3), 0.0).tolist() == [2, -3]
    """
    values, steps = values.contiguous(), steps.contiguous()
    codes = torch.empty(values.shape, dtype=torch.int8)
    numbers = len(values), steps.numel() == 1, shift, *map(float, limits), seed & 0xFFFFFFFF
    _run("round_at_random", codes, values, steps, *numbers)
    return codes


def places_from(values: Tensor, least: Tensor) -> Tensor:
    """Return the increasing indices of the numbers that are ≥ ``least``.

    Example:
        >>> places_from(torch.tensor([3.0, 1.0, 2.0]), torch.tensor([2.0]))
        tensor([0, 2])
    """
    if not rounds_in_one_pass(values):
        return (values >= least).nonzero().flatten()
    values, places = values.contiguous(), torch.empty(len(values), dtype=torch.int64)
    count = _run("places_from", places, values, len(values), float(least))
    return places[:count].clone()


def keys_below(seed: int, size: int, bound: int) -> tuple[Integers, Words]:
    """Draw ``size`` words from NumPy's PCG64; return indices and values of those that are ≤ ``bound``.

    Example:
        >>> places, keys = keys_below(0, 1000, 2**63)
        >>> bool((np.random.PCG64(0).random_raw(1000)[places] == keys).all()), 400 < len(keys) < 600
        (True, True)
    """
    generator = np.random.PCG64(seed)
    if c_library(SOURCE, _FLAGS) is None:
        drawn = generator.random_raw(size)
        places = np.flatnonzero(drawn <= np.uint64(bound))
        return places, drawn[places]
    state = generator.state["state"]
    halves = [half for name in ("state", "inc") for half in divmod(state[name], 2**64)]
    words = torch.from_numpy(np.array(halves, np.uint64))
    places, keys = torch.empty(2, size, dtype=torch.int64)
    count = _run("keys_below", places, keys, size, bound, words)
    return places[:count].numpy(), keys[:count].numpy().view(np.uint64)


def _run(name: str, *arguments: Tensor | float) -> int:
    """Call a C function with pointers, 64-bit integers and float32 numbers as arguments."""
    kinds = {Tensor: ctypes.c_void_p, float: ctypes.c_float}
    types = [kinds.get(type(argument), ctypes.c_int64) for argument in arguments]
    function = c_function(SOURCE, _FLAGS, name, *types)
    function.restype = ctypes.c_int64
    count: int = function(*(a.data_ptr() if isinstance(a, Tensor) else a for a in arguments))
    return count
