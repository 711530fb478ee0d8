"""C kernels with fallbacks in Python: layers, sorting, optimizer steps, noise, rounding.

Other rooms import these names only, never a module below.
"""

from fl_lightning.kernels.gaussian_noise import LARGEST_STDDEV, LEAST_STDDEV, rounded_gaussian
from fl_lightning.kernels.layers import (
    Forwards,
    direct_layers,
    other_forwards,
    reason_against_direct_layers,
)
from fl_lightning.kernels.masked_sgd_step import sgd_in_one_pass
from fl_lightning.kernels.random_rounding import (
    keys_below,
    places_from,
    rounded_at_random,
    rounds_in_one_pass,
)
from fl_lightning.kernels.sort_columns import sorted_columns

__all__ = [
    "LARGEST_STDDEV",
    "LEAST_STDDEV",
    "Forwards",
    "direct_layers",
    "keys_below",
    "other_forwards",
    "places_from",
    "reason_against_direct_layers",
    "rounded_at_random",
    "rounded_gaussian",
    "rounds_in_one_pass",
    "sgd_in_one_pass",
    "sorted_columns",
]
