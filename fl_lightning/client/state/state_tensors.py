"""What local training changes of a module besides the parameters that train.

Some buffers and frozen parameters change while a client trains: batch norm's statistics, a mean
teacher. They are a client's state: every client begins with the global model's, and the server
averages them. The others are constants, such as class weights or an attention mask: they do not
travel, and are checked not to change.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.optim.swa_utils import AveragedModel

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.space import Space

# Whole numbers of the same width, of which a sum is exact whatever the order, NaN or not.
_WHOLE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def candidates(module: nn.Module) -> dict[str, Tensor]:
    """Return the tensors that may be state, by name: buffers and frozen parameters of real numbers."""
    params = {n: p for n, p in module.named_parameters() if not p.requires_grad}
    named: dict[str, Tensor] = dict(module.named_buffers()) | dict(params)
    return {name: tensor for name, tensor in named.items() if tensor.is_floating_point()}


def whole_numbers(module: nn.Module) -> list[Tensor]:
    """Return the buffers and frozen parameters that are not averaged, as they hold no real numbers."""
    frozen = (param for param in module.parameters() if not param.requires_grad)
    return [t for t in (*module.buffers(), *frozen) if not t.is_floating_point()]


def buffer_names(module: nn.Module) -> list[str]:
    """Return the names of all floating-point buffers."""
    return [name for name, buffer in module.named_buffers() if buffer.is_floating_point()]


def state_space(module: nn.Module, names: Collection[str], without: Collection[str] = ()) -> Space:
    """Return the layout of a client's state.

    Args:
        module: whose state it is.
        names: of the tensors that are.
        without: those that are no part of it.
    """
    named: dict[str, Tensor] = dict(module.named_buffers()) | dict(module.named_parameters())
    chosen = frozenset(names) - frozenset(without)
    return Space({name: tensor for name, tensor in named.items() if name in chosen})


def known_state(module: nn.Module) -> list[str]:
    """Return the names of what modules of torch change while they train, also if they do not now.

    These are statistics of batch and instance norm (unless their momentum is 0, by which they gather
    none), the vectors of spectral norm, averaged models.

    Example:
        >>> known_state(nn.BatchNorm1d(2).eval())
        ['running_mean', 'running_var']
    """
    kept: set[int] = set()
    for child in module.modules():
        if isinstance(child, AveragedModel):
            kept |= {id(t) for t in (*child.parameters(), *child.buffers())}
        elif isinstance(child, _SpectralNorm) or (
            isinstance(child, _NormBase) and child.momentum != 0
        ):
            kept |= {id(buffer) for buffer in child.buffers(recurse=False)}
        for hook in child._forward_pre_hooks.values():
            if isinstance(hook, SpectralNorm):
                kept |= {id(getattr(child, f"{hook.name}_{part}")) for part in "uv"}
    return [name for name, tensor in candidates(module).items() if id(tensor) in kept]


def matching(module: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Return the names that patterns with ``*`` and ``?`` find, whole or after a dot.

    Raises:
        ConfigurationError: if one finds nothing.

    Example:
        >>> matching(nn.Sequential(nn.BatchNorm1d(2)), ["running_*"])
        ['0.running_mean', '0.running_var']
    """
    names = list(candidates(module))
    found: set[str] = set()
    for pattern in patterns:
        matches = {name for name in names if _matches(name, pattern)}
        if not matches:
            shown = ", ".join(names[:20]) or "none"
            raise ConfigurationError(
                f"federation.client_state: no buffer and no frozen parameter of real numbers matches "
                f"{pattern!r}; there are {shown}"
            )
        found |= matches
    return [name for name in names if name in found]


def _matches(name: str, pattern: str) -> bool:
    parts = name.split(".")
    return any(fnmatchcase(".".join(parts[i:]), pattern) for i in range(len(parts)))


class Constants:
    """Tensors that local training must leave alone, as they are when this is made.

    Args:
        tensors: by name.

    Example:
        >>> mask = torch.zeros(2)
        >>> constants = Constants({"mask": mask})
        >>> constants.changed()
        []
        >>> _ = mask.data.add_(1)
        >>> constants.touched(), constants.changed()
        ([], ['mask'])
    """

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        known = {n: t for n, t in tensors.items() if t.layout == torch.strided and not t.is_meta}
        self._names, self._tensors = [*known], [*known.values()]
        self._versions = _versions(self._tensors)
        self._sums = _sums(self._tensors)

    def touched(self) -> list[str]:
        """Return those that were written in place and differ; costs nothing if none was written."""
        versions = _versions(self._tensors)
        if versions == self._versions:
            return []
        pairs = zip(versions, self._versions, strict=True)
        written = [i for i, (now, before) in enumerate(pairs) if now != before]
        self._versions = versions
        sums = _sums([self._tensors[i] for i in written])
        changed = zip(written, sums, strict=True)
        return [self._names[i] for i, now in changed if now != self._sums[i]]

    def changed(self) -> list[str]:
        """Return those that differ, also where ``.data`` was written; reads them all."""
        trios = zip(self._names, _sums(self._tensors), self._sums, strict=True)
        return [name for name, now, before in trios if now != before]


def _versions(tensors: Iterable[Tensor]) -> list[int]:
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


def _sums(tensors: Sequence[Tensor]) -> list[Any]:
    with torch.no_grad():
        sums = [t.detach().view(_WHOLE[t.element_size()]).sum(dtype=torch.int64) for t in tensors]
        return torch.stack(sums).tolist() if sums else []


class Homes:
    """Where a module's tensors are kept, so that one that was replaced by another comes home.

    ``self.centre = 0.9 * self.centre + …`` puts another tensor into the place of the buffer.
    """

    def __init__(self, module: nn.Module) -> None:
        self._homes: list[tuple[str, dict[str, Any], str, Tensor]] = [
            (f"{path}.{name}" if path else name, members, name, tensor)
            for path, child in module.named_modules()
            for members in (child._parameters, child._buffers)
            for name, tensor in members.items()
            if tensor is not None
        ]

    def bring_home(self) -> None:
        """Give every tensor the numbers of the one in its place, and its place.

        Raises:
            ConfigurationError: if they do not fit.
        """
        for path, members, name, tensor in self._homes:
            present = members.get(name)
            if present is tensor:
                continue
            members[name] = tensor
            if not isinstance(present, Tensor) or present.shape != tensor.shape:
                shape = None if present is None else tuple(present.shape)
                raise ConfigurationError(
                    f"{path} was replaced by {'nothing' if shape is None else f'shape {shape}'} while "
                    f"it trained, it had shape {tuple(tensor.shape)}: parameters and buffers keep "
                    "their shapes in a federation. Keep what grows in a list on the module."
                )
            with torch.no_grad():
                tensor.copy_(present)
