"""Orders and answers: what is sent arrives, bit for bit, and nothing else is accepted."""

import re
from dataclasses import fields, replace

import pytest
import torch
from flower.made_up_messages import LIMIT, answers, any_answer, any_order, orders
from forged import canonical, fields_of, with_text
from hypothesis import given, settings

from fl_lightning.core.plain_json import MessageError
from fl_lightning.flower.messages import (
    CATEGORIES,
    Answer,
    ClientAnswer,
    Failure,
    Order,
    package_version,
)

MESSAGES = [*orders(), *answers()]


def bits(tensor):
    return tensor.dtype, tensor.shape, tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


def content(message):
    """Return all that a message holds, in a form that can be compared, 1 and 1.0 and True apart."""
    if isinstance(message, torch.Tensor):
        return bits(message)
    if isinstance(message, Order | Answer | ClientAnswer | Failure):
        return [content(getattr(message, field.name)) for field in fields(message)]
    if isinstance(message, dict):
        return {name: content(value) for name, value in message.items()}
    if isinstance(message, list | tuple):
        return [type(message), *map(content, message)]
    return type(message), repr(message)


def read(data, kind, limit=LIMIT):
    return kind.from_bytes(data, limit=limit)


@settings(max_examples=100)
@given(any_order() | any_answer())
def test_a_message_arrives_as_it_was_sent(message):
    data = message.to_bytes()
    received = read(data, type(message))
    assert content(received) == content(message)
    assert received.to_bytes() == data


def test_equal_messages_have_equal_bytes():
    order = MESSAGES[1]
    turned = {
        name: dict(reversed(getattr(order, name).items()))
        for name in ("counted", "options", "tensors")
    }
    assert replace(order, **turned).to_bytes() == order.to_bytes()
    assert (
        replace(order, options={"a": 1}).to_bytes() != replace(order, options={"a": 1.0}).to_bytes()
    )


def test_a_view_travels_as_what_it_shows_and_what_arrives_shares_no_memory():
    matrix = torch.arange(6.0).reshape(2, 3)
    order = replace(MESSAGES[2], tensors={"model": matrix.T, "stage/part/buffers": matrix[:, 1]})
    data = order.to_bytes()
    first, second = read(data, Order).tensors, read(data, Order).tensors
    first["model"].zero_()
    assert torch.equal(second["model"], matrix.T)
    assert second["stage/part/buffers"].tolist() == [1, 4]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"kind": "shutdown"}, "kind must be one of hello, calibrate, train"),
        ({"run": "A" * 32}, "run must be 32 hexadecimal digits"),
        ({"round": True}, "round must be a whole number, at least 0, got True"),
        ({"clients": (1, 1)}, "clients must name every client once"),
        ({"clients": [1]}, "clients must be a list, in Python a tuple"),
        ({"clients": ()}, "must name at least one client"),
        (
            {"counted": {2: 1}},
            r"counted must contain all clients of an order to train; missing: \[4\]",
        ),
        ({"counted": {2: 8, 4: 0}}, "client 2 must be a whole number, at least -1 and at most 7"),
        ({"options": {"lr": float("nan")}}, "options.lr is nan"),
        ({"options": {"betas": (0.9, 0.99)}}, "options.betas has the type tuple.*use a list"),
        ({"options": {"x": {1: 2}}}, "a name in options.x must be a text"),
        ({"options": {"x": "\ud800"}}, "cannot be encoded"),
        ({"tensors": {"weights": torch.ones(1)}}, "are model and stage"),
        ({"tensors": {"model": [1.0]}}, "must be a dense tensor, got list"),
        ({"tensors": {"model": torch.ones(1, dtype=torch.complex128)}}, "cannot be sent"),
    ],
)
def test_an_order_that_cannot_be_is_refused_where_it_is_made(change, said):
    with pytest.raises(MessageError, match=said):
        replace(MESSAGES[1], **change)


FAILED = Failure("training", "0" * 16)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"site": "../etc"}, "site must be 1 to 63 letters"),
        ({"order": "0"}, "order must be 64 hexadecimal"),
        ({"version": None}, "answer of hospital_a has fl_lightning None, here it is"),
        ({"failure": FAILED}, "has no clients, options or tensors"),
        (
            {"clients": (ClientAnswer(client=1),) * 2, "tensors": {}},
            "clients must name every client once",
        ),
        (
            {"tensors": {"2/payload": torch.ones(1, dtype=torch.uint8)}},
            "of clients that did not fail",
        ),
        ({"tensors": {"5/stage/a/b": torch.ones(1)}}, "of clients that did not fail"),
        ({"tensors": {"4/payload": torch.ones(1)}}, "must be bytes"),
    ],
)
def test_an_answer_that_cannot_be_is_refused_where_it_is_made(change, said):
    with pytest.raises(MessageError, match=said):
        replace(next(answers()), **change)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"num_examples": -1}, "num_examples must be"),
        ({"effective_steps": float("inf")}, "effective_steps must be a finite"),
        ({"effective_steps": -1.0}, "≥ 0"),
        ({"metrics": {"loss": torch.ones(1)}}, "a tensor without dimensions"),
        ({"facts": {"x": float("nan")}}, "facts: x must be a finite number"),
        ({"failure": "KeyError: 'Mrs Smith'"}, "failure must be one of"),
        ({"failure": "training", "num_steps": 1}, "num_steps must be left out"),
        ({"failure": "training", "optimizer_steps": 0}, "optimizer_steps must be left out"),
    ],
)
def test_an_answer_of_a_client_that_cannot_be_is_refused(options, said):
    with pytest.raises(MessageError, match=said):
        ClientAnswer(client=3, **options)


def test_a_failure_is_a_sentence_with_an_id_and_no_text_of_an_exception():
    found = [Failure(category) for category in CATEGORIES]
    assert len({failure.id for failure in found}) == len(found)
    assert all(failure.id in failure.sentence for failure in found)
    for text in ("patient 7 is ill", "", "Training"):
        with pytest.raises(MessageError):
            Failure(text)
        with pytest.raises(MessageError):
            Failure("training", text)


def test_another_version_is_refused_with_both_named_though_the_fields_are_others(monkeypatch):
    text = fields_of(MESSAGES[0].to_bytes()) | {"version": "9.9", "haste": 3}
    with pytest.raises(MessageError, match=r"has fl_lightning '9\.9'"):
        read(with_text(MESSAGES[0].to_bytes(), canonical(text)), Order)
    own = package_version()
    data = [message.to_bytes() for message in (MESSAGES[1], next(answers()))]
    monkeypatch.setattr("fl_lightning.flower.messages.package_version", lambda: "9.9")
    for each, kind in zip(data, (Order, Answer), strict=True):
        with pytest.raises(
            MessageError, match=f"fl_lightning '{re.escape(own)}', here it is '9.9'"
        ):
            read(each, kind)


def test_an_order_is_no_answer():
    for message in MESSAGES:
        other = Answer if isinstance(message, Order) else Order
        with pytest.raises(MessageError):
            read(message.to_bytes(), other)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda d: d | {"code": "import os"}, "has the unknown field 'code'"),
        (lambda d: {n: v for n, v in d.items() if n != "round"}, "has no round"),
        (lambda d: d | {"round": 7.0}, "round must be a whole number"),
        (lambda d: d | {"clients": {"4": 1}}, "clients must be a list"),
        (lambda d: d | {"counted": {"2": 1, "4": 1}}, "counted must be a list of pairs"),
        (
            lambda d: d | {"counted": [[2, 1], [4, 1], [4, 1]]},
            "counted must name every client once",
        ),
        (lambda d: d | {"counted": [[4, 1], [2, 1]]}, "canonical form"),
        (lambda d: d | {"counted": [["2", 1], [4, 1]]}, "counted must name every client once"),
        (lambda d: [d], "must be a mapping"),
    ],
)
def test_a_forged_document_is_refused(change, said):
    forged = with_text(MESSAGES[1].to_bytes(), canonical(change(fields_of(MESSAGES[1].to_bytes()))))
    with pytest.raises(MessageError, match=said):
        read(forged, Order)
