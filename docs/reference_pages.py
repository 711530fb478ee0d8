"""Writes the pages of the reference: one a package from its docstrings, and what the command line says."""

from __future__ import annotations

import inspect
from importlib import import_module
from pathlib import Path

from fl_lightning.cli.help import GROUPS, OF_LIGHTNING, help_of_all, run_help
from fl_lightning.cli.names import contents

PACKAGES = {
    "fl_lightning": "The front door",
    "fl_lightning.data": "Data, partitions, cohorts",
    "fl_lightning.models": "Models",
    "fl_lightning.client": "What clients do",
    "fl_lightning.updates": "Updates on their way",
    "fl_lightning.server": "Aggregation and the server's step",
    "fl_lightning.secure": "Secure sums and encryption",
    "fl_lightning.sparsity": "Masks",
    "fl_lightning.nas": "Architecture search",
    "fl_lightning.federation": "Rounds",
    "fl_lightning.experiments": "Experiments",
    "fl_lightning.flower": "A real network",
}


def write_pages(folder: Path) -> None:
    """Write all pages into a folder."""
    folder.mkdir(exist_ok=True)
    names = []
    seen: set[object] = set()
    for package, title in PACKAGES.items():
        exported = import_module(package).__all__
        lines = [f"# {title}: `{package}`", "", "```{eval-rst}"]
        for name in exported:
            found = getattr(import_module(package), name)
            if not (inspect.isclass(found) or inspect.isfunction(found)) or found in seen:
                continue  # an alias of a type, or listed above
            seen.add(found)
            if inspect.isclass(found):
                lines += [f".. autoclass:: {package}.{name}", "   :members:"]
                lines += ["   :show-inheritance:", ""]
            else:
                lines += [f".. autofunction:: {package}.{name}", ""]
        names.append(package)
        (folder / f"{package}.md").write_text("\n".join([*lines, "```", ""]))
    (folder / "command_line.md").write_text(_command_line())
    (folder / "block.md").write_text(_block())
    listed = "\n".join(["command_line", "block", *names])
    (folder / "index.md").write_text(
        f"# Reference\n\n```{{toctree}}\n:maxdepth: 1\n\n{listed}\n```\n"
    )


def _command_line() -> str:
    texts = [help_of_all(), *map(run_help, OF_LIGHTNING), *contents()["pages"].values()]
    return "# The command line\n\n" + "\n".join(f"```text\n{text}\n```\n" for text in texts)


def _block() -> str:
    """Return every key of the block: meaning, default, and the classes that it takes."""
    block = contents()["federation"]
    lines = ["# The `federation` block", ""]
    for title, names in GROUPS.items():
        lines += [f"## {title.capitalize()}", ""]
        for name in names:
            option = block["options"][name]
            lines += [
                f"### `{name}`",
                "",
                f"{option['help']}",
                "",
                f"Default: `{option['default']}`.",
                "",
            ]
            classes = block["classes"].get(name, {}).get("classes", {})
            if classes:
                lines += ["| class | |", "|---|---|"]
                lines += [
                    f"| `{path}` | {line.replace('|', chr(92) + '|')} |"
                    for path, line in classes.items()
                ]
                lines += [""]
    return "\n".join(lines) + "\n"
