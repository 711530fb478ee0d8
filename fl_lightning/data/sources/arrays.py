"""Data source of NumPy arrays and tensors, given in Python or as names in one .npz file."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, final

import numpy as np
from typing_extensions import override

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.data.columns import column_of
from fl_lightning.data.sources.rows import TargetKind, Targets, TensorRows, as_tensor
from fl_lightning.data.sources.source import Loaded, Source


@final
class Arrays(Source):
    """Reads inputs and targets from arrays or tensors with one row per example.

    Floating-point inputs are converted to float32. Targets that are strings become class numbers.
    Targets with several numbers per row, e.g. masks of a segmentation, are unchanged.

    Args:
        inputs: an array or tensor, shape (N, …); or its name in ``file``.
        targets: likewise, shape (N,) or (N, …).
        clients: owner of each example, shape (N,), for `NaturalPartition("clients")`; or its name in
            ``file``; None for no owners.
        file: a .npz file of `numpy.savez`.
        target_type: whether targets of shape (N,) are a ``class`` or a ``number``; if None, real
            numbers are numbers, and strings and up to 100 distinct integers are classes.
        options: those of `Source`.

    Raises:
        ConfigurationError: if a setting is out of range, a file or array is missing, or lengths differ.

    Example:
        >>> data = Arrays(np.eye(10), np.arange(10) % 2, clients=["al", "bo"] * 5, seed=0)
        >>> data.setup()
        >>> len(data.train_set), len(data.val_set), len(data.test_set), data.num_classes
        (7, 1, 2, 2)
        >>> inputs, targets = next(iter(data.train_dataloader()))
        >>> inputs.shape, inputs.dtype, targets.dtype
        (torch.Size([7, 10]), torch.float32, torch.int64)
    """

    def __init__(
        self,
        inputs: Any,
        targets: Any,
        *,
        clients: Any = None,
        file: str | None = None,
        target_type: TargetKind | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self._given = {"inputs": inputs, "targets": targets, "clients": clients}
        self._file, self._target_type = file, target_type

    @override
    def load(self) -> Loaded:
        found = {name: _found(self._file, name, value) for name, value in self._given.items()}
        inputs = as_tensor(found["inputs"], "Arrays: inputs")
        for name in ("targets", "clients"):
            rows = np.shape(found[name])[:1]
            if found[name] is not None and rows != (len(inputs),):
                raise ConfigurationError(
                    f"Arrays: {name} must have {len(inputs)} rows, one per row of inputs, got "
                    f"{rows[0] if rows else 'a single value'}"
                )
        values = column_of(found["targets"])
        if values.ndim == 1:
            kind = Targets.of(values, self._target_type, "Arrays: targets")
            targets, class_names = kind.encode(values, "targets"), kind.class_names
        else:
            targets, class_names = as_tensor(found["targets"], "Arrays: targets"), ()
        owners, columns = found["clients"], {}
        if owners is not None:
            columns["clients"] = partial(column_of, owners)
        return Loaded(TensorRows([inputs, targets], columns), class_names=class_names)


def _found(file: str | None, option: str, value: Any) -> Any:
    """Return an option's array: the array itself, or the one that the option names in the .npz file."""
    if not isinstance(value, str):
        return value
    if file is None:
        raise ConfigurationError(
            f"Arrays: {option} is the name {value!r}, but no file is given: set file to an .npz file, or give "
            "the array itself"
        )
    if not Path(file).is_file():
        raise ConfigurationError(f"Arrays: there is no file {file!r}")
    try:
        with Path(file).open("rb") as opened, np.load(opened, allow_pickle=False) as stored:
            if value not in stored.files:
                raise ConfigurationError(
                    f"Arrays: {file} has no array {value!r} for {option}: its arrays are "
                    f"{', '.join(map(repr, stored.files))}"
                )
            return stored[value]
    except ConfigurationError:
        raise
    except Exception as error:  # of zip, zlib, tokenizer, NumPy, memory: a header may say anything
        raise ConfigurationError(
            f"Arrays: {file} is no .npz file of plain arrays ({error}): write it with numpy.savez"
        ) from error
