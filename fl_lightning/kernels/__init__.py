"""C kernels with fallbacks in Python: layers, sorting, optimizer steps, noise, rounding.

Other rooms import these names only, never a module below.
"""

from fl_lightning.kernels.gaussian_noise import LARGEST_STDDEV as LARGEST_STDDEV
from fl_lightning.kernels.gaussian_noise import LEAST_STDDEV as LEAST_STDDEV
from fl_lightning.kernels.gaussian_noise import rounded_gaussian as rounded_gaussian
from fl_lightning.kernels.layers import Forwards as Forwards
from fl_lightning.kernels.layers import direct_layers as direct_layers
from fl_lightning.kernels.layers import other_forwards as other_forwards
from fl_lightning.kernels.layers import reason_against_direct_layers as reason_against_direct_layers
from fl_lightning.kernels.masked_sgd_step import sgd_in_one_pass as sgd_in_one_pass
from fl_lightning.kernels.random_rounding import keys_below as keys_below
from fl_lightning.kernels.random_rounding import places_from as places_from
from fl_lightning.kernels.random_rounding import rounded_at_random as rounded_at_random
from fl_lightning.kernels.random_rounding import rounds_in_one_pass as rounds_in_one_pass
from fl_lightning.kernels.sort_columns import sorted_columns as sorted_columns
