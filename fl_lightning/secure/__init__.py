"""Means of updates that the server cannot read, by secure sums or encryption. Needs extras.

A secure sum from bottom to top: integers of updates (`ring`, `sum_quantiser`); secrets (`entropy`); the
protocol, its keys and messages (`protocol`); the protocol in one process (`simulation`); a sum per round
(`secure_sum`). `encryption` has CKKS and Paillier.

A secure sum hides every vector from the server, even if the server colludes with fewer clients than the
threshold. It shows the sum, and which clients took part. It does not stop a client that sends a wrong
vector, nor conclusions from the sum itself, against which noise is added.
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
