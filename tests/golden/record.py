"""Run all golden runs, or those named, and write down what comes of them."""

import json
import sys
import tempfile
from pathlib import Path

from golden.runs import NAMES, VARIANTS, result
from golden.values import FILE, machine, read


def record(names: list[str]) -> None:
    """Replace what is known of these runs; all of them, if they come from another machine."""
    known = read()
    if known["machine"] != machine():
        known, names = {"machine": machine(), "runs": {}}, NAMES
    for name in names:
        found = known["runs"][name] = {}
        for variant in VARIANTS:
            with tempfile.TemporaryDirectory() as folder:
                found[str(variant)] = result(name, variant, Path(folder))
        FILE.write_text(json.dumps(known, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    unknown = set(sys.argv[1:]) - set(NAMES)
    if unknown:
        sys.exit(f"no golden runs: {', '.join(sorted(unknown))}")
    record(sys.argv[1:] or NAMES)
