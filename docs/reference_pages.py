"""Writes the pages of the reference: one a topic from the docstrings, and what the command line says."""

from __future__ import annotations

import inspect
import pkgutil
from importlib import import_module
from pathlib import Path

from fl_lightning.cli.help import GROUPS
from fl_lightning.cli.names import contents

PACKAGES = (
    *("fl_lightning", "fl_lightning.data", "fl_lightning.models", "fl_lightning.client"),
    *(
        "fl_lightning.updates",
        "fl_lightning.server",
        "fl_lightning.secure",
        "fl_lightning.sparsity",
    ),
    *(
        "fl_lightning.nas",
        "fl_lightning.federation",
        "fl_lightning.experiments",
        "fl_lightning.flower",
    ),
)
# a page, its title and the modules of what stands on it; a class is on the first page that fits
PAGES = {
    "federate": (
        "Federation, command line, errors",
        ("core.errors", "cli", "federation.federation"),
    ),
    "sources": ("Data sources", ("data.sources", "data.federated", "data.inputs", "data.summary")),
    "partitions": (
        "Partitions",
        ("data.partitions", "data.columns", "data.client_examples", "data.shards"),
    ),
    "cohorts": (
        "Cohorts and devices",
        ("data.cohorts", "client.devices", "client.clocks"),
    ),
    "models": ("Models", ("models",)),
    "corrections": ("Corrections", ("client.corrections",)),
    "personal": ("Personalisation", ("client.personal",)),
    "means": ("Means, fair means", ("server.means", "server.aggregator")),
    "robust": ("Robust rules", ("server.robust",)),
    "attacks": (
        "Attacks",
        ("server.attacks", "federation.stages.attackers"),
    ),
    "server_optimizers": ("Server optimizers, asynchronous servers", ("server",)),
    "compression": ("Compression of updates", ("updates",)),
    "privacy": ("Privacy", ("privacy",)),
    "secure": ("Secure sums and encryption", ("secure",)),
    "masks": ("Masks, sparse optimizers, task vectors", ("sparsity", "callbacks.calibration")),
    "callbacks": ("Callbacks and reports", ("callbacks", "reports")),
    "search": ("Architecture search", ("nas",)),
    "experiments": ("Experiments and sweeps", ("experiments",)),
    "rounds": ("Rounds, stages, a federation without a Trainer", ("federation",)),
    "network": ("A real network", ("flower",)),
}


def public() -> dict[str, list[str]]:
    """Paths of public classes and functions, by page; each stands once, under its shortest path."""
    pages: dict[str, list[str]] = {page: [] for page in PAGES}
    seen: set[object] = set()
    for package in PACKAGES:
        module = import_module(package)
        for name in getattr(module, "__all__", vars(module)):  # a door without a list shows all
            found = getattr(module, name)
            if not (inspect.isclass(found) or inspect.isfunction(found)) or found in seen:
                continue  # an alias of a type, or listed above
            if found.__module__ == "fl_lightning.core.kinds":
                continue  # of the doors themselves
            seen.add(found)
            if found.__module__.startswith("fl_lightning."):
                pages[_page(found.__module__.removeprefix("fl_lightning."))].append(
                    f"{package}.{name}"
                )
    return pages


def _page(module: str) -> str:
    fitting = (
        page
        for page, (_, prefixes) in PAGES.items()
        if any(f"{module}.".startswith(f"{prefix}.") for prefix in prefixes)
    )
    return next(fitting)


def write_pages(folder: Path) -> None:
    """Write all pages into a folder."""
    folder.mkdir(exist_ok=True)
    for old in folder.glob("*.md"):
        old.unlink()
    table = ["| looking for | names |", "|---|---|"]
    for page, paths in public().items():
        title = PAGES[page][0]
        lines = [f"# {title}", "", "```{eval-rst}"]
        for path in sorted(paths, key=lambda path: path.rpartition(".")[2].lower()):
            found = pkgutil.resolve_name(path)
            is_class = inspect.isclass(found)
            bases = ["   :show-inheritance:"] if is_class and found.__bases__ != (object,) else []
            lines += [f".. auto{'class' if is_class else 'function'}:: {path}"]
            lines += ["   :members:", *bases] if is_class else []
            lines += [""]
        (folder / f"{page}.md").write_text("\n".join([*lines, "```", ""]))
        names = ", ".join(f"`{path.rpartition('.')[2]}`" for path in paths)
        table += [f"| [{title}]({page}.md) | {names} |"]
    (folder / "command_line.md").write_text(_command_line())
    (folder / "block.md").write_text(_block())
    listed = "\n".join(["command_line", "block", *PAGES])
    (folder / "index.md").write_text(
        "\n".join(
            ["# Reference", "", *table, "", "```{toctree}", ":hidden:", "", listed, "```", ""]
        )
    )


def _command_line() -> str:
    pages = contents()["pages"].items()
    texts = [text for name, text in pages if not name.startswith("--")]
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
