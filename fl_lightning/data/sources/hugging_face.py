"""Data sources that read data sets of Hugging Face: texts, images and columns of numbers."""

from __future__ import annotations

from abc import ABC
from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from fl_lightning.core.errors import ConfigurationError, check_range
from fl_lightning.data.columns import column_of
from fl_lightning.data.sources.rows import TargetKind, Targets, TensorRows
from fl_lightning.data.sources.source import Loaded, Source

FILES = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}
NAMES = {"val": "validation", "test": "test"}  # default names of splits


class DatasetSource(Source, ABC):
    """Base of the data sources that read a data set of Hugging Face's library ``datasets``.

    Args:
        dataset: a ``Dataset`` or ``DatasetDict``; or a folder written by ``save_to_disk``; or a file
            (``.jsonl``, ``.json``, ``.csv``, ``.parquet``); or a name on the hub, such as
            ``flwrlabs/femnist``, which is downloaded once.
        max_examples: number of examples to read of each split, the first ones; the data set is then
            streamed. An ``IterableDataset`` needs it. None reads all examples.
        tokenizer: tokenizer of the texts: its name or folder, or in Python the tokenizer itself.
        name: configuration of a data set on the hub, e.g. ``sst2`` of ``glue``.
        train: the split to divide among the clients.
        val: the split for validation. None uses the split called validation if there is one, or else
            holds out ``val_fraction`` of the training examples.
        test: the split for the test; None as for ``val``, with ``test_fraction``.
        options: those of `Source`.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        max_examples: int | None = None,
        tokenizer: Any = None,
        name: str | None = None,
        train: str = "train",
        val: str | None = None,
        test: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        check_range(f"{type(self).__name__}: max_examples", max_examples, "at least 1")
        self._dataset, self._name, self._tokenizer = dataset, name, tokenizer
        self._max_examples = max_examples
        self._wanted = {"train": train, "val": val, "test": test}

    def prepare_data(self) -> None:
        """Download a data set from the Hugging Face hub if it is not on the disk."""
        if isinstance(self._dataset, str):
            self._read()

    def splits(self, columns: Sequence[str]) -> dict[str, Any]:
        """Return the data set's splits by purpose: ``train``, and ``val`` and ``test`` if the set has them.

        Args:
            columns: columns that every split must have.

        Raises:
            ConfigurationError: if the data set, a named split or a column is missing, or two purposes
                name the same split.
        """
        found = self._read()
        splits = self._chosen(found) if isinstance(found, dict) else {"train": found}
        if self._max_examples is not None:
            splits = {purpose: self._first(split) for purpose, split in splits.items()}
        for split in splits.values():
            absent = [name for name in columns if name not in split.column_names]
            if absent:
                there = ", ".join(map(repr, split.column_names))
                raise self._error(
                    f"there is no column {', '.join(map(repr, absent))}: the columns are {there}"
                )
        return splits

    @cached_property
    def tokenizer(self) -> Any:
        """Tokenizer of the texts, which is loaded if the option gives its name.

        Raises:
            ConfigurationError: if it cannot be loaded.
        """
        if not isinstance(self._tokenizer, str):
            return self._tokenizer
        try:
            from transformers import AutoTokenizer
        except ImportError as error:
            raise self._error(
                "a tokenizer by name needs transformers: pip install 'fl-lightning[huggingface]'"
            ) from error
        try:
            return AutoTokenizer.from_pretrained(self._tokenizer)
        except (OSError, ValueError) as error:
            raise self._error(
                f"the tokenizer {self._tokenizer!r} cannot be loaded: {error}"
            ) from error

    def _error(self, words: str) -> ConfigurationError:
        return ConfigurationError(f"{type(self).__name__}: {words}")

    def _read(self) -> Any:
        dataset = self._dataset
        try:
            import datasets
        except ImportError as error:
            raise ConfigurationError(
                f"{type(self).__name__} needs datasets: pip install 'fl-lightning[huggingface]'"
            ) from error
        if isinstance(dataset, (datasets.Dataset, datasets.DatasetDict)):
            return dataset
        if isinstance(dataset, (datasets.IterableDataset, datasets.IterableDatasetDict)):
            if self._max_examples is None:
                raise self._error("an iterable data set has no length: set max_examples")
            return dataset
        if not isinstance(dataset, str):
            raise self._error(
                "dataset must be a Dataset, a DatasetDict, a folder, a file or a name on the hub, got "
                f"{type(dataset).__name__}"
            )
        return self._loaded(datasets, dataset)

    def _loaded(self, datasets: Any, dataset: str) -> Any:
        """Load a data set from a folder, from a file, or by its name on the Hugging Face hub."""
        streams = self._max_examples is not None
        kind = FILES.get(Path(dataset).suffix)
        if kind is not None and not Path(dataset).is_file():
            raise self._error(f"there is no file {dataset}")
        try:
            if kind is not None:
                return datasets.load_dataset(kind, data_files=dataset, streaming=streams)
            if Path(dataset).is_dir() and self._name is None:
                return datasets.load_from_disk(dataset)
            return datasets.load_dataset(dataset, self._name, streaming=streams)
        except (OSError, ValueError, RuntimeError) as error:  # OSError: no network
            raise self._error(
                f"{dataset!r} could be loaded neither from the disk nor from the hub: {error}"
            ) from error

    def _first(self, split: Any) -> Any:
        """Return the first ``max_examples`` examples of a split, in memory."""
        import datasets

        assert self._max_examples is not None
        if isinstance(split, datasets.Dataset):
            return split.select(range(min(self._max_examples, len(split))))
        some = split.take(self._max_examples)
        return datasets.Dataset.from_list(list(some), features=some.features)

    def _chosen(self, found: dict[str, Any]) -> dict[str, Any]:
        chosen: dict[str, str] = {}
        for purpose in ("train", "test", "val"):
            given, usual = self._wanted[purpose], NAMES.get(purpose)
            if given is not None and given not in found:
                raise self._error(
                    f"{purpose}: there is no split {given!r}: the splits are {', '.join(map(repr, found))}"
                )
            if given is not None:
                chosen[purpose] = given
            elif usual in found and usual not in self._wanted.values():
                chosen[purpose] = str(usual)
        if len(set(chosen.values())) < len(chosen):
            raise self._error(f"train, val and test must be different splits, got {chosen}")
        return {purpose: found[name] for purpose, name in chosen.items()}


def column(split: Any, name: str) -> Any:
    """Return the values of a split's column, one per example."""
    return split.with_format(None)[name][:]


AT_ONCE = 1000  # texts tokenized at a time


@final
class HuggingFace(DatasetSource):
    """Reads a Hugging Face ``datasets.Dataset`` into memory; any of its columns can define the clients.

    - With ``text`` and a tokenizer, batches are dicts, for models of ``transformers``:
      ``model(**batch).loss``. The target is ``labels``. All texts are padded to the longest.
    - With ``image``, batches are pairs of images (B, C, H, W) in [0, 1] and targets (B,).
    - With ``inputs``, batches are pairs of numbers (B, F) in float32 and targets (B,).

    Args:
        dataset: see `DatasetSource`.
        label: the column to predict.
        text: the column of texts, or two for pairs of texts.
        image: the column of images.
        inputs: columns of numbers, or of lists of numbers.
        max_length: largest number of tokens of a text; longer texts are truncated.
        image_size: height and width to which images are scaled, in pixels; None for images of one size.
        channels: 1 for grey, 3 for colour.
        target_type: whether the label is a ``class`` or a ``number``; if None, class labels, strings
            and up to 100 distinct integers are classes.
        options: those of `DatasetSource`.

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
        max_length: int = 128,
        image_size: int | None = None,
        channels: int = 3,
        target_type: TargetKind | None = None,
        **options: Any,
    ) -> None:
        self._label, self._target_type = label, target_type
        self._text = [text] if isinstance(text, str) else text
        self._image, self._inputs = image, inputs
        self._max_length, self._image_size, self._channels = max_length, image_size, channels
        self._has_tokenizer = options.get("tokenizer") is not None
        super().__init__(dataset, **options)

    @override
    def issues(self) -> Iterator[str]:
        seen = [part for part in (self._text, self._image, self._inputs) if part is not None]
        texts, images, size = self._text, self._image is not None, self._image_size
        broken = {
            "set exactly one of text, image and inputs, to the model's input": len(seen) != 1,
            f"text must be one column, or two for pairs, got {texts}": texts is not None
            and not 1 <= len(texts) <= 2,
            f"max_length must be at least 1 token, got {self._max_length}": texts is not None
            and self._max_length < 1,
            "text needs a tokenizer: its name, e.g. distilbert-base-uncased, a folder, or in Python the "
            "tokenizer itself": texts is not None and not self._has_tokenizer,
            f"channels must be 1 for grey or 3 for colours, got {self._channels}": images
            and self._channels not in (1, 3),
            f"image_size must be at least 1 pixel, got {size}": size is not None and size < 1,
            "inputs must name at least one column": self._inputs == [],
        }
        yield from (words for words, is_broken in broken.items() if is_broken)

    @override
    def load(self) -> Loaded:
        seen = [self._image] if self._image is not None else list(self._text or self._inputs or [])
        splits = self.splits([self._label, *seen])
        kind, names = self._targets(splits["train"])
        rows = {where: self._rows(split, kind, where, seen) for where, split in splits.items()}
        return Loaded(rows["train"], rows.get("val"), rows.get("test"), names)

    def _targets(self, train: Any) -> tuple[Targets, tuple[str, ...]]:
        option = f"HuggingFace: column {self._label!r}"
        names = getattr(train.features[self._label], "names", None)
        if names is not None and self._target_type != "number":  # a ClassLabel
            return Targets(option, np.arange(len(names))), tuple(names)
        values = column_of(column(train, self._label))
        if values.ndim != 1:
            raise ConfigurationError(
                f"{option}: a target must be one value per example, got values of shape "
                f"{values.shape[1:]}: load the data set in Python and use Arrays"
            )
        kind = Targets.of(values, self._target_type, option)
        return kind, kind.class_names

    def _rows(self, split: Any, kind: Targets, where: str, seen: list[str]) -> TensorRows:
        targets = kind.encode(column_of(column(split, self._label)), where)
        columns = {name: partial(column, split, name) for name in split.column_names}
        plain = split.with_format(None)
        if self._text is not None:
            return TensorRows({**self._tokens(plain, self._text), "labels": targets}, columns)
        if self._image is not None:
            return TensorRows([self._pictures(plain, self._image), targets], columns, pixels=True)
        return TensorRows([self._numbers(plain, seen), targets], columns)

    def _tokens(self, texts: Any, names: Sequence[str]) -> dict[str, Tensor]:
        """Tokenize the text columns, and return the tokenizer's outputs by name, each of shape (N, length)."""
        if getattr(self.tokenizer, "pad_token", "") is None:
            raise self._error(
                "the tokenizer has no pad_token, which pads texts to one length: set "
                "tokenizer.pad_token = tokenizer.eos_token and give the tokenizer itself"
            )
        pieces: dict[str, list[Tensor]] = {}
        for start in range(0, max(len(texts), 1), AT_ONCE):
            some = texts[start : start + AT_ONCE]
            made = self.tokenizer(
                *(some[name] for name in names),
                truncation=True,
                max_length=self._max_length,
                padding="max_length",
            )
            for name, values in made.items():
                tokens = torch.tensor(values, dtype=torch.long).reshape(-1, self._max_length)
                pieces.setdefault(name, []).append(tokens)
        whole = {name: torch.cat(parts) for name, parts in pieces.items()}
        # remove padding that all texts have
        used = whole["attention_mask"].any(0) if "attention_mask" in whole else slice(None)
        return {name: tokens[:, used] for name, tokens in whole.items()}

    def _pictures(self, pictures: Any, name: str) -> Tensor:
        """Return a column of images as one tensor, uint8 of shape (N, C, H, W)."""
        pixels: Tensor | None = None
        for place in range(len(pictures)):
            image = self._pixels(pictures[place][name])
            if pixels is None:
                pixels = torch.empty((len(pictures), *image.shape), dtype=torch.uint8)
            if image.shape != pixels.shape[1:]:
                raise self._error(
                    f"images have different sizes, {tuple(pixels.shape[2:])} and "
                    f"{tuple(image.shape[1:])} pixels: set image_size"
                )
            pixels[place] = image
        empty = torch.empty((0, self._channels, 1, 1), dtype=torch.uint8)
        return empty if pixels is None else pixels

    def _pixels(self, image: Any) -> Tensor:
        if not hasattr(image, "convert"):
            raise self._error(
                f"column {self._image!r} must have images, got {type(image).__name__}: "
                "cast it with dataset.cast_column(…, datasets.Image())"
            )
        if image.mode.startswith(("I", "F")):  # Pillow would clip larger numbers to 255
            raise self._error(
                f"column {self._image!r} has images of more than 8 bits per channel (mode {image.mode}): "
                "convert them to 8 bits"
            )
        image = image.convert("L" if self._channels == 1 else "RGB")
        if self._image_size is not None:
            image = image.resize((self._image_size, self._image_size))
        pixels = torch.from_numpy(np.array(image))
        return pixels.unsqueeze(0) if pixels.ndim == 2 else pixels.permute(2, 0, 1)

    def _numbers(self, plain: Any, names: Sequence[str]) -> Tensor:
        """Return columns of numbers as one tensor of features, float32 of shape (N, F)."""
        parts = []
        for name in names:
            try:
                values = column_of(plain[name][:]).astype(np.float32)
            except (TypeError, ValueError) as error:
                raise self._error(
                    f"column {name!r} must have one number per example, or equally many: {error}"
                ) from error
            if not np.isfinite(values).all():
                raise self._error(
                    f"column {name!r} has examples without a finite number: filter these examples out"
                )
            parts.append(values.reshape(len(values), -1))
        return torch.from_numpy(np.concatenate(parts, axis=1))
