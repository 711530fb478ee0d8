"""Runs the command line in this process and says what a user would have seen."""

from __future__ import annotations

import io
import re
import traceback
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import yaml
from refused_rows import Row, merged

from fl_lightning.cli import main

WORKS = yaml.safe_load(Path(__file__).with_name("works.yaml").read_text())
# what a refusal says to do, or what is allowed
ADVICE = re.compile(
    r"must|needs?\b|either|one of|did you mean|not accepted|there (is|are)|use |set |give |leave |"
    r"put it|can be|should|has to|expected|available|accepts|not a valid|exclusive|any of|allowed|lists (what|the|those)|hint: did you call|required|cannot|only|instead|lower|raise|--help|without",
    re.IGNORECASE,
)


def said_by(words: list[str]) -> tuple[Any, str]:
    """Return the exit code and the error message; a traceback is part of it."""
    out, err, code = io.StringIO(), io.StringIO(), None
    with redirect_stdout(out), redirect_stderr(err):
        try:
            main(words)
        except SystemExit as end:
            code = end.code
        except BaseException:  # noqa: BLE001 - what a user would see
            code = 1
            err.write(traceback.format_exc())
    if isinstance(code, str):  # as Python prints it
        err.write(code)
        code = 1
    lines = err.getvalue().splitlines()
    first = next((n for n, line in enumerate(lines) if "fl-lightning: " in line), None)
    told = "\n".join(lines if first is None else lines[first:])
    return code, told


def words_of(row: Row, folder: Path) -> list[str]:
    """Write the row's configuration; return the command line that reads it."""
    path = folder / "refused.yaml"
    config = merged(WORKS, row.config)
    if row.command != "fit":
        config.pop("test_after_fit", None)
    path.write_text(yaml.safe_dump(config))
    return [row.command, "--config", str(path), *row.words]


def problems(row: Row, code: Any, told: str) -> list[str]:
    """Return what is wrong with a refusal; nothing if it is a sentence."""
    if not code:
        return ["accepted"]
    found = _shape(told)
    option = row.name or row.option
    if option and _bare(option) not in _bare(told):
        found.append(f"does not say {option}")
    value = _shown(row.value)
    if value and "not accepted" not in told and value.lower() not in told.lower():
        found.append(f"does not say {value}")
    if row.says and not re.search(row.says, told, re.IGNORECASE):
        found.append(f"does not say {row.says}")
    if not ADVICE.search(told):
        found.append("does not say what to do")
    return found


def _shape(told: str) -> list[str]:
    """Return what keeps a message from being a sentence."""
    found = []
    if "Traceback" in told or "fl-lightning: " not in told:
        found.append("traceback")
    if len(told) > 700 or len(told.splitlines()) > 4:
        found.append(f"{len(told)} characters, {len(told.splitlines())} lines")
    if re.search(
        r"Namespace\(|NestedArg|<class |Subtypes|typing\.|collections\.abc|Parser key", told
    ):
        found.append("the parser's words")
    return found


def _bare(path: str) -> str:
    """Return a path without what the YAML may leave out."""
    return path.replace(".init_args", "").replace("[0]", "")


def _shown(value: Any) -> str:
    """Return how a message shows a value, at least; nothing for what may look otherwise."""
    if isinstance(value, (list, dict)):
        return ""
    return str(value).rpartition(".")[2] if isinstance(value, str) else str(value)
