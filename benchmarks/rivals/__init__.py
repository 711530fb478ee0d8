"""Other frameworks on the same workloads, each in an environment of its own.

One adapter a file, run as ``python -m benchmarks.rivals.<name> <workload>`` under ``uv run
--isolated`` with the pins below; it builds the same data, network and steps from
`benchmarks.workloads` and prints one line of JSON, a `benchmarks.process.Column`.
"""

from __future__ import annotations

from typing import cast

from benchmarks import process
from benchmarks.options import Options
from benchmarks.process import Column

# what uv installs for each; torch is there for the data and the initial weights in any case
RIVALS: dict[str, list[str]] = {}
PYTHON = "3.11"
TIMEOUT = 1800.0  # seconds, with the installation


def run(name: str, workload: str, options: Options) -> Column:
    """Return a rival's column.

    Raises:
        MeasurementError: if it cannot be installed, does not support the workload, or fails.
    """
    pins = [word for pin in RIVALS[name] for word in ("--with", pin)]
    command = ["uv", "run", "--isolated", "--no-project", "--python", PYTHON, *pins]
    module = ["python", "-m", f"benchmarks.rivals.{name}", workload]
    line = process.run([*command, *module, *options.as_arguments()], TIMEOUT)
    return cast(Column, line)
