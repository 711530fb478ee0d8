"""Messages as JSON documents: annotations of a frozen dataclass give the type and range of each field.

`check_fields` checks a message when it is made, `document_of` converts it to plain JSON, and
`read_document` converts untrusted JSON back. A message has exactly one JSON form: others are refused.

    annotation                    value, and its JSON where that differs
    int, bool, str                of this very type
    Annotated[T, check]           values that ``check(name, value)`` accepts
    Literal[…], T | None          one of these
    bytes                         hexadecimal digits
    tuple[T, …]                   a list
    Mapping[str, T]               by printable names
    Mapping[int, T]               by client: a sorted list of pairs
    Tensor                        a single number, bit for bit as text
    a frozen dataclass            its own document

The field ``tensors`` of a message is sent beside the document.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import cache, partial
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from torch import Tensor

from fl_lightning.core.container import form_of, scalar_of, scalar_text
from fl_lightning.core.plain_json import (
    MessageError,
    check_choice,
    check_form,
    check_names,
    check_number,
    check_options,
    check_string,
    check_whole,
    fields_of,
    shown,
)

Message = TypeVar("Message")
_BESIDE = "tensors"
_WORDS: dict[Any, str] = {bool: "true or false", int: "a whole number"}


def check_fields(message: Any) -> None:
    """Raise if a field of a message has a value that its annotation does not allow.

    Raises:
        MessageError: naming the field.
    """
    for error in errors_in(message):
        raise MessageError(error)


def errors_in(message: Any) -> Iterator[str]:
    """Yield an error for each field of a message with a value that its annotation does not allow."""
    for name, kind in _kinds(type(message)).items():  # type: ignore[arg-type]
        try:
            _check(name, getattr(message, name), kind)
        except MessageError as error:
            yield str(error)


def document_of(message: Any) -> dict[str, Any]:
    """Convert a message to plain JSON, without its tensors."""
    kinds = _kinds(type(message)).items()  # type: ignore[arg-type]
    return {n: _written(getattr(message, n), kind) for n, kind in kinds if n != _BESIDE}


def read_document(kind: type[Message], document: Any, what: str = "it", **tensors: Any) -> Message:
    """Convert an untrusted JSON document back to the message from which `document_of` made it.

    Args:
        kind: class of the message.
        document: plain JSON, untrusted.
        what: name of the document in error messages.
        tensors: tensors that were sent beside the document.

    Raises:
        MessageError: if `document_of` cannot have written the document.
    """
    message = _read(what, document, kind, **tensors)
    check_form(document_of(message), document)
    return message  # type: ignore[no-any-return]


@cache
def _kinds(message: type) -> dict[str, Any]:
    hints = get_type_hints(message, include_extras=True)
    return {field.name: hints[field.name] for field in fields(message)}


def _part_of(kind: Any, value: Any) -> Any:
    """Return the member of a union type that fits a value; return other types unchanged."""
    if get_origin(kind) not in (Union, UnionType):
        return kind
    form = value is None, isinstance(value, tuple | list)
    parts = get_args(kind)
    forms = [(part is NoneType, get_origin(part) is tuple) for part in parts]
    return parts[forms.index(form)] if form in forms else parts[0]


def _bare(kind: Any, value: Any) -> Any:
    part = _part_of(kind, value)
    return get_args(part)[0] if get_origin(part) is Annotated else part


def _check(what: str, value: Any, kind: Any) -> None:
    kind = _part_of(kind, value)
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Annotated:
        parts[1](what, value)
    elif origin is Literal:
        check_choice(what, value, parts)
    elif origin in (tuple, Mapping):
        _check_parts(what, value, origin, parts)
    elif kind is Tensor:
        scalar_text(what, value)
    elif kind is str:
        check_string(value, what)
    elif kind is not NoneType and type(value) is not kind:
        raise MessageError(f"{what} must be {_WORDS.get(kind, kind.__name__)}, got {shown(value)}")


def _check_parts(what: str, value: Any, origin: Any, parts: tuple[Any, ...]) -> None:
    if origin is tuple:
        if type(value) is not tuple:
            raise MessageError(f"{what} must be a list, in Python a tuple, got {shown(value)}")
        for each in value:
            _check(f"{what}: each", each, parts[0])
        return
    by_name = parts[0] is str
    check_names(what, value) if by_name else _check_clients(what, value)
    for name, each in value.items():
        _check(f"{what}: {name if by_name else f'client {name}'}", each, parts[1])


def _written(value: Any, kind: Any) -> Any:
    kind = _bare(kind, value)
    origin, parts = get_origin(kind), get_args(kind)
    if origin is tuple:
        return [_written(each, parts[0]) for each in value]
    if origin is Mapping:
        written = {name: _written(each, parts[1]) for name, each in value.items()}
        return written if parts[0] is str else [list(pair) for pair in sorted(written.items())]
    if kind is Tensor:
        return scalar_text("a number", value)
    if kind is bytes:
        return value.hex()
    return document_of(value) if is_dataclass(kind) else value


def _read(what: str, told: Any, kind: Any, **tensors: Any) -> Any:
    """Convert untrusted JSON to the type that a field's annotation names; `check_fields` checks the range."""
    kind = _bare(kind, told)
    origin, parts = get_origin(kind), get_args(kind)
    if is_dataclass(kind):
        return _read_fields(what, told, kind, **tensors)
    if origin is tuple:
        if type(told) is not list:
            raise MessageError(f"{what} must be a list, got {shown(told)}")
        return tuple(_read(f"{what}: each", each, parts[0]) for each in told)
    if origin is Mapping and parts[0] is not str:
        return _of_pairs(what, told)
    if origin is Mapping:
        if type(told) is not dict:
            raise MessageError(f"{what} must be a mapping, got {shown(told)}")
        return {name: _read(f"{what}: {name}", each, parts[1]) for name, each in told.items()}
    if kind is bytes:
        check_string(told, what)
        return bytes.fromhex(told)  # raises ValueError for other digits
    return scalar_of(told) if kind is Tensor else told


def _read_fields(what: str, told: Any, message: Any, **tensors: Any) -> Any:
    kinds = {n: each for n, each in _kinds(message).items() if n not in tensors}
    given = fields_of(told, tuple(kinds), what)
    read = {name: _read(name, given[name], each) for name, each in kinds.items()}
    for name, each in kinds.items():  # a class of another room does not check itself
        _check(name, read[name], each)
    return message(**read, **tensors)


def _of_pairs(what: str, told: Any) -> dict[int, Any]:
    if type(told) is not list or not all(type(pair) is list and len(pair) == 2 for pair in told):
        raise MessageError(f"{what} must be a list of pairs, got {shown(told)}")
    found = {client: each for client, each in told if type(client) is int}
    if len(found) < len(told):
        raise MessageError(f"{what} must name every client once, by its number, got {shown(told)}")
    return found


def _check_clients(what: str, value: Any) -> None:
    if not isinstance(value, Mapping):
        raise MessageError(f"{what} must be a mapping, got {shown(value)}")
    for client in value:
        check_whole(f"{what}: each client", client)


def _check_tensors(what: str, tensors: Any) -> None:
    check_names(what, tensors)
    for name, tensor in tensors.items():
        form_of(name, tensor)


Number = Annotated[int, check_whole]
Positive = Annotated[int, partial(check_whole, least=1)]
Real = Annotated[float, check_number]
Options = Annotated[Mapping[str, Any], lambda what, options: check_options(options)]
Tensors = Annotated[Mapping[str, Tensor], _check_tensors]
