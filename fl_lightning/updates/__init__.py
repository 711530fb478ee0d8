"""An update on its way from a client to the server."""

from fl_lightning.updates.affine import Affine
from fl_lightning.updates.cast import Cast
from fl_lightning.updates.error_feedback import ErrorFeedback
from fl_lightning.updates.payload import Dense, Payload, Quantised, Sparse
from fl_lightning.updates.power_sgd import PowerSGD
from fl_lightning.updates.qsgd import QSGD
from fl_lightning.updates.random_k import RandomK
from fl_lightning.updates.sign import Sign, ternary
from fl_lightning.updates.top_k import TopK
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
