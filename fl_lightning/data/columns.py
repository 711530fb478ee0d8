"""Columns: one value per example, e.g. its label or its owner; and conversion of labels to classes.

A column is given by

    a name         name of an attribute of the data set, of a column, or of a key of its items
    a function     function of the data set, or its import path
    values         a list, array or tensor

A name is looked up through any `Subset` and `ConcatDataset`. All examples are loaded only if the name is
a key of the items, or if no name is given and the data set has none of the usual ones.

Labels become classes as follows:

    one-hot rows               the index of the 1
    0.0 and 1.0                0 and 1, the targets of binary losses
    real numbers, n bins       how many of the quantiles 1/n, 2/n, … are at most the number
    strings, integers          unchanged; partitions sort them

Other real numbers are no classes: they are rejected if classes are needed, even if they are integral,
like ages and counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from importlib import import_module
from typing import Any, ClassVar, TypeAlias, final

import numpy as np
import numpy.typing as npt
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from fl_lightning.core.errors import ConfigurationError, Ranged

# the command line tries these types in turn; in Python also an array or tensor
Column: TypeAlias = str | list[Any] | Callable[[Any], Any]

LABEL_NAMES = ("targets", "labels", "y", "target", "label")  # tried in this order, without a column
_LABEL_POSITION = 1  # of an item that is a tuple


def read_column(
    dataset: Dataset[Any], column: Column | None, option: str = "data.labels"
) -> npt.NDArray[Any]:
    """Return a column of a data set (one value per example), if possible without loading the examples.

    Args:
        dataset: map-style data set.
        column: source of the values, or the values. None reads labels: the attribute called ``targets``,
            ``labels``, ``y``, ``target`` or ``label``, the last tensor of a tensor data set, or else
            the second part of every item.
        option: name of the option, for errors.

    Returns:
        Shape (N,), or (N, C) if an example has several numbers.

    Raises:
        ConfigurationError: if there is no such column, or not one value per example.

    Example:
        >>> read_column([{"x": 0.5, "writer": "bo"}, {"x": 0.7, "writer": "al"}], "writer")
        array(['bo', 'al'], dtype='<U2')
    """
    if isinstance(column, str) or column is None:
        stored = _stored(dataset, column, option)
        if stored is not None:
            return stored
        function = _imported(column)
        if function is None:
            return _of_items(dataset, column, option)
        column = function
    count = len(dataset)  # type: ignore[arg-type]
    values = _on_the_host(column(dataset) if callable(column) else column, option)
    if len(values) != count:
        raise ConfigurationError(
            f"{option}: {type(dataset).__name__} has {count} examples, got {len(values)} values: "
            "give one value per example"
        )
    return values


def name_of(column: Column) -> str:
    """Return a column's name as error messages show it, e.g. in quotes, or the name of a function."""
    if isinstance(column, str):
        return repr(column)
    return getattr(column, "__name__", "a function") if callable(column) else "the values given"


def _imported(name: str | None) -> Callable[[Any], Any] | None:
    """Return the function that an import path such as ``my.module.function`` names; None if it names none."""
    module, _, function = (name or "").rpartition(".")
    try:
        found = getattr(import_module(module), function, None) if module else None
    except (ImportError, TypeError):  # TypeError: a name that begins with a dot
        return None
    return found if callable(found) else None


def _stored(dataset: Any, name: str | None, option: str) -> npt.NDArray[Any] | None:
    """Return the values that a data set stores under a name, without loading examples; None if it stores none."""
    for each in LABEL_NAMES if name is None else (name,):
        if (values := _own(dataset, each)) is not None:
            return _on_the_host(values, option)
    if isinstance(dataset, Subset):
        inner = _stored(dataset.dataset, name, option)
        return None if inner is None else inner[np.asarray(dataset.indices, np.int64)]
    if isinstance(dataset, ConcatDataset):
        return _joined([_stored(part, name, option) for part in dataset.datasets], option)
    if isinstance(dataset, TensorDataset) and name is None:
        return _on_the_host(dataset.tensors[-1], option)
    return None


def _own(dataset: Any, name: str) -> Any:
    """Return a data set's own column or attribute of this name; None if it lacks one value per example."""
    if name in (getattr(dataset, "column_names", None) or ()):
        # a format may transform whole rows, for which one column is not enough
        plain = dataset.with_format(None) if hasattr(dataset, "with_format") else dataset
        return plain[name]
    values: Any = getattr(dataset, name, None)
    # an attribute of another length is something else, e.g. names of classes, or belongs to a whole set
    is_column = hasattr(values, "__len__") and not isinstance(values, (str, Mapping))
    return values if is_column and np.ndim(values) and len(values) == len(dataset) else None


def _joined(parts: Sequence[npt.NDArray[Any] | None], option: str) -> npt.NDArray[Any] | None:
    found = [part for part in parts if part is not None]
    if len(found) < len(parts):
        return None
    if len({(part.shape[1:], part.dtype.kind) for part in found}) > 1:
        kinds = ", ".join(f"{part.dtype} of shape {part.shape}" for part in found)
        raise ConfigurationError(
            f"{option}: the parts of the ConcatDataset have different kinds of values, {kinds}: give a "
            "function of the data set that returns values of one kind"
        )
    return np.concatenate(found)


def _of_items(dataset: Any, name: str | None, option: str) -> npt.NDArray[Any]:
    """Load all examples, and return one part of each, e.g. its label."""
    values: list[Any] = []
    try:
        for index in range(len(dataset)):
            value = np.asarray(_part(dataset[index], name))
            if value.ndim > 1:
                raise TypeError(f"an array of shape {value.shape}")
            values.append(value[()])  # a scalar as such, so that a missing one is seen
    except (TypeError, ValueError, LookupError, StopIteration) as error:
        raise ConfigurationError(_refusal(dataset, name, option)) from error
    return _on_the_host(values, option)


def _part(item: Any, name: str | None) -> Any:
    names = LABEL_NAMES if name is None else (name,)
    if isinstance(item, Mapping):
        return item[next(each for each in names if each in item)]
    if name is None and not is_dataclass(item):
        return item[_LABEL_POSITION]
    return getattr(item, next(each for each in names if hasattr(item, each)))


def _refusal(dataset: Any, name: str | None, option: str) -> str:
    what = type(dataset).__name__
    there = list(getattr(dataset, "column_names", None) or ())
    first = dataset[0] if len(dataset) else None
    if not there and isinstance(first, Mapping):
        there = list(first)
    has = f" (there are {', '.join(map(repr, there))})" if there else ""
    if name is not None:
        return (
            f"{option}: {what} has no attribute {name!r} with one value per example, nor such a column "
            f"or key of its items{has}: give another name, a function of the data set, or the values"
        )
    return (
        f"data.labels: no labels were found in {what}{has}: set it to the attribute, column or key of its "
        "items that has one label per example, as in FederatedDataModule(labels='…'), or to a function of "
        "the data set, or to the labels"
    )


_MOST_WORDS = 20_000  # the most frequent ones; a topic has a number for each


@final
@dataclass(frozen=True)
class Topics(Ranged):
    """Assigns each text to a topic by k-means on TF-IDF vectors; topics can serve as labels or as clients.

        topic of d = argmin_k ‖x_d - c_k‖²,    x_d = v_d / ‖v_d‖
        v_dw = (1 + ln n_dw) (1 + ln((1 + N) / (1 + N_w)))

    Word w occurs n_dw > 0 times in text d and in N_w of the N texts; c_k is the mean of topic k.
    ``NaturalPartition(Topics("question", 8))`` makes a client of each topic; as ``labels``, with
    `DirichletPerClient`, they give each client its own mix of topics.

    Source: Lin et al. 2022, *FedNLP* (2104.08815), whose clients are k-means clusters of texts.
    Differs: TF-IDF vectors instead of sentence embeddings, which need a model of the language.

    Args:
        text: column of the texts, in a language that separates its words.
        num_topics: number of topics, ≥ 2.
        seed: seed of the first means.

    Raises:
        ConfigurationError: if ``num_topics`` is out of range, or there are fewer texts, or no words.

    Example:
        >>> texts = ["red green", "two three", "green red blue", "one three two"]
        >>> topics = Topics("text", 2)([{"text": text} for text in texts])
        >>> bool(topics[0] == topics[2] != topics[1] == topics[3])
        True
    """

    ranges: ClassVar[dict[str, str]] = {"num_topics": "at least 2"}

    text: str
    num_topics: int
    seed: int = 0

    def __call__(self, dataset: Dataset[Any]) -> npt.NDArray[np.int64]:
        """Return the topic of each example, int64 of shape (N,)."""
        from sklearn.cluster import KMeans  # two seconds to import
        from sklearn.feature_extraction.text import TfidfVectorizer
        from threadpoolctl import threadpool_limits  # of scikit-learn

        texts = read_column(dataset, self.text, "Topics: text").astype(str)
        try:
            words = TfidfVectorizer(sublinear_tf=True, max_features=_MOST_WORDS)
            vectors = words.fit_transform(texts)
            # several threads would add numbers up in another order in each process
            with threadpool_limits(1):
                means = KMeans(self.num_topics, n_init=4, random_state=self.seed).fit(vectors)
        except ValueError as error:
            raise ConfigurationError(
                f"Topics: no {self.num_topics} topics can be found in the {len(texts)} texts of "
                f"{self.text!r}: {error}"
            ) from error
        topics: npt.NDArray[np.int64] = means.labels_.astype(np.int64)
        return topics


def column_of(values: Any) -> npt.NDArray[Any]:
    """Convert a column to an array of numbers or strings, or of objects if values are missing.

    Example:
        >>> column_of(["b", "a"]), column_of([1, 2])
        (array(['b', 'a'], dtype='<U1'), array([1, 2]))
    """
    if isinstance(values, Tensor):
        values = values.detach().cpu()
    if isinstance(values, (list, tuple)) and any(map(is_missing, values)):
        return np.array(values, dtype=object)
    array = np.asarray(values)
    if array.dtype == object and not any(map(is_missing, array.ravel())):  # e.g. strings in a table
        array = np.asarray(array.tolist())
    return array


def is_missing(value: Any) -> bool:
    """Return whether a value is missing: None, nan, infinite, or a missing value of pandas or NumPy."""
    if isinstance(value, (float, np.floating)):
        return not np.isfinite(value)
    if isinstance(value, (np.datetime64, np.timedelta64)):
        return bool(np.isnat(value))
    return value is None or type(value).__name__ in ("NAType", "NaTType")


def _on_the_host(values: Any, option: str) -> npt.NDArray[Any]:
    if not hasattr(values, "__array__") and not isinstance(values, (str, bytes)):
        values = list(values)
    try:
        array = column_of(values)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"{option}: values must all have the same shape: {error}"
        ) from error
    if array.dtype.kind in "OmM" and (missing := sum(map(is_missing, array.ravel()))):
        raise ConfigurationError(
            f"{option}: {missing} of {len(array)} values are missing (None or nan): leave these "
            "examples out of the data, or give them a value"
        )
    if not array.ndim or array.dtype.kind not in "biufSUMm":
        kinds = sorted({type(value).__name__ for value in np.atleast_1d(array).ravel()[:1000]})
        raise ConfigurationError(
            f"{option}: values must be numbers or strings, one per example, got {', '.join(kinds)}"
        )
    return array


def as_labels(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Convert one-hot rows to class numbers, and labels 0.0 and 1.0 to integers; other labels are unchanged.

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
    """Return whether labels, shape (N, …), are one class per example, unlike vectors or real numbers."""
    return labels.ndim == 1 and as_labels(labels).dtype.kind != "f"


def classes_of(
    labels: npt.NDArray[Any], rule: str
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return each example's class number, in the order of the sorted labels, and each class's number of examples.

    Raises:
        ConfigurationError: if labels are real numbers; ``rule`` is the name of the partition that needs classes.

    Example:
        >>> classes_of(np.array(["cat", "ant", "cat"]), "LabelShards")
        (array([1, 0, 1]), array([1, 2]))
    """
    if not are_classes(labels):
        different = np.unique(labels)
        raise ConfigurationError(
            f"{rule} divides by class, and the labels are {len(different)} different real numbers from "
            f"{different[0]:g} to {different[-1]:g}: set data.bins, e.g. to 10, to divide by their "
            "quantiles; or if they are classes, set data.labels to whole numbers (int)"
        )
    _, classes, sizes = np.unique(as_labels(labels), return_inverse=True, return_counts=True)
    return classes, sizes


def quantile_bins(labels: npt.NDArray[Any], bins: int) -> npt.NDArray[np.int64]:
    """Put labels into ``bins`` equally large bins, and return each label's bin, in [0, bins); equal labels share one.

    A number at an edge, which is a quantile, is in the upper bin.

    Raises:
        ConfigurationError: if labels are not finite numbers of shape (N,).

    Example:
        >>> quantile_bins(np.array([0.3, 9.0, 0.1, 1.5]), 2)
        array([0, 1, 0, 1])
        >>> quantile_bins(np.array([1, 2, 2, 3]), 2)  # the edge is 2
        array([0, 1, 1, 1])
    """
    if labels.ndim != 1 or labels.dtype.kind not in "biuf" or not np.isfinite(labels).all():
        raise ConfigurationError(
            f"data.bins needs one finite number per example as label, got labels of type {labels.dtype} and "
            f"shape {labels.shape}: leave bins out, or set data.labels to other labels"
        )
    numbers = labels.astype(np.float64)
    edges = np.quantile(numbers, np.arange(1, bins) / bins)
    return np.searchsorted(edges, numbers, side="right").astype(np.int64)
