"""An update on its way from a client to the server."""

from fl_lightning.updates.error_feedback import ErrorFeedback
from fl_lightning.updates.payload import Dense, Payload, Quantised, Sparse
from fl_lightning.updates.power_sgd import PowerSGD
from fl_lightning.updates.quantisers import QSGD, Affine, Cast, Sign, ternary
from fl_lightning.updates.sparsifiers import RandomK, TopK
from fl_lightning.updates.transform import Chain, Transform, UpdateTransform

__all__ = [
    "QSGD",
    "Affine",
    "Cast",
    "Chain",
    "Dense",
    "ErrorFeedback",
    "Payload",
    "PowerSGD",
    "Quantised",
    "RandomK",
    "Sign",
    "Sparse",
    "TopK",
    "Transform",
    "UpdateTransform",
    "ternary",
]
