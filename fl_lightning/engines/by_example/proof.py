"""A proof that a training step may be evaluated example by example, read off two of its runs.

    L(batch) = 1/B Σ_i l(example i),     and so are its gradient and all that it logs

Only then may a batch be split into examples, or padded with examples of weight 0. A run is a program
of straight lines (`Record`). The proof follows the batch's axis through the program of one batch: examples
stay apart, and what leaves them is a sum over all of them, divided by their number, see `RULES`. The program
of another batch must be the same but for the number of examples: what Python does with that number shows.

Each rule is exact; what has no rule counts as mixing examples. So nothing is proved that is wrong, and
some of what is right is not proved.

Example:
    >>> import torch
    >>> def run(size, loss):
    ...     examples = torch.ones(size, 3)
    ...     with Recorder(size, [examples]) as recorder:
    ...         output = recorder.source(loss(examples))
    ...         recorder.record.outputs["loss"] = output
    ...     return recorder.record
    >>> reason_against(run(4, torch.mean), run(1, torch.mean))
    >>> reason_against(run(4, torch.sum), run(1, torch.sum))
    'its loss is a sum over the batch, no mean'
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import zip_longest
from math import prod
from typing import Any

from torch import Tensor

from fl_lightning.client.state import same_numbers, same_value
from fl_lightning.engines.by_example import shape_rules
from fl_lightning.engines.by_example.kinds import ALIKE, ONE_EACH, Kind, mixed, rows
from fl_lightning.engines.by_example.record import Call, Record, Recorder, Source
from fl_lightning.engines.by_example.rules import RULES, short_name
from fl_lightning.engines.by_example.seen import Differs, Seen, degree_of

__all__ = ["Recorder", "reason_against"]

# Outputs whose names begin so are rows an example, or means
GIVEN = "given"
# Ask a tensor for a number
# Take nothing of a tensor but its shape and type
_ONLY_SHAPES = "zeros", "ones", "empty", "full", "new_", "rand"
_ASKING = {"_local_scalar_dense", "is_nonzero", "equal", "item", "nonzero", "_assert_async"}


def reason_against(record: Record, other: Record, *, same_size: bool = False) -> str | None:
    """Return why a step is not proved to be a mean over examples; None if it is.

    Args:
        record: of a run on B ≥ 2 examples.
        other: of a run on another number of examples, on the same parameters.
        same_size: both are of the same batch; all that is asked is whether they are one program.
    """
    try:
        if same_size:
            _Pairs(record, other, {}).check_all()
            return None
        kinds = _followed(record, other)
        for name, source in record.outputs.items():
            if (source is None) != (other.outputs.get(name) is None):
                return f"{name} is there for some sizes of a batch only"
            if source is not None and (reason := _reason(name, source, kinds)):
                return reason
    except Differs as difference:
        return str(difference)
    return None


def _reason(name: str, source: Source, kinds: dict[int, Kind]) -> str | None:
    kind = kinds[source.number]
    if kind.is_mean:
        return None
    is_row = kind.is_plain and kind.name == "rows" and (kind.axis, kind.layout) == (0, ONE_EACH)
    if name.startswith(GIVEN) and is_row:
        return None
    if kind.name == "mixed":
        return kind.why
    if kind.name == "rows":
        return f"its {name} has a row for each example"
    if kind.name == "total" and kind.degree == 0:
        return f"its {name} is a sum over the batch, no mean"
    return f"its {name} depends on the size of the batch"


def _followed(record: Record, other: Record) -> dict[int, Kind]:
    """Return the kinds of all tensors.

    Raises:
        Differs: if the other run is another program.
    """
    kinds = {n: _kind_of_given(given, record.size) for n, given in record.given.items()}
    pairs = _Pairs(record, other, kinds)
    pairs.check_all(lambda call, twin: _follow(call, twin, record, other, kinds))
    return kinds


def _kind_of_given(given: tuple[str, Tensor], size: int) -> Kind:
    where, tensor = given
    if where != "batch":
        return ALIKE
    is_row = tensor.shape[:1] == (size,)
    return rows(0) if is_row else mixed("its batches have a part without a row for each example")


def _follow(call: Call, twin: Call, record: Record, other: Record, kinds: dict[int, Kind]) -> None:
    seen = Seen(call, twin, record.size, other.size, kinds)
    short = short_name(call.name)
    if short in _ASKING:
        raise Differs("training_step asks a tensor for its numbers")
    found = _kinds_of(seen, short) if any(r is not None for r in call.results) else []
    for source, twin_source, kind in zip(call.results, twin.results, found, strict=False):
        if source is not None and twin_source is not None:
            kinds[source.number] = _fitting(kind, source, twin_source, seen)
    for source in call.written:
        storage = record.aliases[source.number]
        for number in [n for n in kinds if record.aliases[n] == storage]:
            if number != source.number:
                kinds[number] = mixed("it writes into a tensor of which it uses another part")
        kinds.setdefault(source.number, mixed(f"{short} writes to its arguments"))


def _kinds_of(seen: Seen, short: str) -> list[Kind]:
    rule, count = RULES.get(short), len(seen.call.results)
    arguments = [s for s in _sources(list(seen.call.arguments.values())) if isinstance(s, Source)]
    kinds = [seen.kinds[s.number] for s in arguments]
    bad = next((kind for kind in kinds if kind.name == "mixed"), None)
    if bad is not None and not short.startswith(_ONLY_SHAPES):
        return [bad] * count
    has_batch = any(kind.name != "alike" or kind.degree not in (0, None) for kind in kinds)
    if rule is None or (has_batch and _has_other_numbers(seen, short)):
        if rule is None and not has_batch and not _has_other_numbers(seen, short):
            return [ALIKE] * count  # of nothing but what all examples have
        return [mixed(f"what {short} does with a batch is not known")] * count
    found = rule(seen)
    return found if isinstance(found, list) else [found] * count


def _has_other_numbers(seen: Seen, short: str) -> bool:
    """Return whether its numbers depend on the size in a way that its rule does not look at."""
    if short in shape_rules.SHAPES:
        return False
    looked_at = {"other", "self", "value", "fill_value", "s", "alpha", "beta", "p", "mean", "std"}
    return any(
        _differ(value, seen.other.arguments.get(name))
        for name, value in seen.call.arguments.items()
        if name not in looked_at
    )


def _differ(value: Any, other: Any) -> bool:
    if isinstance(value, Source):
        return False
    if isinstance(value, list) and isinstance(other, list):
        return len(value) != len(other) or any(map(_differ, value, other))
    return not same_value(value, other)


def _sources(value: Any) -> list[Any]:
    if isinstance(value, list):
        return [leaf for part in value for leaf in _sources(part)]
    return [value]


def _fitting(kind: Kind, source: Source, twin: Source, seen: Seen) -> Kind:
    """Return the kind if the other run's tensor has the shape that goes with it."""
    if kind.name == "mixed":
        return kind
    expected = list(source.shape)
    if kind.name == "rows":
        if not expected or expected[kind.axis] != seen.size * prod(kind.layout):
            return mixed("examples of a batch meet")  # a rule that was lost
        expected[kind.axis] = seen.other_size * prod(kind.layout)
    if tuple(expected) != twin.shape:
        return mixed("a tensor's shape depends on the size of the batch in an unknown way")
    return kind


class _Pairs:
    """Which tensors of two runs are the same place in one program.

    Args:
        record: a run.
        other: the other one.
        kinds: of the first run's tensors; of a number that no operator has made, this finds its own.
    """

    def __init__(self, record: Record, other: Record, kinds: dict[int, Kind]) -> None:
        self._record, self._other, self._kinds = record, other, kinds
        batch = [n for n, (where, _) in record.given.items() if where == "batch"]
        self._twin = {number: number for number in batch}  # they come first, in their order

    def check_all(self, follow: Callable[[Call, Call], None] | None = None) -> None:
        """Go through both runs, call by call.

        Args:
            follow: does something with each pair, once it is known to be one.

        Raises:
            Differs: if they are not one program.
        """
        for call, twin in zip_longest(self._record.calls, self._other.calls):
            if call is None or twin is None or call.name != twin.name:
                raise self._differs(call, twin)
            self._check(call, twin)
            if follow is not None:
                follow(call, twin)
        for name, source in self._record.outputs.items():
            twin_source = self._other.outputs.get(name)
            if source is not None and twin_source is not None:
                self._check_source(source, twin_source)

    def _check(self, call: Call, twin: Call) -> None:
        """Check where arguments come from, and note what comes out."""
        one = _sources(list(call.arguments.values()))
        two = _sources(list(twin.arguments.values()))
        kinds = [isinstance(value, Source) for value in one]
        same = kinds == [isinstance(value, Source) for value in two]
        if list(call.arguments) != list(twin.arguments) or not same:
            raise self._differs(call, twin)
        for source, twin_source in zip(one, two, strict=True):
            if isinstance(source, Source):
                self._check_source(source, twin_source)
            elif self._record.size == self._other.size and _differ(source, twin_source):
                raise self._differs(call, twin)
        made = zip([*call.results, *call.written], [*twin.results, *twin.written], strict=True)
        for source, twin_source in made:
            if source is not None and twin_source is not None:
                self._twin[source.number] = twin_source.number

    def _check_source(self, source: Source, twin: Source) -> None:
        if source.number not in self._twin and source.number in self._record.given:
            self._check_given(source.number, twin.number)
            self._twin[source.number] = twin.number
        if self._twin.get(source.number) != twin.number:
            raise self._differs(None, None)

    def _check_given(self, number: int, twin: int) -> None:
        """Check that a tensor that no operator has made is the same in both runs."""
        one, two = self._record.given[number][1], self._other.given[twin][1]
        if one is two or (
            one.shape == two.shape and one.dtype == two.dtype and same_numbers(one, two)
        ):
            return
        if self._record.size == self._other.size or not one.numel() == two.numel() == 1:
            raise self._differs(None, None)
        sizes = self._record.size, self._other.size
        self._kinds[number] = ALIKE.times(degree_of(one.item(), two.item(), *sizes))

    def _differs(self, call: Call | None, twin: Call | None) -> Differs:
        size, other = self._record.size, self._other.size
        if call is twin:
            return Differs(
                f"training_step does other things with {other} examples than with {size}"
            )
        names = [short_name(c.name) if c is not None else "nothing" for c in (twin, call)]
        return Differs(
            f"training_step does other things with {other} examples than with {size} "
            f"({names[0]} instead of {names[1]})"
        )
