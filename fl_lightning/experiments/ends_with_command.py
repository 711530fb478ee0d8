"""Makes the system end a command's fork server when the command ends.

The fork server imports this module first: it imports for seconds afterwards, without noticing that the command ended.
"""

import ctypes
import sys

if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 15, 0, 0, 0)  # PR_SET_PDEATHSIG, SIGTERM
