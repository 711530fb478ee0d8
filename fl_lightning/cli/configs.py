"""The command ``configs``: lists the packaged configurations, and copies one to be edited."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

from fl_lightning.core.errors import ConfigurationError, did_you_mean

_PACKAGE = Path(__file__).resolve().parents[1]
# folder of configurations: command and option that run a file in it
_COMMANDS = {"experiments": "compare --config", "sweeps": "sweep --search"}
_OPTIONS = ("--config", "-c", "--search", "-s")
_USAGE = """\
usage: fl-lightning configs [copy NAME [FILE]]

Lists the configurations that --config takes by name. With copy it writes one
to FILE (default: NAME.yaml in this folder), to be edited."""


def folder() -> Path:
    """Return the folder of this package's own configurations: in the package, or beside it in a checkout."""
    inside = _PACKAGE / "configs"
    return inside if inside.is_dir() else _PACKAGE.parent / "configs"


def names() -> list[str]:
    """Return the names of the YAML configurations that come with this package; those in subfolders last.

    Example:
        >>> names()[0], "algorithms/fedprox" in names()
        ('centralized', True)
    """
    root = folder()
    found = [path.relative_to(root).with_suffix("") for path in root.rglob("*.yaml")]
    return [path.as_posix() for path in sorted(found, key=lambda path: (len(path.parts), path))]


def with_paths(words: Sequence[str]) -> list[str]:
    """Replace names of this package's configurations in a command line by the paths of their files.

    An existing file takes precedence over a packaged configuration of the same name.

    Raises:
        ConfigurationError: if neither exists; suggests a name that is close.

    Example:
        >>> with_paths(["fit", "--config=quickstart"])[1].endswith("configs/quickstart.yaml")
        True
    """
    found: list[str] = []
    for word in words:
        if found and found[-1] in _OPTIONS:
            word = _path(word)
        elif word.startswith(("--config=", "--search=")):
            option, _, given = word.partition("=")
            word = f"{option}={_path(given)}"
        found.append(word)
    return found


def run(words: Sequence[str]) -> str:
    """Run ``fl-lightning configs``, which lists or copies this package's configurations; return its output.

    Raises:
        ConfigurationError: if the words are not understood, or the file to write exists.
    """
    if not words:
        return "\n".join(_listed())
    if words[0] in ("--help", "-h"):
        return _USAGE
    if words[0] != "copy" or len(words) not in (2, 3):
        raise ConfigurationError(f"configs: {' '.join(words)!r} is not accepted.\n{_USAGE}")
    name = words[1]
    source = _named(name)
    if source is None:
        raise ConfigurationError(f"configs: there is no configuration {name!r}. {_close_to(name)}")
    target = Path(words[2] if len(words) == 3 else f"{Path(name).name}.yaml")
    if target.exists():
        raise ConfigurationError(f"configs: {target} exists: name another file, or remove it")
    target.write_text(_with_whole_paths(source), encoding="utf-8")
    command = _COMMANDS.get(name.partition("/")[0], "fit --config")
    return f"{target} is yours to edit: fl-lightning {command} {target}"


def _with_whole_paths(source: Path) -> str:
    """Return a configuration file's text, with the relative paths of other YAML files made absolute."""
    text = source.read_text(encoding="utf-8")
    return re.sub(
        r"\.\./[\w./]+\.yaml", lambda found: str((source.parent / found[0]).resolve()), text
    )


def _listed() -> Iterator[str]:
    rows = [(name, _first_line(folder() / f"{name}.yaml")) for name in names()]
    group, width = None, 0
    for name, line in rows:
        if (now := name.rpartition("/")[0]) != group:
            if group is not None:
                yield ""
            group = now
            width = max(len(other) for other, _ in rows if other.rpartition("/")[0] == group)
        first, *more = textwrap.wrap(line, 79 - width - 2)
        yield f"{name.ljust(width)}  {first}"
        yield from (f"{' ' * width}  {rest}" for rest in more)
    yield ""
    yield "fl-lightning fit --config NAME trains; several are layered, later ones win."
    yield "fl-lightning compare --config experiments/NAME runs an experiment,"
    yield "fl-lightning sweep --search sweeps/NAME a search."
    yield "fl-lightning configs copy NAME writes one to edit."


def _first_line(path: Path) -> str:
    """Return the opening comment of a file, up to its first period, colon or semicolon."""
    said: list[str] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#") or line.startswith("#   "):
            break
        said.append(re.sub(r"^# ((A diff|Over) [\w ]*base[\w ]*: )?", "", line).strip())
    sentence = re.split(r"(?<!et al)[.;:](?=\s|$)", " ".join(said), maxsplit=1)[0]
    return f"{sentence[0].upper()}{sentence[1:]}"


def _path(name: str) -> str:
    path = Path(name).expanduser()
    if name == "-" or (path.exists() and not path.is_dir()):  # standard input, a file, a pipe
        return name
    named = _named(name)
    if named is not None:
        return str(named)
    said = "a folder" if path.is_dir() else "neither a file nor a configuration of the package"
    raise ConfigurationError(f"config: {name!r} is {said}. {_close_to(name)}")


def _named(name: str) -> Path | None:
    path = folder() / f"{name}.yaml"
    return path if name in names() else None


def _close_to(name: str) -> str:
    short = name.removeprefix("configs/").removesuffix(".yaml")
    hint = did_you_mean(short, {each: repr(each) for each in names()})
    return f"{hint} fl-lightning configs lists those of the package.".lstrip()
