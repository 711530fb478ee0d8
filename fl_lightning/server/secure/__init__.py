"""Means of updates that the server cannot read: secure sums, encryption. Needs extras."""

try:
    import cryptography as cryptography
except ImportError as error:
    raise ImportError(
        "means of hidden updates need cryptography: pip install 'fl-lightning[secure]' for "
        "SecureMean, 'fl-lightning[he]' for EncryptedMean"
    ) from error

from fl_lightning.server.secure.encrypted_mean import EncryptedMean
from fl_lightning.server.secure.paillier_round import Paillier
from fl_lightning.server.secure.secure_mean import SecureMean

__all__ = ["EncryptedMean", "Paillier", "SecureMean"]
