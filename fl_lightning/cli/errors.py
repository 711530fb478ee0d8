"""Errors of the command line: one sentence with the option's path, its value, the allowed values and a remedy.

A wrong setting is found by the parser (a misspelt key, an unknown class), by a class that refuses its arguments,
or by the run when it starts. In each case the process ends with one sentence on standard error and a non-zero
code, without a traceback.
"""

from __future__ import annotations

import errno
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from functools import partial, wraps
from pickle import UnpicklingError
from typing import Any, NoReturn

from jsonargparse import Namespace, add_instantiator, dict_to_namespace
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from lightning.pytorch.cli import LightningArgumentParser
from typing_extensions import override

from fl_lightning.cli.checks import imported, is_spec, specs
from fl_lightning.cli.parser_messages import BARE, sentence, shortened
from fl_lightning.core.errors import (
    CheckpointFailure,
    ClientFailure,
    ConfigurationError,
    ProcessFailure,
    RoundFailure,
)
from fl_lightning.core.kinds import check_kinds
from fl_lightning.federation import ProcessTraceback
from fl_lightning.reports.layout import close_to, in_lines

_TOLD_IN_A_SENTENCE = (
    *(CheckpointFailure, ClientFailure, ConfigurationError, MisconfigurationException),
    *(RoundFailure, ProcessFailure),
)
# errors by which constructors refuse an option; any other error is a bug and keeps its traceback
_OF_OURS = (ValueError, ImportError, MisconfigurationException)
_OF_CONSTRUCTORS = (*_OF_OURS, TypeError, AssertionError)
# errors of a full disk, a read-only folder, or a path that is no folder
_STORAGE = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG),
    *(errno.ENOTDIR, errno.EEXIST),
)
# "Invalid learning rate: -0.1", as every optimizer of PyTorch says it
_REFUSED_BY_OPTIMIZER = re.compile(r"Invalid [\w ]+: ")
_IS_BUILDING: ContextVar[bool] = ContextVar("is_building", default=False)
# configuration of the command, for the errors of objects that factories build later
_CONFIGURATION: ContextVar[Any] = ContextVar("configuration", default=None)


class Refusal(BaseException):
    """A constructor's error while the parser builds objects; not an `Exception`, which the parser would reword."""

    def __init__(self, kind: Any, options: Mapping[str, Any], error: Exception) -> None:
        super().__init__(str(error))
        self.kind, self.options, self.error = kind, options, error

    def as_error(self, configuration: Any) -> Exception:
        """Return the error with the option's path in the configuration; a bug is returned unchanged."""
        text = next(
            (str(e) for e in causes(self.error) if isinstance(e, _TOLD_IN_A_SENTENCE)), None
        )
        if text is None:
            is_ours = self.kind.__module__.startswith("fl_lightning")
            if not isinstance(self.error, _OF_OURS if is_ours else _OF_CONSTRUCTORS):
                return self.error
            text = str(self.error)
            if not isinstance(self.error, ImportError):
                text = f"{self.kind.__name__} refuses its options: {text}"
        place = next((path for path, spec in specs(configuration) if self._is_of(spec)), "")
        return ConfigurationError(shortened(self._placed(text, place) if place else text))

    def _is_of(self, spec: Namespace) -> bool:
        """Return whether a namespace names the refused class with the refused options."""
        name = spec.get("class_path")
        given: dict[str, Any] = vars(spec if name is None else spec.get("init_args") or spec)
        is_kind = (
            self.options.keys() == given.keys() if name is None else imported(name) is self.kind
        )
        plain = (int, float, str, bool, type(None))  # other values were built from the given ones
        return is_kind and all(
            repr(given.get(option)) == repr(value)
            for option, value in self.options.items()
            if option in given and isinstance(value, plain)
        )

    def _placed(self, text: str, place: str) -> str:
        inside = place if self.kind.__name__ in BARE else f"{place}.init_args"
        for prefix in (self.kind.__name__, place, place.rpartition(".")[2]):
            text = text.removeprefix(f"{prefix}: ")
        return _with_path(text, inside, self.options) or f"{place}: {text}"


def _with_path(text: str, inside: str, options: Mapping[str, Any]) -> str:
    """Write the path of the first option that a sentence names ahead of it; empty if it names none."""
    if text.startswith(f"{inside}."):
        return text
    option = next((word for word in re.findall(r"\w+", text) if word in options), None)
    if option is None:
        return ""
    text = text.removeprefix(f"{option}: ")
    joint = "." if text.startswith(f"{option} ") else f".{option}: "
    return f"{inside}{joint}{text}"


# words ahead of Lightning's own message, where that lacks the option's name or the allowed values
_DEVICES = "devices must be auto, -1 for all, at least 1, or a list of different ones: "
_ADDED = (
    ("`Trainer(devices=", _DEVICES),
    ("`devices` selected", _DEVICES),
    ("No supported gpu", "accelerator must be cpu or auto on this machine: "),
    ("Found more than one stateful callback", "callbacks must hold one of a kind at most: "),
)


def built_trainer(build: Callable[[], Trainer], options: Mapping[str, Any]) -> Trainer:
    """Build a Trainer.

    Args:
        build: function that builds it.
        options: the Trainer's options.

    Raises:
        ConfigurationError: naming the option that Lightning refuses.
    """
    try:
        return build()
    except ConfigurationError:
        raise
    except (ValueError, TypeError, RuntimeError, MisconfigurationException) as error:
        start = next((words for said, words in _ADDED if str(error).startswith(said)), "")
        said = f"{start}{error}"
        text = _with_path(said, "trainer", options) or f"trainer: {said}"
        named = re.match(r"trainer\.(\w+)", text)
        value = str(options[named[1]]) if named and named[1] != "callbacks" else ""
        given = "" if value in text else f", got {value}"
        raise ConfigurationError(f"{shortened(text).rstrip('.')}{given}") from error


def _built(build: Any, kind: Any, args: Any, options: Mapping[str, Any]) -> Any:
    """Build an object for the parser; an error of its constructor is not taken for a failed type of a union."""
    try:
        # inside unions of protocols the parser accepts some values of the wrong kind
        if kind.__module__.startswith("fl_lightning.") and inspect.isclass(kind):
            for value in filter(is_spec, options.values()):
                _build_anew(value)
            check_kinds(kind.__init__, options)
        return build(*args, **options)
    except Exception as error:
        if isinstance(error, TypeError) and _unknown_option(kind, options) is not None:
            raise  # the options are those of another type of a union
        refusal, configuration = Refusal(kind, options, error), _CONFIGURATION.get()
        if _IS_BUILDING.get():
            raise refusal from error
        if configuration is None or (told := refusal.as_error(configuration)) is error:
            raise
        raise told from error  # of a factory that a module or the federation has called


def _unknown_option(kind: Any, options: Mapping[str, Any]) -> str | None:
    """Return the first option that a constructor has no parameter for; None if it takes all."""
    try:
        parameters = inspect.signature(kind).parameters
    except (TypeError, ValueError):
        return next(iter(options), None)
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    return None if takes_any else next((name for name in options if name not in parameters), None)


def _build_anew(spec: Any) -> None:
    """Build the object that a mapping describes, to raise the error that the parser has swallowed."""
    given = dict_to_namespace(dict(spec))
    kind, options = imported(given.class_path), {**vars(given.get("init_args") or given)}
    options.pop("class_path", None)
    if kind is None:
        return
    if (unknown := _unknown_option(kind, options)) is not None:
        hint = close_to(unknown, [*inspect.signature(kind).parameters])
        said = f"{unknown}: {unknown!r} is not accepted by {kind.__name__}. {hint}"
        raise Refusal(kind, options, ConfigurationError(said))
    _built(kind, kind, (), options)


def _build(kind: Any, /, *args: Any, **options: Any) -> Any:
    return _built(kind, kind, args, options)


add_instantiator(_build, object)  # type: ignore[arg-type]


class Parser(LightningArgumentParser):
    """Lightning's parser, with each error as one sentence."""

    @override
    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Print the error as one sentence and exit with code 2."""
        if not self.exit_on_error:  # a parser inside the parser, trying one of several types
            super().error(message, ex)
        inner = self._subcommands_action.choices.values() if self._subcommands_action else ()
        options = {name for parser in (self, *inner) for name in parser._option_string_actions}
        told = sentence(message, sorted(name.lstrip("-") for name in options))
        print(in_lines(f"fl-lightning: {told}", sys.stderr), file=sys.stderr)
        sys.exit(2)

    @override
    def parse_args(self, args: Any = None, *rest: Any, **options: Any) -> Any:
        """Parse words; jsonargparse passes a null on to the parser inside this one as the text None."""
        if isinstance(args, list) and not self.exit_on_error:
            args = [re.sub("=None$", "=null", word) for word in args]
        return super().parse_args(args, *rest, **options)

    def add_instantiator(self, instantiator: Any, *args: Any, **kwargs: Any) -> None:
        """Register a function that builds models or data modules; their errors are reported like those of other classes."""

        @wraps(instantiator)  # the parser reads its parameters
        def build(kind: Any, /, *own: Any, **options: Any) -> Any:
            name = "applied_instantiation_links"  # of the function, not of the class
            links = {name: options.pop(name)} if name in options else {}
            return _built(partial(instantiator, kind, **links), kind, own, options)

        super().add_instantiator(build, *args, **kwargs)

    def instantiate(self, namespace: Namespace, *args: Any, **kwargs: Any) -> Any:
        """Build all objects of a configuration.

        Raises:
            ConfigurationError: naming the option that a class refuses.
        """
        if _IS_BUILDING.get():  # a parser of a class inside the configuration
            return super().instantiate(namespace, *args, **kwargs)
        command = namespace.get("subcommand")
        configuration = namespace if command is None else namespace[command]
        _CONFIGURATION.set(configuration)
        token = _IS_BUILDING.set(True)
        try:
            return super().instantiate(namespace, *args, **kwargs)
        except Refusal as refused:
            cause, error = refused.error, refused.as_error(configuration)
        finally:
            _IS_BUILDING.reset(token)
        raise error from (None if error is cause else cause)


def explain(error: BaseException) -> str | None:
    """Return a sentence for an error that the user can mend; None for any other error.

    Example:
        >>> explain(ConfigurationError("fraction must be in (0, 1], got 1.5"))
        'fraction must be in (0, 1], got 1.5'
        >>> explain(KeyError("a bug")), explain(RuntimeError("Invalid buffer size: 20.00 GB"))
        (None, None)
    """
    for cause in causes(error):  # the parser wraps what a class raises while it is built
        if isinstance(cause, _TOLD_IN_A_SENTENCE):
            return str(cause)
    if isinstance(error, FileNotFoundError) and "heckpoint" in str(error):
        return f"ckpt_path: {error} Give the path of a .ckpt file, or last."
    if isinstance(error, OSError) and error.errno in _STORAGE:
        return f"{error.filename or 'a file of the run'} could not be written: {error.strerror}"
    if isinstance(error, UnpicklingError):
        return "ckpt_path: the file is no checkpoint of Lightning, or a damaged one"
    return _by_text(error)


def _by_text(error: BaseException) -> str | None:
    """Return a sentence for errors of PyTorch and Lightning that are recognised by their text; else None."""
    text = " ".join(str(error).split())
    if text.startswith("Error(s) in loading state_dict"):
        return (
            "the checkpoint belongs to another model: resume with the model that wrote it, or start "
            f"without ckpt_path. {shortened(text.partition(': ')[2], most=200)}"
        )
    is_value = isinstance(error, ValueError)
    if is_value and _REFUSED_BY_OPTIMIZER.match(text):
        return f"the optimizer refuses one of its options: {text}"
    if is_value and "`val_check_interval`" in text:
        return f"trainer.val_check_interval: {text}"
    return text if text.startswith("Early stopping conditioned on metric") else None


def bug_behind(error: BaseException) -> str:
    """Return the traceback of an error that the user's module raised while a client trained; else empty."""
    failure = next((cause for cause in causes(error) if isinstance(cause, ClientFailure)), None)
    cause = None if failure is None else failure.__cause__
    if isinstance(cause, ProcessTraceback):
        return cause.args[1] or ""
    return "" if cause is None else "".join(traceback.format_exception(cause))


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, the one that it was raised from, and so on."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__
