"""Data sets of Hugging Face: text, images and columns of numbers."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, final

import numpy as np

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.data.sources.encoded_columns import NumberColumns, PictureColumn, TextColumns
from fl_lightning.data.sources.row_source import LoadedRows, RowSource
from fl_lightning.data.sources.rows import Rows
from fl_lightning.data.sources.targets import TargetKind, Targets, column_of

NAMES = {"val": "validation", "test": "test"}  # of splits, if none is given


@final
class HuggingFace(RowSource):
    """A ``datasets.Dataset``, read into memory; every other column may tell whose an example is.

    - ``text`` and a tokenizer make batches that are dicts, as models of ``transformers`` take them:
      ``model(**batch).loss``. The target is ``labels``. All texts are as long as the longest.
    - ``image`` makes pairs of images (B, C, H, W) in [0, 1] and targets (B,).
    - ``inputs`` makes pairs of numbers (B, F) in float32 and targets (B,).

    Args:
        dataset: a ``Dataset`` or ``DatasetDict``; or a folder that ``save_to_disk`` wrote; or a name on
            the hub, such as ``flwrlabs/femnist``, which is downloaded once.
        label: the column to be predicted.
        text: the column of texts, or two for pairs of texts.
        image: the column of images.
        inputs: columns of numbers, or of lists of numbers.
        tokenizer: of the texts; the name or folder of one, or in Python the tokenizer itself.
        max_length: longest text, in tokens; what is longer is cut off.
        image_size: height and width to which images are scaled, in pixels; None for images of one size.
        channels: 1 for grey, 3 for colours.
        name: which configuration of a data set on the hub, e.g. ``sst2`` of ``glue``.
        train: the split that clients share.
        val: the split for validation. None takes the split called validation where there is one, and
            holds ``val_fraction`` of the training examples out where there is none.
        test: the same for the test.
        target_type: whether the label is a ``class`` or a ``number``; None lets the data set decide:
            class labels, strings and up to 100 different whole numbers are classes.
        batch_size: examples a batch; the last batch of a pass may be smaller.
        val_fraction: part of the training examples held out for validation, in [0, 1).
        test_fraction: part of the training examples held out for the test, in [0, 1).
        seed: decides which examples are held out and the order of central training. None takes the
            run's seed.

    Raises:
        ConfigurationError: for a setting out of range, and at `setup` for a data set, split or column
            that is not there.
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
        batch_size: int = 32,
        val_fraction: float = 0.1,
        test_fraction: float = 0.2,
        seed: int | None = None,
    ) -> None:
        super().__init__(
            batch_size=batch_size, val_fraction=val_fraction, test_fraction=test_fraction, seed=seed
        )
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
        """Download a data set of the hub that is not there yet."""
        if isinstance(self._dataset, str):
            _read(self._dataset, self._name)

    def load(self) -> LoadedRows:
        """Read and encode the splits.

        Raises:
            ConfigurationError: for a data set, split or column that is not there.
        """
        found = _read(self._dataset, self._name)
        splits = _chosen(found, self._splits) if isinstance(found, dict) else {"train": found}
        train = splits["train"]
        for split in splits.values():
            _check_columns(split, [self._label, *self._encoder.columns])
        kind, names = self._targets(train)
        rows = {where: self._rows(split, kind, where) for where, split in splits.items()}
        return LoadedRows(rows["train"], rows.get("val"), rows.get("test"), names)

    def _targets(self, train: Any) -> tuple[Targets, tuple[str, ...]]:
        option = f"HuggingFace: column {self._label!r}"
        names = getattr(train.features[self._label], "names", None)
        if names is not None:  # a ClassLabel: numbers of names that it knows
            return Targets(option, np.arange(len(names))), tuple(names)
        values = column_of(_column(train, self._label))
        if values.ndim != 1:
            raise ConfigurationError(
                f"{option}: a target must be one value an example, got values of shape "
                f"{values.shape[1:]}: read the data set yourself and use Arrays"
            )
        kind = Targets.of(values, self._target_type, option)
        return kind, kind.class_names

    def _rows(self, split: Any, kind: Targets, where: str) -> Rows:
        targets = kind.encode(column_of(_column(split, self._label)), where)
        used = set(self._encoder.columns)
        columns = {
            name: partial(_column, split, name) for name in split.column_names if name not in used
        }
        encoded = self._encoder.encode(split)
        if isinstance(encoded, dict):
            return Rows({**encoded, "labels": targets}, columns)
        return Rows([encoded, targets], columns, pixels=isinstance(self._encoder, PictureColumn))


def _column(split: Any, name: str) -> Any:
    return split.with_format(None)[name][:]


def _read(dataset: Any, name: str | None) -> Any:
    """Return a Dataset or DatasetDict."""
    try:
        import datasets
    except ImportError as error:
        raise ConfigurationError(
            "HuggingFace needs datasets: pip install 'fl-lightning[huggingface]'"
        ) from error
    if isinstance(dataset, (datasets.Dataset, datasets.DatasetDict)):
        return dataset
    if not isinstance(dataset, str):
        raise ConfigurationError(
            "HuggingFace: dataset must be a Dataset, a DatasetDict, a folder or a name on the hub, got "
            f"{type(dataset).__name__}"
        )
    try:
        if Path(dataset).is_dir() and name is None:
            return datasets.load_from_disk(dataset)
        return datasets.load_dataset(dataset, name)
    except (OSError, ValueError, RuntimeError) as error:  # OSError: no network
        raise ConfigurationError(
            f"HuggingFace: {dataset!r} is no folder of save_to_disk, and cannot be had from the hub: "
            f"{error}"
        ) from error


def _chosen(found: Any, wanted: dict[str, str | None]) -> dict[str, Any]:
    """Return the splits that are there, each for one purpose."""
    chosen: dict[str, str] = {}
    for purpose in ("train", "test", "val"):
        given = wanted[purpose]
        if given is not None and given not in found:
            raise ConfigurationError(
                f"HuggingFace: {purpose} is the split {given!r}: there are "
                f"{', '.join(map(repr, found))}"
            )
        usual = NAMES.get(purpose)
        if given is not None:
            chosen[purpose] = given
        elif usual in found and usual not in wanted.values():
            chosen[purpose] = str(usual)
    if len(set(chosen.values())) < len(chosen):
        raise ConfigurationError(
            f"HuggingFace: train, val and test must be different splits, got {chosen}"
        )
    return {purpose: found[name] for purpose, name in chosen.items()}


def _check_columns(split: Any, names: list[str]) -> None:
    absent = [name for name in names if name not in split.column_names]
    if absent:
        there = ", ".join(map(repr, split.column_names))
        raise ConfigurationError(
            f"HuggingFace: there is no column {', '.join(map(repr, absent))}: there are {there}"
        )
