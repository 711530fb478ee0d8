"""What golden runs gave, and on what machine."""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import Any

import numpy as np
import torch

FILE = Path(__file__).with_name("values.json")


def machine() -> str:
    """Return what bits depend on beside the code: libraries choose their kernels by the processor."""
    kinds = [torch.__version__.split("+")[0], torch.backends.cpu.get_cpu_capability()]
    return ", ".join([*kinds, f"numpy {np.__version__}", _processor()])


def _processor() -> str:
    about = Path("/proc/cpuinfo")
    lines = about.read_text().splitlines() if about.exists() else []
    found = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(found, platform.processor())


def read() -> dict[str, Any]:
    """Return the values; none if there is no file yet."""
    if not FILE.exists():
        return {"machine": "", "runs": {}}
    values: dict[str, Any] = json.loads(FILE.read_text())
    return values
