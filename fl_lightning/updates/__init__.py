"""An update on its way from a client to the server."""

from fl_lightning.core.kinds import exports
from fl_lightning.updates.payload import Dense as Dense
from fl_lightning.updates.payload import Payload as Payload
from fl_lightning.updates.payload import Quantised as Quantised
from fl_lightning.updates.payload import Sparse as Sparse
from fl_lightning.updates.quantisers import QSGD as QSGD
from fl_lightning.updates.quantisers import Affine as Affine
from fl_lightning.updates.quantisers import Cast as Cast
from fl_lightning.updates.quantisers import Sign as Sign
from fl_lightning.updates.quantisers import ternary as ternary
from fl_lightning.updates.sparsifiers import PowerSGD as PowerSGD
from fl_lightning.updates.sparsifiers import RandomK as RandomK
from fl_lightning.updates.sparsifiers import TopK as TopK
from fl_lightning.updates.transform import Chain as Chain
from fl_lightning.updates.transform import ErrorFeedback as ErrorFeedback
from fl_lightning.updates.transform import Transform as Transform

__all__ = list(exports(__file__, globals()))
