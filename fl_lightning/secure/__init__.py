"""Means of updates that the server cannot read: secure sums, encryption. Needs extras.

A secure sum from bottom to top: integers of updates (`ring`, `sum_quantiser`); secrets (`entropy`); the
protocol, its keys and messages (`protocol`); in one process (`simulation`); a sum a round (`secure_sum`).
Beside it `encryption`, with CKKS and Paillier.

What a secure sum hides: every vector, from a server and from fewer clients than the threshold
together. What it shows: the sum, and who took part. What it does not stop: a client that adds
nonsense, and what can be told from the sum itself, against which noise is added.
"""

try:
    import cryptography as cryptography
except ImportError as error:
    raise ImportError(
        "means of hidden updates need cryptography: pip install 'fl-lightning[secure]' for "
        "SecureMean, 'fl-lightning[he]' for EncryptedMean"
    ) from error

from fl_lightning.core.kinds import exports
from fl_lightning.secure.encrypted_mean import EncryptedMean as EncryptedMean
from fl_lightning.secure.encryption.paillier import Paillier as Paillier
from fl_lightning.secure.secure_mean import SecureMean as SecureMean

__all__ = list(exports(__file__, globals()))
