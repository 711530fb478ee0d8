"""Which option of the YAML a class stands at that refused its own options.

A constructor knows what it was given, and not where that was written. The parser knows, but its error
is either the constructor's own, or, where several types were tried, a dump of all of them. So what is
built on behalf of the parser is built by `build`, which notes refusals; the place is then looked up in
the configuration, by the class and its options.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import Any

from jsonargparse import Namespace


@dataclass(frozen=True)
class Refusal:
    """A constructor that raised.

    Attributes:
        kind: the class.
        options: what it was given.
        error: what it raised.
    """

    kind: Any
    options: Mapping[str, Any]
    error: Exception


@dataclass
class Watch:
    """What was noted during one command.

    Attributes:
        configuration: of the command, once it is parsed.
        refusals: in their order; the same twice where two types were tried.
    """

    configuration: Any = None
    refusals: list[Refusal] = field(default_factory=list)

    def of(self, error: BaseException) -> Refusal | None:
        """Return the refusal behind an error."""
        behind = list(causes(error))
        for refusal in reversed(self.refusals):
            if any(refusal.error is cause for cause in behind):
                return refusal
        text = " ".join(str(error).split())
        if not self.refusals or "Does not validate against any of the Union" not in text:
            return None
        # the parser has kept the words only: those of a type that was tried in vain may be others
        said = (r for r in reversed(self.refusals) if " ".join(str(r.error).split()) in text)
        return next(said, self.refusals[-1])

    def place(self, refusal: Refusal) -> str:
        """Return the path of the option that the class was given for; empty if it is not found."""
        for path, spec in specs(self.configuration):
            if not path.endswith(".init_args") and _is_of(spec, refusal):
                return path
        return ""


_WATCH: ContextVar[Watch | None] = ContextVar("watch", default=None)


@contextmanager
def watched() -> Iterator[Watch]:
    """Note refusals inside the block."""
    watch = Watch()
    token = _WATCH.set(watch)
    try:
        yield watch
    finally:
        _WATCH.reset(token)


def watch_configuration(configuration: Any) -> None:
    """Say which configuration is at work."""
    watch = _WATCH.get()
    if watch is not None:
        watch.configuration = configuration


class Noting:
    """Builds objects for the parser, and notes refusals.

    Args:
        builds: from a class and its options to the object; calls the class if None.
    """

    def __init__(self, builds: Any = None) -> None:
        self._builds = builds

    def __call__(self, kind: Any, /, *args: Any, **options: Any) -> Any:
        """Return the object."""
        _refuse_what_was_not_built(options)
        try:
            if self._builds is None:
                options.pop(
                    "applied_instantiation_links", None
                )  # as older versions of the parser say
                return kind(*args, **options)
            return self._builds(kind, *args, **options)
        except Exception as error:
            watch = _WATCH.get()
            if watch is not None:
                watch.refusals.append(Refusal(kind, options, error))
            raise


def _refuse_what_was_not_built(options: Mapping[str, Any]) -> None:
    """Raise anew what a class has refused, where the parser passes on its description instead."""
    watch = _WATCH.get() or Watch()
    refused = {refusal.kind: refusal.error for refusal in watch.refusals}
    for value in options.values() if refused else ():
        kind = named(value.get("class_path") or "") if isinstance(value, Namespace) else None
        if kind in refused:
            raise refused[kind]


class NotingWithLinks(Noting):
    """The same for a function that is told which links were applied, in versions that take it."""

    def __call__(
        self, kind: Any, /, *args: Any, applied_instantiation_links: Any = None, **options: Any
    ) -> Any:
        """Return the object."""
        builds = self._builds
        if "applied_instantiation_links" in inspect.signature(builds).parameters:
            builds = partial(builds, applied_instantiation_links=applied_instantiation_links)
        return Noting(builds)(kind, *args, **options)


def specs(node: Any, path: str = "") -> Iterator[tuple[str, Namespace]]:
    """Yield the namespaces of a configuration and their paths, inner ones first."""
    if isinstance(node, list):
        for number, entry in enumerate(node):
            yield from specs(entry, f"{path}[{number}]")
    if not isinstance(node, Namespace):
        return
    for name, value in vars(node).items():
        yield from specs(value, f"{path}.{name}".lstrip("."))
    yield path, node


def _is_of(spec: Namespace, refusal: Refusal) -> bool:
    """Return whether a namespace describes what was refused."""
    name = spec.get("class_path")
    if name is None:  # a class whose options stand below the option's name
        options = spec
    elif named(name) is refusal.kind:
        options = spec.get("init_args") or Namespace()  # type: ignore[no-untyped-call]
    else:
        return False
    given = dict(vars(options).items())
    return (
        given.keys() <= refusal.options.keys()
        and all(_same(value, refusal.options[key]) for key, value in given.items())
        and (name is not None or given.keys() == refusal.options.keys())
    )


def named(class_path: str) -> Any:
    """Return what an import path names; None if there is no such thing."""
    module, _, name = class_path.rpartition(".")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError):
        return None


def _same(described: Any, given: Any) -> bool:
    """Return whether a value may be the one that is described; what was built from it, always."""
    if isinstance(described, (Namespace, list, Mapping)):
        return True
    return (
        described is given
        or repr(described) == repr(given)
        or not isinstance(given, (int, float, str, bool, type(None)))
    )


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, the one that it was raised from, and so on."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__


def told_at(place: str, refusal: Refusal, text: str) -> str:
    """Return a refusal's text with the option's path in the YAML.

    Args:
        place: of the class; empty if it is unknown.
        refusal: whose options may be named in the text.
        text: what the constructor says.

    Example:
        >>> refusal = Refusal(dict, {"bits": 9}, ValueError())
        >>> told_at("federation.updates[0]", refusal, "dict: bits must be at most 8, got 9")
        'federation.updates[0].init_args.bits must be at most 8, got 9'
    """
    if not place:
        return text
    name = refusal.kind.__name__
    inside = place if name in ("Federation", "Attackers") else f"{place}.init_args"
    for prefix in (f"{name}: ", f"{re.sub(r'.*[.]', '', place)}: "):
        text = text.removeprefix(prefix)
    if text.startswith(f"{inside}."):
        return text
    words = re.findall(r"\w+", text)
    option = next((word for word in words if word in refusal.options), None)
    if option is None:
        return f"{place}: {text.removeprefix(f'{place}: ')}"
    if text.startswith(f"{option} "):
        return f"{inside}.{text}"
    for prefix in (f"{inside}.{option}: ", f"{option}: "):
        text = text.removeprefix(prefix)
    return f"{inside}.{option}: {text}"
