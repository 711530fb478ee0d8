"""How far apart the results of two ways to train a client are, and what rounding alone makes.

    difference = ‖found - expected‖ / ‖expected‖

of the update; of buffers and of what a client keeps for itself likewise, by what training changed.

Both ways do the same arithmetic in another order, so that a step differs by some units of rounding.
Measured on digits with a linear model, an MLP, convolutions with and without batch norm and attention,
under SGD (rate 1e-5 to 0.5, with and without momentum), Adam and AdamW, 5, 50 and 200 local steps:

    float32     2e-7 to 1e-5 where training is smooth, after 200 steps as after 5;
                1e-4 with a rate of 1e-5, whose steps the weights themselves round;
                up to 1 and more where training is not (SGD with rate 0.5 and momentum 0.9)
    bf16-mixed  0.01 to 0.1; up to 1 likewise
    float64     1e-16 to 1e-11, with Adam before batch norm 5e-10; up to 0.1 likewise. Logged losses 1e-7

So no bound that grows with the number of steps would be one. `Rounding.share` is about what smooth
training never exceeds (1e-4, 0.1, and 1e-6 in float64, where a step may take its loss in float32), and
beyond it what rounding makes of this client is found by training it from a start that is off by one
rounding, `nudged`. In all cases above the share this made 0.9 to 40 times the difference of both ways.

A check while slots run: some clients are trained one after the other as well.

Whether slots compute what the module does is tried when they are chosen, on one client in one round.
What a module does later, or with other clients' examples, may differ. So clients are drawn (`drawn`),
trained once more from the same model with the same batches, draws and corrections, and the two
results compared: update, buffers, own parameters and logged values, but not torchmetrics objects,
which hold all clients together. Nothing of it remains: the run has the same bits without checks.

A difference larger than rounding usually makes (`Rounding.share`) is looked at more closely: the
client trains twice more, from starts that are off by one rounding. What that makes, times ten, is
explained by rounding; and where it makes a tenth of the whole update or more, training is so unstable
that no digits are left to compare. Else the run stops, before the server steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from fl_lightning.client.log_collector import LogCollector
from fl_lightning.client.work import ClientWork, GroupWork
from fl_lightning.core.errors import ClientFailure, EnginesDiffer
from fl_lightning.core.metric_states import MetricStates, metrics_of
from fl_lightning.core.seeds import preserve_global_generators, torch_generator, uniform_numbers
from fl_lightning.core.update import ClientUpdate, GlobalModel, Updates
from fl_lightning.federation.clients.engine_options import FULL_PRECISIONS

UPDATE = "update"
_HALF = 0.1
# Of what training has changed of a vector, its rounding is at most so small a share of it all.
_LEAST_CHANGE = 0.01


@dataclass(frozen=True)
class Trained:
    """The outcome of training a client.

    Attributes:
        update: its.
        own: what it is to keep for itself, shape (o,).
        own_start: what that was before, shape (o,).
    """

    update: ClientUpdate
    own: Tensor
    own_start: Tensor


@dataclass(frozen=True)
class Rounding:
    """How coarse numbers are.

    Attributes:
        unit: the relative error of one operation, about.
        share: by which an update may differ without a closer look.
    """

    unit: float
    share: float

    @classmethod
    def of(cls, precision: str | int | None, module: nn.Module) -> Rounding:
        """Return that of a module under a Trainer's precision."""
        if precision not in FULL_PRECISIONS:
            return cls(2.0**-8, _HALF)
        floating = [p for p in module.parameters() if p.is_floating_point()]
        fewest_bytes = min(p.itemsize for p in floating)
        if fewest_bytes < 4:  # a frozen part in half precision
            return cls(2.0**-8, _HALF)
        if fewest_bytes == 8:  # a step may still take its loss in float32
            return cls(2.0**-52, 1e-6)
        if _has_coarse_products(floating):
            return cls(2.0**-10, 0.02)
        return cls(2.0**-23, 1e-4)


def _has_coarse_products(params: Sequence[Tensor]) -> bool:
    """Return whether products of float32 may be made with fewer digits (TF32)."""
    try:
        if torch.get_float32_matmul_precision() != "highest":
            return True
        is_allowed = torch.backends.cudnn.allow_tf32
    except RuntimeError:  # PyTorch knows two ways to set it and refuses to read a mixture
        return True
    has_convolutions = any(param.ndim >= 3 for param in params)
    return params[0].device.type == "cuda" and is_allowed and has_convolutions


def differences(
    expected: Trained, found: Trained, start: GlobalModel, num_seen: int
) -> dict[str, float]:
    """Return how far two results are apart, by what it is that differs.

    Args:
        expected: of one way.
        found: of the other.
        start: from which both began.
        num_seen: examples in all batches.

    Returns:
        Shares of the expected one: 0 where nothing differs, infinite where one is missing.
    """
    one, other = expected.update, found.update
    of_vectors = {
        UPDATE: _apart(one.delta, other.delta, torch.zeros_like(one.delta), 0.0),
        "buffers": _apart(one.buffers, other.buffers, start.buffers, _LEAST_CHANGE),
        "personal part": _apart(expected.own, found.own, expected.own_start, _LEAST_CHANGE),
    }
    return of_vectors | _of_metrics(one.metrics, other.metrics, num_seen)


def _apart(one: Tensor, other: Tensor, before: Tensor, least: float) -> float:
    if one.shape != other.shape:
        return math.inf
    gap = float((other - one).norm())
    if gap == 0:
        return 0.0
    changed = float((one - before).norm()) if before.shape == one.shape else 0.0
    return _share(gap, max(changed, least * float(one.norm())))


def _of_metrics(
    one: Mapping[str, Tensor], other: Mapping[str, Tensor], num_seen: int
) -> dict[str, float]:
    """Compare logged values; an example or two may be counted otherwise, at the edge of a class."""
    shares = {}
    for name in sorted({*one, *other}):
        if name not in one or name not in other:
            shares[f"logged {name}"] = math.inf
            continue
        value, second = float(one[name]), float(other[name])
        both_nan = math.isnan(value) and math.isnan(second)
        edge = 0.0 if name == "train/loss" else 2 / num_seen * max(1.0, abs(value))
        gap = 0.0 if value == second or both_nan else abs(second - value)
        shares[f"logged {name}"] = _share(gap - edge, abs(value)) if gap > edge else 0.0
        if math.isnan(gap):
            shares[f"logged {name}"] = math.inf
    return shares


def _share(gap: float, whole: float) -> float:
    share = gap / whole if whole else math.inf
    return share if math.isfinite(share) else math.inf


def nudged(model: GlobalModel, moved: Tensor | None, unit: float, *, seed: int) -> GlobalModel:
    """Return a model whose parameters have moved up or down by one rounding, by coins.

    Where a parameter is 0 or nearly so, by that of an average one or of what it moves in training.

    Args:
        model: as it is.
        moved: by what a client's training moves them, shape (k,); None if that is not known.
        unit: the relative error of one operation.
        seed: of the coins.
    """
    params = model.params
    coins = torch.randint(2, params.shape, generator=torch_generator(seed, "nudge"))
    size = params.square() + params.square().mean()
    if moved is not None:
        size += moved.square().mean()
    up_or_down = (2 * coins - 1).to(params)
    return GlobalModel(params + unit * size.sqrt() * up_or_down, model.buffers)


Result = Trained | ClientFailure
# Trains a client from a model one after the other, without consequences but in the module.
TrainAlone = Callable[[ClientWork, GlobalModel], Trained]
# A single nudge may happen to make less than all roundings of a client's training together.
_MARGIN = 10.0
_NUM_NUDGES = 2
_FAILURE = "failure"


@dataclass
class SpotRate:
    """How many clients in slots are trained both ways: so many that it takes at most 1 % of the time.

    A check takes as long as ``times_faster`` clients in slots.

    Attributes:
        asked: the fraction that the user wants; None for one client in 500, or what takes 1 %.
        times_faster: than one after the other clients train in slots, if that was measured.

    Example:
        >>> SpotRate(None, times_faster=4.6).remark
        ', one client in 460 is trained both ways as a check'
    """

    asked: float | None
    times_faster: float | None = None

    @property
    def fraction(self) -> float:
        """Of all clients in slots, those that are checked."""
        if self.asked is not None:
            return self.asked
        return 0.01 / max(2.0, self.times_faster or 5.0)

    @property
    def remark(self) -> str:
        """How many are checked, for the line that says how clients train."""
        if self.fraction == 0:
            return ", none of them checked (federation.spot_check: 0)"
        if self.fraction == 1:
            return ", every client is trained both ways as a check"
        return f", one client in {1 / self.fraction:.0f} is trained both ways as a check"


def drawn(work: GroupWork, fraction: float) -> GroupWork:
    """Return the clients that are checked: which ones depends on seed, round and client alone.

    With a smaller fraction they are some of those with a larger one.

    Example:
        >>> from fl_lightning.client.work import ClientWork
        >>> work = GroupWork.of([ClientWork(i, 1, torch.tensor([i]), [1]) for i in range(9)])
        >>> [[client.client_id for client in drawn(work, f)] for f in (0.0, 0.3, 0.6)]
        [[], [4], [1, 3, 4, 8]]
    """
    if not fraction or not len(work):
        return work.where(np.zeros(len(work), bool))
    numbers = uniform_numbers(work.root_seed, "spot check", work.rounds, work.client_ids)
    return work.where(numbers < fraction)


class SpotCheck:
    """Checks groups of clients of one fit.

    Args:
        rate: how many clients.
        module: that trains.
        collector: what clients log.
        alone: trains a client again.
        restore: puts a model back into the module.
        precision: of the Trainer.
    """

    def __init__(
        self,
        rate: SpotRate,
        module: nn.Module,
        collector: LogCollector,
        alone: TrainAlone,
        restore: Callable[[GlobalModel], None],
        precision: str | int | None,
    ) -> None:
        self._rate, self._module, self._collector = rate, module, collector
        self._alone, self._restore, self._precision = alone, restore, precision

    def begin(self, work: GroupWork) -> GroupCheck:
        """Draw some of the clients that train in slots now."""
        return GroupCheck(self, drawn(work, self._rate.fraction))

    @property
    def metrics(self) -> MetricStates:
        """The states of the module's torchmetrics objects."""
        return MetricStates(metrics_of(self._module))

    @contextmanager
    def without_trace(self, present: GlobalModel) -> Iterator[None]:
        """Restores module, logs and random streams when the block ends."""
        metrics = self.metrics
        frozen = [p for p in self._module.parameters() if not p.requires_grad]
        values = [p.detach().clone() for p in frozen]
        logs = self._collector
        with preserve_global_generators(), logs.forgetting(), logs.listening_to(self._module):
            try:
                yield
            finally:
                metrics.put_back()
                self._restore(present)
                with torch.no_grad():
                    for param, value in zip(frozen, values, strict=True):
                        param.copy_(value)

    def look(self, work: ClientWork, found: Result, start: GlobalModel) -> None:
        """Train a client again and compare.

        Raises:
            EnginesDiffer: if what was found is something else.
        """
        expected = self._outcome(work, start)
        gaps = _gaps(expected, found, start, len(work.order))
        rounding = Rounding.of(self._precision, self._module)
        limits = dict.fromkeys(gaps, rounding.share)
        for seed in range(_NUM_NUDGES):
            if all(gap <= limits[name] for name, gap in gaps.items()):
                return
            made = self._made_by_rounding(work, expected, start, rounding.unit, seed)
            whole = _MARGIN * made.get(UPDATE, 0.0)
            if whole >= 1:
                return  # there are no digits to compare
            limits = {
                name: max(limit, whole, _MARGIN * made.get(name, 0.0))
                for name, limit in limits.items()
            }
        name = max(gaps, key=lambda name: gaps[name] / limits[name])
        if gaps[name] > limits[name]:
            said = _one_fails(expected, found) or _differ(name, gaps[name], limits[name])
            where = f"round {work.round_index}, client {work.client_id}"
            raise EnginesDiffer(work.client_id, f"{where}: {said}. {_REMEDY}")

    def _made_by_rounding(
        self, work: ClientWork, expected: Result, start: GlobalModel, unit: float, seed: int
    ) -> dict[str, float]:
        """Return how far apart a client's results are from two starts one rounding apart."""
        moved = None if isinstance(expected, ClientFailure) else expected.update.delta
        again = self._outcome(work, nudged(start, moved, unit, seed=seed))
        made = _gaps(expected, again, start, len(work.order))
        # rounding decides whether its numbers are finite
        return {UPDATE: math.inf} if _FAILURE in made else made

    def _outcome(self, work: ClientWork, start: GlobalModel) -> Result:
        try:
            return self._alone(work, start)
        except ClientFailure as failure:
            return failure


class GroupCheck:
    """The clients of one group that are trained both ways.

    Args:
        check: compares.
        work: theirs.
    """

    def __init__(self, check: SpotCheck, work: GroupWork) -> None:
        self._check = check
        self._work = {client.client_id: client for client in work}
        self._found: dict[int, Trained] = {}
        self._metrics = check.metrics if self._work else None

    def note(self, usable: Updates, kept: Mapping[int, Tensor]) -> None:
        """Keep what slots have made of the clients that were drawn.

        Args:
            usable: updates, which have been taken in.
            kept: what clients are to keep for themselves.
        """
        for row, client in enumerate(usable.client_ids if self._work else ()):
            if client in self._work:
                own = kept.get(client, usable.buffers.new_empty(0))
                self._found[client] = Trained(_alone(usable, row), own, own)

    def compare(self, start: GlobalModel, present: GlobalModel) -> None:
        """Train those clients one after the other as well.

        Args:
            start: what they began from.
            present: the global model that the module holds.

        Raises:
            EnginesDiffer: for the first one whose results differ by more than rounding.
        """
        if self._metrics is None:
            return
        try:
            with self._check.without_trace(present):
                for client, found in self._found.items():
                    self._check.look(self._work[client], found, start)
        except BaseException:  # the group's updates do not count, nor what metrics hold of them
            self._metrics.put_back()
            raise


def _alone(group: Updates, row: int) -> ClientUpdate:
    """Return one client's update; of lazy deltas, no other is multiplied out."""
    deltas = group.deltas
    if isinstance(deltas, Tensor):
        delta = deltas[row].clone()
    else:  # a mean of one is itself
        delta = group.buffers.new_zeros(deltas.shape[1], dtype=deltas.dtype)
        deltas.of([row]).fold(delta, [1.0])
    return ClientUpdate(
        group.client_ids[row],
        delta,
        group.buffers[row].clone(),
        group.num_examples[row],
        group.num_steps[row],
        {name: values[row].clone() for name, values in group.metrics.items()},
    )


_REMEDY = (
    "The round does not count: the global model is the one before it. Set federation.engine: "
    "sequential, which runs your training_step as it is. If slots are to be faster again, look for "
    "what the step, or a hook, reads or writes besides tensors (attributes of self, current_epoch, "
    "counters, lists), or does with other examples of the batch; federation.pad_batches: false if its loss is no mean over "
    "examples. Earlier rounds were checked on few "
    "clients only (federation.spot_check): do not trust them before you know the reason."
)


def _gaps(expected: Result, found: Result, start: GlobalModel, num_seen: int) -> dict[str, float]:
    """Return `differences`; an infinite one if one way fails, none if both do."""
    has_failed = [isinstance(result, ClientFailure) for result in (expected, found)]
    if isinstance(expected, ClientFailure) or isinstance(found, ClientFailure):
        return {} if all(has_failed) else {_FAILURE: math.inf}
    return differences(expected, found, start, num_seen)


def _differ(name: str, gap: float, limit: float) -> str:
    return (
        f"trained in slots, its {name} differs by {gap:.1e} of itself from what it is one after the "
        f"other; rounding explains {limit:.1e}"
    )


def _one_fails(expected: Result, found: Result) -> str | None:
    if isinstance(found, ClientFailure):
        return f"it fails in slots, and not one after the other: {found.reason}"
    if isinstance(expected, ClientFailure):
        return f"it fails one after the other, and not in slots: {expected.reason}"
    return None
