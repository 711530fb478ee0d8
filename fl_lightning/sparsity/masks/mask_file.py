"""A mask as a file: safetensors, eight entries to a byte.

The tensors are the packed bits under the parameters' names (little endian: the first entry is the
lowest bit of the first byte); the metadata says what they are: format, version, hash and shapes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.sparsity.masks.mask import Mask

_FORMAT = "fl_lightning mask"


def save_mask(mask: Mask, path: str | Path) -> None:
    """Write a mask to a file; folders that are missing are made.

    Example:
        >>> import tempfile, torch
        >>> mask = Mask({"weight": torch.tensor([True, False, True])})
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_mask(mask, f"{folder}/mask.safetensors")
        ...     load_mask(f"{folder}/mask.safetensors") == mask
        True
    """
    state = mask.state_dict()
    metadata = {
        "format": _FORMAT,
        "version": str(state["version"]),
        "hash": state["hash"],
        "shapes": json.dumps(state["shapes"]),
    }
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    save_file(state["bits"], str(path), metadata)


def load_mask(path: str | Path) -> Mask:
    """Read a mask from a file, on the CPU.

    Raises:
        ConfigurationError: if there is no such file, it holds no mask or one of another version,
            or its content does not belong to its hash.
    """
    if not Path(path).is_file():
        raise ConfigurationError(f"mask: there is no file {str(path)!r} on this machine")
    try:
        return Mask.from_state_dict(_read(path))
    except ConfigurationError as error:
        raise ConfigurationError(f"mask: the file {str(path)!r} is {error}") from error


def _read(path: str | Path) -> dict[str, Any]:
    try:
        with safe_open(str(path), framework="pt") as file:
            metadata = file.metadata() or {}
            bits = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except Exception as error:  # a broken file fails in as many ways as there are bytes
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ConfigurationError(f"no safetensors file ({reason})") from error
    if metadata.get("format") != _FORMAT:
        raise ConfigurationError(
            f"no mask: its metadata has the format {metadata.get('format')!r}, not {_FORMAT!r}"
        )
    try:
        version, shapes = int(metadata["version"]), json.loads(metadata["shapes"])
        return {"version": version, "hash": metadata["hash"], "shapes": shapes, "bits": bits}
    except (KeyError, ValueError) as error:
        raise ConfigurationError(f"a damaged mask: metadata without {error}") from error
