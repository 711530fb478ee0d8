"""What golden runs gave, and on what machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

FILE = Path(__file__).with_name("values.json")


def machine() -> str:
    """Return what bits depend on beside the code."""
    kinds = [torch.__version__.split("+")[0], torch.backends.cpu.get_cpu_capability()]
    return ", ".join([*kinds, f"numpy {np.__version__}"])


def read() -> dict[str, Any]:
    """Return the values; none if there is no file yet."""
    if not FILE.exists():
        return {"machine": "", "runs": {}}
    values: dict[str, Any] = json.loads(FILE.read_text())
    return values
