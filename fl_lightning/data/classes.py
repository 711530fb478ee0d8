"""From labels as data sets have them to classes.

    one-hot rows               the place of the 1
    0.0 and 1.0                0 and 1, as binary losses have their targets
    real numbers, n bins       how many of the quantiles 1/n, 2/n, … are at most the number
    strings, whole numbers     themselves; partitions sort them

Other real numbers are no classes: they are refused where classes are needed, even if they are whole,
as ages and counts are.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from fl_lightning.core.errors import ConfigurationError


def as_labels(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return one label per example where it is plain which one is meant, else the values.

    Args:
        values: shape (N,), (N, 1) or (N, C).

    Example:
        >>> as_labels(np.array([[0.0, 1.0, 0.0], [0.0, 0.0, 1.0]])), as_labels(np.array([1.0, 0.0]))
        (array([1, 2]), array([1, 0]))
        >>> as_labels(np.array([[25.0], [31.0]]))
        array([25., 31.])
    """
    if values.ndim == 2 and values.shape[1] == 1:
        values = values[:, 0]
    if values.dtype.kind not in "biuf" or not np.isin(values, (0, 1)).all():
        return values
    if values.ndim == 2 and (values.sum(axis=1) == 1).all():
        places: npt.NDArray[Any] = np.argmax(values, axis=1)
        return places
    return values.astype(np.int64) if values.ndim == 1 and values.dtype.kind == "f" else values


def are_classes(labels: npt.NDArray[Any]) -> bool:
    """Return whether labels, shape (N, …), are one class per example."""
    return labels.ndim == 1 and as_labels(labels).dtype.kind != "f"


def classes_of(
    labels: npt.NDArray[Any], rule: str
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the class of every example, in [0, C), in the labels' order, and the classes' sizes.

    Args:
        labels: shape (N,).
        rule: which partition asks.

    Raises:
        ConfigurationError: for real numbers.

    Example:
        >>> classes_of(np.array(["cat", "ant", "cat"]), "LabelShards")
        (array([1, 0, 1]), array([1, 2]))
    """
    if not are_classes(labels):
        different = np.unique(labels)
        raise ConfigurationError(
            f"{rule} divides by class, and the labels are {len(different)} different real numbers from "
            f"{different[0]:g} to {different[-1]:g}: set data.bins, e.g. to 10, to divide by their "
            "quantiles, or, where they are classes, give whole numbers (int) with data.labels"
        )
    _, classes, sizes = np.unique(as_labels(labels), return_inverse=True, return_counts=True)
    return classes, sizes


def quantile_bins(labels: npt.NDArray[Any], bins: int) -> npt.NDArray[np.int64]:
    """Return the bin of every number, in [0, bins), the bins being equally full but for ties.

    Args:
        labels: shape (N,).
        bins: how many, ≥ 2.

    Raises:
        ConfigurationError: for labels that are no numbers.

    Example:
        >>> quantile_bins(np.array([0.3, 9.0, 0.1, 1.5]), 2)
        array([0, 1, 0, 1])
    """
    if labels.ndim != 1 or labels.dtype.kind not in "biuf" or not np.isfinite(labels).all():
        raise ConfigurationError(
            f"data.bins divides one finite number per example, got labels of type {labels.dtype} and "
            f"shape {labels.shape}: leave bins out, or name other labels with data.labels"
        )
    numbers = labels.astype(np.float64)
    edges = np.quantile(numbers, np.arange(1, bins) / bins)
    return np.searchsorted(edges, numbers, side="right").astype(np.int64)
