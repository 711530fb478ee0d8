"""Makes the operating system end a command's fork server when the command ends.

The fork server imports this module first. Its other imports take seconds, in which it would not notice the command's end.
"""

import ctypes
import sys

if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 15, 0, 0, 0)  # PR_SET_PDEATHSIG, SIGTERM
