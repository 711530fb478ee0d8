"""The command ``fl-lightning init``: writes the files of a new project."""

from __future__ import annotations

import keyword
import shutil
from collections.abc import Sequence
from pathlib import Path

from fl_lightning.core.errors import ConfigurationError

TEMPLATES = {
    "images": "handwritten digits, a small convolutional network",
    "text": "short reviews, a small transformer",
    "tabular": "a table of patients, a regression",
    "llm": "questions and answers, a tiny Llama with adapters (extra llm)",
}
_NAME = "my_project"  # in the templates
_HERE = Path(__file__).with_name("projects")
_USAGE = "\n".join(
    [
        "usage: fl-lightning init FOLDER [--template images|text|tabular|llm]",
        "",
        "Makes a folder with a module, a data module, a YAML, a test and a README that",
        "run unchanged. Templates:",
        *(f"  {name.ljust(8)}  {line}" for name, line in TEMPLATES.items()),
    ]
)


def run(words: Sequence[str]) -> str:
    """Make the project that a command line asks for, and return the next steps.

    Args:
        words: after ``init``.

    Raises:
        ConfigurationError: if the words are not accepted, or the folder is there already.
    """
    if not words or words[0] in ("--help", "-h"):
        return _USAGE
    target, template = _read(words)
    make(target, template)
    return "\n".join(
        [
            f"{target} is ready; its README.md describes the files.",
            f"  cd {target}",
            "  fl-lightning fit --config config.yaml",
            "  pytest",
        ]
    )


def make(target: Path, template: str) -> None:
    """Write a project.

    Args:
        target: its folder, whose name is the name of its package; parents are made.
        template: one of `TEMPLATES`.

    Raises:
        ConfigurationError: if the name is no name of a package, or the folder is there already.
    """
    name = target.name
    if not name.isidentifier() or keyword.iskeyword(name):
        raise ConfigurationError(
            f"init: {name!r} cannot be the name of a Python package: take letters, digits and _"
        )
    if target.exists():
        raise ConfigurationError(f"init: {target} exists: name another folder, or remove it")
    if template not in TEMPLATES:
        raise ConfigurationError(
            f"init: template must be one of {', '.join(TEMPLATES)}, got {template!r}"
        )
    unfinished = target.with_name(f".{name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    (unfinished / name).mkdir(parents=True)
    (unfinished / name / "__init__.py").write_text("")
    for source, path in (
        (_HERE / template / "model.template", f"{name}/model.py"),
        (_HERE / template / "data.template", f"{name}/data.py"),
        (_HERE / template / "config.yaml", "config.yaml"),
        (_HERE / "common" / "README.md", "README.md"),
        (_HERE / "common" / "test_my_project.template", f"test_{name}.py"),
    ):
        text = source.read_text(encoding="utf-8").replace(_NAME, name)
        (unfinished / path).write_text(text, encoding="utf-8")
    unfinished.rename(target)


def _read(words: Sequence[str]) -> tuple[Path, str]:
    folder, template, rest = None, "images", list(words)
    while rest:
        word = rest.pop(0)
        if word == "--template" and rest:
            template = rest.pop(0)
        elif word.startswith("--template="):
            template = word.removeprefix("--template=")
        elif folder is None and not word.startswith("-"):
            folder = word
        else:
            raise ConfigurationError(f"init: {word!r} is not accepted.\n{_USAGE}")
    if folder is None:
        raise ConfigurationError(f"init: a folder's name is missing.\n{_USAGE}")
    return Path(folder), template
