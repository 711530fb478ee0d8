"""From columns of a data set of Hugging Face to tensors: texts, images, numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.data.sources.targets import column_of

AT_ONCE = 1000  # examples


@dataclass(frozen=True)
class TextColumns:
    """Texts by a tokenizer, all padded to the length of the longest.

    Args:
        columns: one, or two for pairs.
        tokenizer: itself, or its name or folder.
        max_length: in tokens, ≥ 1.
    """

    columns: list[str]
    tokenizer: Any
    max_length: int

    def __post_init__(self) -> None:
        if not 1 <= len(self.columns) <= 2:
            raise ConfigurationError(
                f"HuggingFace: text must be one column, or two for pairs, got {self.columns}"
            )
        if self.max_length < 1:
            raise ConfigurationError(
                f"HuggingFace: max_length must be at least 1 token, got {self.max_length}"
            )
        if self.tokenizer is None:
            raise ConfigurationError(
                "HuggingFace: text needs a tokenizer: its name, e.g. distilbert-base-uncased, a folder, "
                "or in Python the tokenizer itself"
            )

    def encode(self, split: Any) -> dict[str, Tensor]:
        """Return what the tokenizer makes, by name, each of shape (N, length)."""
        tokenizer = self._loaded()
        if getattr(tokenizer, "pad_token", "") is None:
            raise ConfigurationError(
                "HuggingFace: the tokenizer has no pad_token, which fills texts up to one length: set "
                "tokenizer.pad_token = tokenizer.eos_token and give the tokenizer itself"
            )
        texts = split.with_format(None)
        pieces: dict[str, list[Tensor]] = {}
        for start in range(0, max(len(texts), 1), AT_ONCE):
            some = texts[start : start + AT_ONCE]
            made = tokenizer(
                *(some[name] for name in self.columns),
                truncation=True,
                max_length=self.max_length,
                padding="max_length",
            )
            for name, values in made.items():
                tokens = torch.tensor(values, dtype=torch.long).reshape(-1, self.max_length)
                pieces.setdefault(name, []).append(tokens)
        whole = {name: torch.cat(parts) for name, parts in pieces.items()}
        # padding that every text has
        used = whole["attention_mask"].any(0) if "attention_mask" in whole else slice(None)
        return {name: tokens[:, used] for name, tokens in whole.items()}

    def _loaded(self) -> Any:
        if not isinstance(self.tokenizer, str):
            return self.tokenizer
        try:
            from transformers import AutoTokenizer
        except ImportError as error:
            raise ConfigurationError(
                "HuggingFace: a tokenizer by name needs transformers: pip install "
                "'fl-lightning[huggingface]'"
            ) from error
        try:
            return AutoTokenizer.from_pretrained(self.tokenizer)
        except (OSError, ValueError) as error:
            raise ConfigurationError(
                f"HuggingFace: the tokenizer {self.tokenizer!r} cannot be loaded: {error}"
            ) from error


@dataclass(frozen=True)
class PictureColumn:
    """Images as bytes, shape (N, C, H, W).

    Args:
        column: of images.
        image_size: height and width, in pixels; None for images of one size.
        channels: 1 or 3.
    """

    column: str
    image_size: int | None
    channels: int

    def __post_init__(self) -> None:
        if self.channels not in (1, 3):
            raise ConfigurationError(
                f"HuggingFace: channels must be 1 for grey or 3 for colours, got {self.channels}"
            )
        if self.image_size is not None and self.image_size < 1:
            raise ConfigurationError(
                f"HuggingFace: image_size must be at least 1 pixel, got {self.image_size}"
            )

    @property
    def columns(self) -> list[str]:
        """The column."""
        return [self.column]

    def encode(self, split: Any) -> Tensor:
        """Return the images, uint8."""
        pictures = split.with_format(None)
        pixels: Tensor | None = None
        for place in range(len(pictures)):
            image = self._pixels(pictures[place][self.column])
            if pixels is None:
                pixels = torch.empty((len(pictures), *image.shape), dtype=torch.uint8)
            if image.shape != pixels.shape[1:]:
                raise ConfigurationError(
                    f"HuggingFace: images have different sizes, {tuple(pixels.shape[2:])} and "
                    f"{tuple(image.shape[1:])} pixels: set image_size"
                )
            pixels[place] = image
        return (
            torch.empty((0, self.channels, 1, 1), dtype=torch.uint8) if pixels is None else pixels
        )

    def _pixels(self, image: Any) -> Tensor:
        if not hasattr(image, "convert"):
            raise ConfigurationError(
                f"HuggingFace: column {self.column!r} holds no images, but {type(image).__name__}: "
                "cast it with dataset.cast_column(…, datasets.Image())"
            )
        image = image.convert("L" if self.channels == 1 else "RGB")
        if self.image_size is not None:
            image = image.resize((self.image_size, self.image_size))
        pixels = torch.from_numpy(np.array(image))
        return pixels.unsqueeze(0) if pixels.ndim == 2 else pixels.permute(2, 0, 1)


@dataclass(frozen=True)
class NumberColumns:
    """Columns of numbers, or of lists of numbers, side by side.

    Args:
        columns: at least one.
    """

    columns: list[str]

    def __post_init__(self) -> None:
        if not self.columns:
            raise ConfigurationError("HuggingFace: inputs must name a column at least")

    def encode(self, split: Any) -> Tensor:
        """Return them, float32 of shape (N, F)."""
        plain, parts = split.with_format(None), []
        for name in self.columns:
            try:
                values = column_of(plain[name][:]).astype(np.float32)
            except (TypeError, ValueError) as error:
                raise ConfigurationError(
                    f"HuggingFace: column {name!r} must hold a number, or as many numbers each time: "
                    f"{error}"
                ) from error
            if not np.isfinite(values).all():
                raise ConfigurationError(
                    f"HuggingFace: column {name!r} has examples without a finite number: filter them out"
                )
            parts.append(values.reshape(len(values), -1))
        return torch.from_numpy(np.concatenate(parts, axis=1))
