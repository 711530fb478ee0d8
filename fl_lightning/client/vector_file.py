"""A vector in a file that is named after its content, and is never changed.

    name = BLAKE2b(dtype, bytes)

So a file that is there need not be written again, one that is damaged or another's is found out,
and a later version cannot take an earlier one's place.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fl_lightning.core.errors import ConfigurationError

SUFFIX = ".vector"


@dataclass(frozen=True)
class VectorFile:
    """Where a vector is.

    Attributes:
        path: of the file.
        dtype: the name that torch has for it, e.g. ``float32``.
        size: k.

    Example:
        >>> import tempfile
        >>> file = VectorFile.write(torch.tensor([1.0, 2.0]), Path(tempfile.mkdtemp()))
        >>> file.check()
        >>> file.read()
        tensor([1., 2.])
    """

    path: Path
    dtype: str
    size: int

    @classmethod
    def write(cls, vector: Tensor, folder: Path) -> VectorFile:
        """Write a vector of shape (k,), k ≥ 1, unless it is there, and return where it is."""
        content = vector.detach().cpu().contiguous().view(torch.uint8).numpy()
        dtype = str(vector.dtype).removeprefix("torch.")
        file = cls(folder / f"{_digest(dtype, content)}{SUFFIX}", dtype, vector.numel())
        if not file.is_whole:
            folder.mkdir(parents=True, exist_ok=True)
            unfinished = file.path.with_suffix(".unfinished")
            content.tofile(unfinished)
            os.replace(unfinished, file.path)
        return file

    @property
    def num_bytes(self) -> int:
        """Its length."""
        itemsize: int = getattr(torch, self.dtype).itemsize
        return self.size * itemsize

    @property
    def is_whole(self) -> bool:
        """True if the file exists and has the right length."""
        return self.path.is_file() and self.path.stat().st_size == self.num_bytes

    def read(self) -> Tensor:
        """Return the vector, mapped into memory: its pages are read when they are needed."""
        # copies what would be changed, so that torch does not warn of memory it may not write to
        content = np.memmap(self.path, dtype=np.uint8, mode="c")
        return torch.from_numpy(content).view(getattr(torch, self.dtype))

    def check(self) -> None:
        """Refuse another content than the name says.

        Raises:
            ConfigurationError: if the file is missing or holds something else.
        """
        if not self.is_whole:
            state = "of another length" if self.path.exists() else "missing"
            raise ConfigurationError(
                f"{self.path}, in which the checkpoint keeps what a client remembers, is {state}: "
                f"move a checkpoint together with the folder {self.path.parent.name} beside it"
            )
        content = np.memmap(self.path, dtype=np.uint8, mode="r")
        if _digest(self.dtype, content) != self.path.stem:
            raise ConfigurationError(
                f"{self.path}, in which the checkpoint keeps what a client remembers, holds "
                "something else: it was changed or damaged; resume from another checkpoint"
            )


def _digest(dtype: str, content: npt.NDArray[np.uint8]) -> str:
    return blake2b(content.data, digest_size=16, person=dtype.encode()[:16]).hexdigest()
