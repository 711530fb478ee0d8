"""Blocks of numbers that share a scale: so many neighbours, those of a tensor each, or all in one."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Literal, Self

import torch
from torch import Tensor

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.updates.payload import Block, num_blocks
from fl_lightning.updates.transform import Shapes, Transform

# What a user says of blocks, and what it becomes once the tensors are known.
BlockOption = Block | Literal["tensor"]


class InBlocks(Transform):
    """What transforms have in common that round numbers block by block; subclasses are dataclasses.

    Attributes:
        block: neighbours that share a scale, ``tensor`` for those of each tensor, None for all.
    """

    block: BlockOption

    @property
    def needs_shapes(self) -> bool:
        """Whether the blocks are tensors that are not known yet."""
        return self.block == "tensor"

    def with_shapes(self, shapes: Shapes) -> Self:
        """Return the transform with a block for each of these tensors."""
        return replace(self, block=sizes_of(shapes)) if self.needs_shapes else self  # type: ignore[type-var]


def checked_block(block: BlockOption) -> None:
    """Raise ConfigurationError if ``block`` is no number of neighbours."""
    is_known = (
        block >= 1 if isinstance(block, int) else block == "tensor" or not isinstance(block, str)
    )
    if not is_known:
        raise ConfigurationError(
            f"block must be at least 1, 'tensor', or None for one block, got {block!r}"
        )


def sizes_of(shapes: Shapes) -> tuple[int, ...]:
    """Return how many numbers each tensor has, but for those without any."""
    return tuple(size for size in map(math.prod, shapes) if size)


def block_name(block: BlockOption) -> str:
    """Return what a transform's name says of its blocks."""
    if block is None:
        return ""
    return f", blocks of {block}" if isinstance(block, int) else ", a block a tensor"


def known_block(block: BlockOption, size: int) -> Block:
    """Return the blocks of so many numbers.

    Raises:
        ValueError: if they are tensors, and these are not known, or others.
    """
    if block == "tensor":
        raise ValueError("blocks of a tensor each: say their shapes")
    if isinstance(block, tuple) and sum(block) != size:
        raise ValueError(
            f"blocks of a tensor each make {sum(block)} numbers, got {size}: use blocks of a fixed "
            "size after what leaves numbers out"
        )
    return block


def over_blocks(
    values: Tensor, block: Block, measure: Callable[[Tensor], Tensor], pad: float | Tensor = 0.0
) -> Tensor:
    """Return what is measured of each block, shape (number of blocks, …).

    Args:
        values: shape (n,).
        block: see `Quantised`.
        measure: of rows of one block each.
        pad: what the last row is filled up with.
    """
    if isinstance(block, tuple):
        parts = [measure(part[None]) for part in values.split(list(block))]
        return torch.cat(parts) if parts else measure(values.view(0, 1))
    size = block or max(values.numel(), 1)
    rows = num_blocks(values.numel(), block)
    padded = torch.empty(rows * size, dtype=values.dtype, device=values.device)
    padded[values.numel() :] = pad
    padded[: values.numel()] = values
    return measure(padded.view(rows, size))
