"""Imported first by the server of a command's processes, which then imports for seconds and looks at nothing else.

The system ends it when the command ends, even then.
"""

import ctypes
import sys

if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 15, 0, 0, 0)  # PR_SET_PDEATHSIG, SIGTERM
