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
    """Run ``fl-lightning init``, which writes a new project, and return a text with the next steps.

    Args:
        words: words of the command line after ``init``.

    Raises:
        ConfigurationError: if the words are not accepted, or the folder exists.
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
    """Write a new project from a template.

    Args:
        target: the project's folder, whose name becomes the name of the package; parents are created.
        template: one of `TEMPLATES`.

    Raises:
        ConfigurationError: if the name cannot be a package's, or the folder exists.
    """
    name = target.name
    if not name.isidentifier() or keyword.iskeyword(name):
        raise ConfigurationError(
            f"init: the folder's name must be the name of a Python package (letters, digits and _), got {name!r}"
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
        raise ConfigurationError(f"init: the name of a folder is missing.\n{_USAGE}")
    return Path(folder), template
