"""Errors of the command line, as one sentence: the option's path, its value, the allowed values and a remedy.

A wrong setting is found by the parser (a misspelt key, an unknown class), by the constructor of a class, or at the
start of the run. In each case the process ends with one sentence on standard error and a non-zero exit code, without
a traceback.
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

from jsonargparse import Namespace, add_instantiator
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from lightning.pytorch.cli import LightningArgumentParser
from typing_extensions import override

from fl_lightning.cli.checks import imported, specs
from fl_lightning.cli.parser_messages import BARE, sentence, shortened, without_marks
from fl_lightning.core.errors import (
    CheckpointFailure,
    ClientFailure,
    ConfigurationError,
    ProcessFailure,
    RoundFailure,
)
from fl_lightning.core.kinds import check_kinds
from fl_lightning.federation import ProcessTraceback
from fl_lightning.reports.layout import in_lines

# errors whose message is meant for the user, who needs no traceback
_EXPECTED = (
    *(CheckpointFailure, ClientFailure, ConfigurationError, MisconfigurationException),
    *(RoundFailure, ProcessFailure),
)
# errors by which constructors refuse an option; any other error is a bug and keeps its traceback
_OF_OURS = (ValueError, ImportError, MisconfigurationException)
_OF_OTHERS = (*_OF_OURS, TypeError, AssertionError)
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
    """Wraps a constructor's error, so that the parser neither rewords the error nor tries another type."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


def _with_path(kind: Any, options: Mapping[str, Any], error: Exception) -> Exception:
    """Turn a constructor's error into a ConfigurationError that names the option's path; return a bug unchanged."""
    configuration = _CONFIGURATION.get()
    is_ours = kind.__module__.startswith("fl_lightning")
    text = next((str(e) for e in causes(error) if isinstance(e, _EXPECTED)), None)
    if text is None and isinstance(error, _OF_OURS if is_ours else _OF_OTHERS):
        is_import = isinstance(error, ImportError)
        text = f"{'' if is_import else f'{kind.__name__} refuses its options: '}{error}"
    if configuration is None or text is None:
        return error
    paths = (path for path, spec in specs(configuration) if _describes(spec, kind, options))
    place = next(paths, "")
    found = ConfigurationError(shortened(_placed(text, place, kind, options) if place else text))
    found.__cause__ = error
    return found


def _describes(spec: Namespace, kind: Any, options: Mapping[str, Any]) -> bool:
    """Return whether a block of the configuration is the one that builds this class with these options."""
    name = spec.get("class_path")
    given: dict[str, Any] = vars(spec if name is None else spec.get("init_args") or spec)
    is_kind = options.keys() == given.keys() if name is None else imported(name) is kind
    plain = (
        int,
        float,
        str,
        bool,
        type(None),
    )  # objects in the options are not in the configuration
    return is_kind and all(
        repr(given.get(option)) == repr(value)
        for option, value in options.items()
        if option in given and isinstance(value, plain)
    )


def _placed(text: str, place: str, kind: Any, options: Mapping[str, Any]) -> str:
    """Begin an error message with the path of the option that it names, and add the option's value if missing."""
    inside = place if kind in (*BARE, Trainer) else f"{place}.init_args"
    for prefix in (kind.__name__, place, place.rpartition(".")[2]):
        text = text.removeprefix(f"{prefix}: ")
    option = next((word for word in re.findall(r"\w+", text) if word in options), None)
    if option is None:
        return f"{place}: {text}"
    value = options[option]
    is_said = value is None or str(value) in text or kind.__module__.startswith("fl_lightning")
    if not (is_said or " object at " in str(value)):
        text = f"{text.rstrip('.')}, got {value}"
    if text.startswith(f"{inside}."):
        return text
    text = text.removeprefix(f"{option}: ")
    return f"{inside}{'.' if text.startswith(f'{option} ') else f'.{option}: '}{text}"


# by the start of Lightning's message: words that are put ahead, with the option's name and the allowed values
_DEVICES = "devices must be auto, -1 for all, at least 1, or a list of different ones: "
_ADDED = (
    ("`Trainer(devices=", _DEVICES),
    ("`devices` selected", _DEVICES),
    ("No supported gpu", "accelerator must be cpu or auto on this machine: "),
    ("Found more than one stateful callback", "callbacks must hold one of a kind at most: "),
)


def built_trainer(build: Callable[[], Trainer], options: Mapping[str, Any]) -> Trainer:
    """Build the Trainer, and turn Lightning's errors into ConfigurationErrors that name the refused option.

    Raises:
        ConfigurationError: naming the option that Lightning refuses.
    """
    try:
        return build()
    except ConfigurationError:
        raise
    except (ValueError, TypeError, RuntimeError, MisconfigurationException) as error:
        start = next((words for said, words in _ADDED if str(error).startswith(said)), "")
        text = _placed(f"{start}{error}", "trainer", Trainer, options)
        raise ConfigurationError(shortened(text)) from error


def _built(build: Any, kind: Any, args: Any, options: Mapping[str, Any]) -> Any:
    """Build an object of the configuration; wrap its error, which the parser could take for a wrong type."""
    try:
        # in unions of protocols, the parser accepts some values of a wrong type
        if kind.__module__.startswith("fl_lightning.") and inspect.isclass(kind):
            check_kinds(kind.__init__, options)
        return build(*args, **options)
    except Exception as error:
        if isinstance(error, TypeError) and not _takes(kind, options):
            raise  # the options are those of another type of a union
        found = _with_path(kind, options, error)
        # outside of the parser, a module or the federation has called a factory
        raise Refusal(found) if _IS_BUILDING.get() else found  # noqa: B904 - it has its cause


def _takes(kind: Any, options: Mapping[str, Any]) -> bool:
    """Return whether a constructor accepts all given options by name."""
    try:
        parameters = inspect.signature(kind).parameters
    except (TypeError, ValueError):
        return False
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    return takes_any or options.keys() <= parameters.keys()


def _build(kind: Any, /, *args: Any, **options: Any) -> Any:
    return _built(kind, kind, args, options)


add_instantiator(_build, object)  # type: ignore[arg-type]


class Parser(LightningArgumentParser):
    """Lightning's argument parser, changed to report every error as one sentence."""

    # for the parser of a class (or function) in a configuration, this class; None for a command line's parser
    owner: Any = None

    @override
    def add_class_arguments(
        self, class_type: Any, nested_key: Any = None, *rest: Any, **options: Any
    ) -> Any:
        """Add the options of a class, and note the class in its parser: each class in a configuration has its own."""
        self._keep_owner(class_type, nested_key)
        return super().add_class_arguments(class_type, nested_key, *rest, **options)

    @override
    def add_function_arguments(
        self, function: Any, nested_key: Any = None, *rest: Any, **options: Any
    ) -> Any:
        """Add the options of a function that builds an object of the configuration, and note the function."""
        self._keep_owner(function, nested_key)
        return super().add_function_arguments(function, nested_key, *rest, **options)

    def _keep_owner(self, owner: Any, nested_key: Any) -> None:
        if nested_key is None and not self.exit_on_error:
            self.owner = owner

    @override
    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Print the error as one sentence and exit with code 2; the inner parser of one class raises it instead."""
        text = sentence(message, self, self.owner)
        if not self.exit_on_error:
            super().error(without_marks(text) if self.owner is None else text, ex)
        print(in_lines(f"fl-lightning: {without_marks(text)}", sys.stderr), file=sys.stderr)
        sys.exit(2)

    @override
    def parse_args(self, args: Any = None, *rest: Any, **options: Any) -> Any:
        """Parse words of a command line; the inner parser of one class reads jsonargparse's ``=None`` as null."""
        if isinstance(args, list) and not self.exit_on_error:
            args = [re.sub("=None$", "=null", word) for word in args]
        return super().parse_args(args, *rest, **options)

    def add_instantiator(self, instantiator: Any, *args: Any, **kwargs: Any) -> None:
        """Register a function that builds models or data modules; errors of their constructors then name the option."""

        @wraps(instantiator)  # the parser reads its parameters
        def build(kind: Any, /, *own: Any, **options: Any) -> Any:
            name = "applied_instantiation_links"  # an option of the function, not of the class
            links = {name: options.pop(name)} if name in options else {}
            return _built(partial(instantiator, kind, **links), kind, own, options)

        super().add_instantiator(build, *args, **kwargs)

    def instantiate(self, namespace: Namespace, *args: Any, **kwargs: Any) -> Any:
        """Build all objects of a configuration; raise an error that names the option at fault.

        Raises:
            ConfigurationError: naming the option that a class refuses.
        """
        if _IS_BUILDING.get():  # called for a class inside the configuration
            return super().instantiate(namespace, *args, **kwargs)
        command = namespace.get("subcommand")
        configuration = namespace if command is None else namespace[command]
        _CONFIGURATION.set(configuration)
        token = _IS_BUILDING.set(True)
        try:
            return super().instantiate(namespace, *args, **kwargs)
        except Refusal as refused:
            error = refused.error
        finally:
            _IS_BUILDING.reset(token)
        raise error


def explain(error: BaseException) -> str | None:
    """Return a sentence for an error that the user can correct; None for any other error.

    Example:
        >>> explain(ConfigurationError("fraction must be in (0, 1], got 1.5"))
        'fraction must be in (0, 1], got 1.5'
        >>> explain(KeyError("a bug")), explain(RuntimeError("Invalid buffer size: 20.00 GB"))
        (None, None)
    """
    for cause in causes(error):  # the parser wraps errors of constructors
        if isinstance(cause, _EXPECTED):
            return str(cause)
    if isinstance(error, FileNotFoundError) and "heckpoint" in str(error):
        return f"ckpt_path: {error} Give the path of a .ckpt file, or last."
    if isinstance(error, OSError) and error.errno in _STORAGE:
        return f"{error.filename or 'a file of the run'} could not be written: {error.strerror}"
    if isinstance(error, UnpicklingError):
        return "ckpt_path: the file is not a checkpoint of Lightning, or is damaged"
    return _by_text(error)


def _by_text(error: BaseException) -> str | None:
    """Return a sentence for errors of PyTorch and Lightning that are recognised by their text; else None."""
    text = " ".join(str(error).split())
    if text.startswith("Error(s) in loading state_dict"):
        return (
            "ckpt_path: the checkpoint belongs to another model: resume with the model that wrote it, or start "
            f"without ckpt_path. {shortened(text.partition(': ')[2], most=200)}"
        )
    is_value = isinstance(error, ValueError)
    if is_value and _REFUSED_BY_OPTIMIZER.match(text):
        return f"the optimizer refuses one of its options: {text}"
    if is_value and "`val_check_interval`" in text:
        return f"trainer.val_check_interval: {text}"
    return text if text.startswith("Early stopping conditioned on metric") else None


def bug_behind(error: BaseException) -> str:
    """Return the traceback of an error that the user's module raised while training a client; else an empty text."""
    failure = next((cause for cause in causes(error) if isinstance(cause, ClientFailure)), None)
    cause = None if failure is None else failure.__cause__
    if isinstance(cause, ProcessTraceback):
        return cause.args[1] or ""
    return "" if cause is None else "".join(traceback.format_exception(cause))


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, then the exception that caused it, and so on to the first cause."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__
