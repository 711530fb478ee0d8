"""Data source of Hugging Face data sets: texts, images and columns of numbers as tensors."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.data.sources.rows import TargetKind, Targets, TensorRows, column_of
from fl_lightning.data.sources.source import Loaded, Source

FILES = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}
NAMES = {"val": "validation", "test": "test"}  # default names of splits


@final
class HuggingFace(Source):
    """A ``datasets.Dataset``, read into memory; other columns can be used for natural partitions.

    - ``text`` and a tokenizer make batches that are dicts, for models of ``transformers``:
      ``model(**batch).loss``. The target is ``labels``. All texts are padded to the longest.
    - ``image`` makes pairs of images (B, C, H, W) in [0, 1] and targets (B,).
    - ``inputs`` makes pairs of numbers (B, F) in float32 and targets (B,).

    Args:
        dataset: a ``Dataset`` or ``DatasetDict``; or a folder written by ``save_to_disk``; or a file
            (``.jsonl``, ``.json``, ``.csv``, ``.parquet``); or a name on the hub, such as
            ``flwrlabs/femnist``, which is downloaded once.
        label: the column to predict.
        text: the column of texts, or two for pairs of texts.
        image: the column of images.
        inputs: columns of numbers, or of lists of numbers.
        tokenizer: tokenizer of the texts: its name or folder, or in Python the tokenizer itself.
        max_length: largest number of tokens of a text; longer texts are truncated.
        image_size: height and width to which images are scaled, in pixels; None for images of one size.
        channels: 1 for grey, 3 for colour.
        name: configuration of a data set on the hub, e.g. ``sst2`` of ``glue``.
        train: the split to divide among the clients.
        val: the split for validation. None uses the split called validation if there is one, or else
            holds out ``val_fraction`` of the training examples.
        test: the same for the test.
        target_type: whether the label is a ``class`` or a ``number``; if None, class labels, strings
            and up to 100 distinct integers are classes.
        options: those of `Source`.

    Raises:
        ConfigurationError: if a setting is out of range; at `setup` if a data set, split or column is
            missing.
    """

    def __init__(
        self,
        dataset: Any,
        label: str = "label",
        *,
        text: str | list[str] | None = None,
        image: str | None = None,
        inputs: list[str] | None = None,
        tokenizer: Any = None,
        max_length: int = 128,
        image_size: int | None = None,
        channels: int = 3,
        name: str | None = None,
        train: str = "train",
        val: str | None = None,
        test: str | None = None,
        target_type: TargetKind | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        if sum(part is not None for part in (text, image, inputs)) != 1:
            raise ConfigurationError(
                "HuggingFace: set one of text, image and inputs to what the model sees"
            )
        self._encoder: TextColumns | PictureColumn | NumberColumns
        if text is not None:
            names = [text] if isinstance(text, str) else list(text)
            self._encoder = TextColumns(names, tokenizer, max_length)
        elif image is not None:
            self._encoder = PictureColumn(image, image_size, channels)
        else:
            self._encoder = NumberColumns(list(inputs or []))
        self._dataset, self._name, self._label = dataset, name, label
        self._splits, self._target_type = {"train": train, "val": val, "test": test}, target_type

    def prepare_data(self) -> None:
        """Download a data set of the hub if it is missing."""
        if isinstance(self._dataset, str):
            read_dataset(self._dataset, self._name)

    def load(self) -> Loaded:
        """Read and encode the splits.

        Raises:
            ConfigurationError: if a data set, split or column is missing.
        """
        splits = chosen_splits(read_dataset(self._dataset, self._name), self._splits)
        train = splits["train"]
        for split in splits.values():
            check_columns(split, [self._label, *self._encoder.columns])
        kind, names = self._targets(train)
        rows = {where: self._rows(split, kind, where) for where, split in splits.items()}
        return Loaded(rows["train"], rows.get("val"), rows.get("test"), names)

    def _targets(self, train: Any) -> tuple[Targets, tuple[str, ...]]:
        option = f"HuggingFace: column {self._label!r}"
        names = getattr(train.features[self._label], "names", None)
        if names is not None:  # a ClassLabel
            return Targets(option, np.arange(len(names))), tuple(names)
        values = column_of(column(train, self._label))
        if values.ndim != 1:
            raise ConfigurationError(
                f"{option}: a target must be one value an example, got values of shape "
                f"{values.shape[1:]}: read the data set yourself and use Arrays"
            )
        kind = Targets.of(values, self._target_type, option)
        return kind, kind.class_names

    def _rows(self, split: Any, kind: Targets, where: str) -> TensorRows:
        targets = kind.encode(column_of(column(split, self._label)), where)
        used = set(self._encoder.columns)
        columns = {
            name: partial(column, split, name) for name in split.column_names if name not in used
        }
        encoded = self._encoder.encode(split)
        if isinstance(encoded, dict):
            return TensorRows({**encoded, "labels": targets}, columns)
        return TensorRows(
            [encoded, targets], columns, pixels=isinstance(self._encoder, PictureColumn)
        )


def column(split: Any, name: str) -> Any:
    """Return the values of a column, one per example."""
    return split.with_format(None)[name][:]


def read_dataset(dataset: Any, name: str | None, owner: str = "HuggingFace") -> Any:
    """Return a Dataset or DatasetDict.

    Args:
        dataset: itself, a folder, a file, or a name on the hub.
        name: its configuration on the hub.
        owner: the class that reads it, for errors.

    Raises:
        ConfigurationError: if there is no such data set.
    """
    try:
        import datasets
    except ImportError as error:
        raise ConfigurationError(
            f"{owner} needs datasets: pip install 'fl-lightning[huggingface]'"
        ) from error
    if isinstance(dataset, (datasets.Dataset, datasets.DatasetDict)):
        return dataset
    if not isinstance(dataset, str):
        raise ConfigurationError(
            f"{owner}: dataset must be a Dataset, a DatasetDict, a folder, a file or a name on the hub, got "
            f"{type(dataset).__name__}"
        )
    kind = FILES.get(Path(dataset).suffix)
    if kind is not None and not Path(dataset).is_file():
        raise ConfigurationError(f"{owner}: there is no file {dataset}")
    try:
        if kind is not None:
            return datasets.load_dataset(kind, data_files=dataset)
        if Path(dataset).is_dir() and name is None:
            return datasets.load_from_disk(dataset)
        return datasets.load_dataset(dataset, name)
    except (OSError, ValueError, RuntimeError) as error:  # OSError: no network
        raise ConfigurationError(
            f"{owner}: {dataset!r} is no folder of save_to_disk, and cannot be loaded from the hub: "
            f"{error}"
        ) from error


def chosen_splits(
    found: Any, wanted: dict[str, str | None], owner: str = "HuggingFace"
) -> dict[str, Any]:
    """Return the available splits by purpose: train, and val and test if there are any.

    Raises:
        ConfigurationError: if one that is named is not there, or two are the same.
    """
    if not isinstance(found, dict):
        return {"train": found}
    chosen: dict[str, str] = {}
    for purpose in ("train", "test", "val"):
        given = wanted[purpose]
        if given is not None and given not in found:
            raise ConfigurationError(
                f"{owner}: {purpose} is the split {given!r}: there are "
                f"{', '.join(map(repr, found))}"
            )
        usual = NAMES.get(purpose)
        if given is not None:
            chosen[purpose] = given
        elif usual in found and usual not in wanted.values():
            chosen[purpose] = str(usual)
    if len(set(chosen.values())) < len(chosen):
        raise ConfigurationError(
            f"{owner}: train, val and test must be different splits, got {chosen}"
        )
    return {purpose: found[name] for purpose, name in chosen.items()}


def check_columns(split: Any, names: list[str], owner: str = "HuggingFace") -> None:
    """Raise ConfigurationError for columns that a split does not have."""
    absent = [name for name in names if name not in split.column_names]
    if absent:
        there = ", ".join(map(repr, split.column_names))
        raise ConfigurationError(
            f"{owner}: there is no column {', '.join(map(repr, absent))}: there are {there}"
        )


def loaded_tokenizer(tokenizer: Any, owner: str = "HuggingFace") -> Any:
    """Return a tokenizer, which may be given by its name or folder.

    Raises:
        ConfigurationError: if it cannot be loaded.
    """
    if not isinstance(tokenizer, str):
        return tokenizer
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ConfigurationError(
            f"{owner}: a tokenizer by name needs transformers: pip install "
            "'fl-lightning[huggingface]'"
        ) from error
    try:
        return AutoTokenizer.from_pretrained(tokenizer)
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"{owner}: the tokenizer {tokenizer!r} cannot be loaded: {error}"
        ) from error


AT_ONCE = 1000  # texts tokenized at a time


@dataclass(frozen=True)
class TextColumns:
    """Tokenized texts, all padded to the length of the longest.

    Args:
        columns: one column, or two for pairs.
        tokenizer: the tokenizer, or its name or folder.
        max_length: largest number of tokens, ≥ 1.
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
        """Tokenize the texts; returns the tokenizer's outputs by name, each of shape (N, length)."""
        tokenizer = loaded_tokenizer(self.tokenizer)
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
        # remove padding that all texts have
        used = whole["attention_mask"].any(0) if "attention_mask" in whole else slice(None)
        return {name: tokens[:, used] for name, tokens in whole.items()}


@dataclass(frozen=True)
class PictureColumn:
    """Images as bytes, shape (N, C, H, W).

    Args:
        column: column of images.
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
        """The column of images."""
        return [self.column]

    def encode(self, split: Any) -> Tensor:
        """Return the images, uint8 of shape (N, C, H, W)."""
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
    """Concatenated columns of numbers, or of lists of numbers.

    Args:
        columns: at least one column.
    """

    columns: list[str]

    def __post_init__(self) -> None:
        if not self.columns:
            raise ConfigurationError("HuggingFace: inputs must name at least one column")

    def encode(self, split: Any) -> Tensor:
        """Return the numbers, float32 of shape (N, F)."""
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
