"""STUB until the real one lands."""

from __future__ import annotations
import hashlib, io
from collections.abc import Mapping
from dataclasses import dataclass, field, asdict
from typing import Any, Literal
import torch
from torch import Tensor


class MessageError(ValueError): ...


class _M:
    def to_bytes(self) -> bytes:
        f = io.BytesIO()
        torch.save(vars(self), f)
        return f.getvalue()

    @classmethod
    def from_bytes(cls, content: bytes, *, limit: int = 2**40):
        return cls(**torch.load(io.BytesIO(content), weights_only=False))


@dataclass(frozen=True, kw_only=True)
class Order(_M):
    kind: str
    run: str
    configuration: str
    round: int
    clients: tuple[int, ...] = ()
    counted: Mapping[int, int] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ClientAnswer:
    client: int
    num_examples: int = 0
    num_steps: int = 0
    optimizer_steps: Any = None
    effective_steps: float | None = None
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    facts: Mapping[str, float] = field(default_factory=dict)
    failure: str | None = None


@dataclass(frozen=True, kw_only=True)
class Failure:
    category: str
    id: str


@dataclass(frozen=True, kw_only=True)
class Answer(_M):
    kind: str
    run: str
    round: int
    site: str
    order: str
    versions: Mapping[str, str] = field(default_factory=dict)
    clients: tuple[ClientAnswer, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    failure: Failure | None = None
