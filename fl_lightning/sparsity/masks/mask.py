"""Masks over parameters, which are True for entries that train, and files of masks.

A mask covers only the tensors that it names. Whether other parameters train or stay frozen is decided
where the mask is used.

A file of a mask is a container (`fl_lightning.core.container`, a safetensors file) with eight entries per
byte: packed bits under the parameters' names (little endian: the first entry is the lowest bit of the
first byte); its fields are version, hash, and names with shapes in order.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fl_lightning.core.container import read, write
from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.plain_json import (
    MessageError,
    check_form,
    check_string,
    check_whole,
    fields_of,
)

VERSION = 1  # of the layout of packed bits, in checkpoints, files and the hash


class Mask(Mapping[str, Tensor]):
    """Mask of the entries that train: maps parameter names to bool tensors of their shapes; immutable.

    Two masks are equal if names, shapes and bits are equal, in any order and on any devices. The
    tensors are not copied on access: do not write to them.

    Args:
        tensors: bool tensors by name; they are copied.

    Raises:
        ConfigurationError: if a tensor is not bool.

    Example:
        >>> mask = Mask({"weight": torch.tensor([[True, False], [False, False]])})
        >>> mask.num_active, mask.num_entries, mask.density, mask.sparsity
        (1, 4, 0.25, 0.75)
        >>> mask == Mask.from_state_dict(mask.state_dict())
        True
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            if tensor.dtype != torch.bool:
                raise ConfigurationError(
                    f"tensors of a mask must be bool, True for entries that train, and {name} is "
                    f"{tensor.dtype}: give e.g. scores < threshold"
                )
        self._tensors = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        self._active = {name: int(t.count_nonzero()) for name, t in self._tensors.items()}
        self._hash: str | None = None

    @classmethod
    def ones(cls, tensors: Mapping[str, Tensor]) -> Mask:
        """Return the mask that trains all entries of the given tensors."""
        return cls({name: torch.ones_like(t, dtype=torch.bool) for name, t in tensors.items()})

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mask) and self.hash() == other.hash()

    def __hash__(self) -> int:
        return int(self.hash(), 16)

    def __repr__(self) -> str:
        return f"Mask({len(self)} tensors, {self.num_active:,} of {self.num_entries:,} entries)"

    def __reduce__(self) -> tuple[Any, ...]:
        return Mask.from_state_dict, (self.state_dict(),)  # eight times smaller

    @property
    def num_active(self) -> int:
        """Number of entries that train, over all tensors."""
        return sum(self._active.values())

    @property
    def num_entries(self) -> int:
        """Number of all entries that the mask covers, trained or frozen."""
        return sum(tensor.numel() for tensor in self._tensors.values())

    @property
    def density(self) -> float:
        """Fraction of entries that train, in [0, 1]; 1 for a mask without entries."""
        return self.num_active / self.num_entries if self.num_entries else 1.0

    @property
    def sparsity(self) -> float:
        """Fraction of entries that are frozen: 1 - density."""
        return 1 - self.density

    @property
    def active_per_tensor(self) -> dict[str, int]:
        """Number of entries that train, by name of the tensor."""
        return dict(self._active)

    def to(self, device: torch.device | str) -> Mask:
        """Return the mask, copied to a device."""
        return Mask({name: tensor.to(device) for name, tensor in self._tensors.items()})

    def hash(self) -> str:
        """Return a hash that identifies the mask: names, shapes and bits by blake2b, 32 hexadecimal digits."""
        if self._hash is None:
            digest = hashlib.blake2b(f"mask {VERSION}".encode(), digest_size=16)
            for name in sorted(self._tensors):
                head = json.dumps([name, list(self._tensors[name].shape)])
                digest.update(len(head).to_bytes(8, "little") + head.encode())
                digest.update(_pack(self._tensors[name]).tobytes())
            self._hash = digest.hexdigest()
        return self._hash

    def state_dict(self) -> dict[str, Any]:
        """Return the mask for a checkpoint: names, shapes, hash, and bits packed to 8 per byte."""
        return {
            "version": VERSION,
            "hash": self.hash(),
            "shapes": {name: list(tensor.shape) for name, tensor in self._tensors.items()},
            "bits": {name: torch.from_numpy(_pack(t)) for name, t in self._tensors.items()},
        }

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Mask:
        """Return the mask that `state_dict` of another mask describes, on the CPU.

        Raises:
            ConfigurationError: if the version differs, a tensor is missing, or the hash does not match.
        """
        if state.get("version") != VERSION:
            raise ConfigurationError(
                f"a mask of version {state.get('version')}, and this release reads version {VERSION}: calibrate "
                "again, or use the release that wrote it"
            )
        shapes, bits = state["shapes"], state["bits"]
        if differing := sorted(shapes.keys() ^ bits.keys()):
            raise ConfigurationError(
                f"a damaged mask: shapes and bits name different tensors, {some(differing)}"
            )
        mask = cls({name: _unpack(name, bits[name], shape) for name, shape in shapes.items()})
        if mask.hash() != state["hash"]:
            raise ConfigurationError(
                f"a damaged mask: its hash is {mask.hash()}, it was saved with {state['hash']}"
            )
        return mask

    def to_bytes(self) -> bytes:
        """Return the mask as the bytes of a mask file."""
        state = self.state_dict()
        about = {
            "version": state["version"],
            "hash": state["hash"],
            "shapes": [[name, shape] for name, shape in state["shapes"].items()],
        }
        return write("mask", about, state["bits"])

    @classmethod
    def from_bytes(cls, content: bytes) -> Mask:
        """Return the mask that a file's bytes describe, on the CPU; checks them, as they may be untrusted.

        Raises:
            ConfigurationError: if it is no mask of this version, or damaged.
        """
        try:
            fields, bits = read(content, "mask")
            state = dict(fields_of(fields, ("version", "hash", "shapes"), "a mask"))
            check_whole("a mask: version", state["version"])
            state["shapes"] = dict(_name_and_shape(each) for each in state["shapes"] or ())
            check_form([[name, shape] for name, shape in state["shapes"].items()], fields["shapes"])
        except (MessageError, TypeError) as error:
            raise ConfigurationError(f"no file of a mask ({error})") from error
        return cls.from_state_dict({**state, "bits": bits})

    def check_fits(self, module: nn.Module) -> None:
        """Raise ConfigurationError if a module has no parameters of the mask's names and shapes."""
        found = dict(module.named_parameters())
        missing = [name for name in self if name not in found]
        differing = [
            f"{name} {tuple(found[name].shape)} instead of {tuple(self[name].shape)}"
            for name in self
            if name in found and found[name].shape != self[name].shape
        ]
        kinds = {"missing": missing, "of another shape": differing}
        if issues := [f"{kind}: {some(names)}" for kind, names in kinds.items() if names]:
            raise ConfigurationError(
                f"the mask does not fit {type(module).__name__}: of its {len(self)} tensors are "
                f"{'; '.join(issues)}. Use the model for which it was calibrated, or calibrate again"
            )


def some(names: list[str], most: int = 5) -> str:
    """Return names as text for a message: the first few, and how many more there are.

    Example:
        >>> some(["a", "b", "c"], most=2)
        'a, b and 1 more'
    """
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _pack(tensor: Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.packbits(tensor.flatten().cpu().numpy(), bitorder="little")


def _unpack(name: str, bits: Tensor, shape: list[int]) -> Tensor:
    size = math.prod(shape)
    if bits.shape != (-(-size // 8),) or bits.dtype != torch.uint8:
        raise ConfigurationError(
            f"a damaged mask: {name} of shape {tuple(shape)} needs {-(-size // 8)} bytes of bits, "
            f"it has {tuple(bits.shape)} of {bits.dtype}"
        )
    packed = bits.cpu().numpy()
    if size % 8 and packed[-1] >> size % 8:
        raise ConfigurationError(f"a damaged mask: {name} has bits after its last entry")
    flat = np.unpackbits(packed, count=size, bitorder="little")
    return torch.from_numpy(flat.view(np.bool_)).view(shape)


def save_mask(mask: Mask, path: str | Path) -> None:
    """Write a mask to a file; missing folders are created.

    Example:
        >>> import tempfile, torch
        >>> mask = Mask({"weight": torch.tensor([True, False, True])})
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_mask(mask, f"{folder}/mask.safetensors")
        ...     load_mask(f"{folder}/mask.safetensors") == mask
        True
    """
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_bytes(mask.to_bytes())


def load_mask(path: str | Path) -> Mask:
    """Read a mask from a file, on the CPU.

    Raises:
        ConfigurationError: if the file does not exist, is no mask of this version, or is damaged.
    """
    if not Path(path).is_file():
        raise ConfigurationError(f"mask: there is no file {str(path)!r} on this machine")
    try:
        return Mask.from_bytes(Path(path).read_bytes())
    except ConfigurationError as error:
        raise ConfigurationError(f"mask: the file {str(path)!r} is {error}") from error


def _name_and_shape(entry: Any) -> tuple[str, list[int]]:
    name: Any
    name, shape = entry if isinstance(entry, list) and len(entry) == 2 else (None, None)
    check_string(name, "a mask: a name")
    for size in shape if isinstance(shape, list) else (None,):
        check_whole(f"a mask: shape of {name}", size)
    return name, list(shape or ())


@dataclass(frozen=True)
class LayerDensity:
    """Density of a mask in one layer or tensor.

    Attributes:
        name: name of the tensor or layer.
        num_entries: number of its entries.
        num_active: number of its entries that train.
    """

    name: str
    num_entries: int
    num_active: int

    @property
    def density(self) -> float:
        """Fraction of the layer's entries that train, in [0, 1]; 1 for a layer without entries."""
        return self.num_active / self.num_entries if self.num_entries else 1.0


def density_per_layer(mask: Mask, depth: int | None = None) -> list[LayerDensity]:
    """Return a mask's density in every layer, in the order of the layers in the mask.

    Args:
        mask: the mask.
        depth: number of parts of the dotted names that identify a layer, so that whole blocks are joined;
            None joins only the tensors of a layer, e.g. weight and bias.

    Example:
        >>> import torch
        >>> bits = torch.tensor([True, False])
        >>> mask = Mask({"net.0.weight": bits, "net.0.bias": ~bits, "net.1.weight": bits & ~bits})
        >>> [(row.name, row.num_active, row.num_entries) for row in density_per_layer(mask)]
        [('net.0', 2, 4), ('net.1', 0, 2)]
        >>> [row.density for row in density_per_layer(mask, depth=1)]
        [0.3333333333333333]
    """
    layers: dict[str, list[str]] = {}
    for name in mask:
        layer = ".".join(name.split(".")[:-1][:depth]) or name
        layers.setdefault(layer, []).append(name)
    active = mask.active_per_tensor
    return [
        LayerDensity(layer, sum(mask[n].numel() for n in names), sum(active[n] for n in names))
        for layer, names in layers.items()
    ]
