"""Spot check: some clients that train in slots are trained sequentially as well, and the results compared.

When slots are chosen, one client in one round has shown that slots compute what the module does. A module may
act differently later, or on other examples. So randomly drawn clients (`drawn`) train once more from the
same model, with the same batches, draws and corrections. Update, buffers, personal tensors and logged values
are compared, but not torchmetrics objects, which pool all clients. The check changes nothing: the run is
bit-identical without it.

    difference = ‖found - expected‖ / ‖expected‖

for the update; buffers and personal tensors are compared by their change in training. Both engines do
the same arithmetic in another order, so that a step differs by some units of rounding. Measured on
digits with a linear model, an MLP, convolutions with and without batch norm and attention, under SGD
(rate 1e-5 to 0.5, with and without momentum), Adam and AdamW, 5, 50 and 200 local steps:

    float32     2e-7 to 1e-5 where training is smooth, after 200 steps as after 5;
                1e-4 with a rate of 1e-5, whose steps the weights themselves round;
                up to 1 and more where training is not (SGD with rate 0.5 and momentum 0.9)
    bf16-mixed  0.01 to 0.1; up to 1 likewise
    float64     1e-16 to 1e-11, with Adam before batch norm 5e-10; up to 0.1 likewise. Logged losses 1e-7

So no bound by the number of steps would hold. Differences that smooth training never exceeds pass
(`Rounding.share`). If the difference is larger, the client trains twice more, from starts that are off by one
rounding (`nudged`); in all cases above their effect was 0.9 to 40 times the difference of both engines. A
difference of up to ten times this effect counts as rounding. If the effect is a tenth of the update or
more, training is too unstable to compare. Otherwise the run stops, before the server steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fl_lightning.client.log_collector import LogCollector
from fl_lightning.client.work import ClientWork, GroupWork
from fl_lightning.core.errors import ClientFailure, EnginesDiffer
from fl_lightning.core.metrics import PER_EXAMPLE, MetricStates, metrics_of
from fl_lightning.core.seeds import preserve_global_generators, torch_generator, uniform_numbers
from fl_lightning.core.update import ClientUpdate, GlobalModel, Updates

# Precisions without rounding to half precision.
FULL_PRECISIONS = ("32-true", "64-true")
# A single nudged start may have less effect than all roundings of a client's training together.
_MARGIN = 10.0
_NUM_NUDGES = 2
# Changes of a vector by less than this fraction of its norm are compared as if they were that large.
_LEAST_CHANGE = 0.01
_UPDATE, _FAILURE = "update", "failure"
_REMEDY = (
    "The round does not count: the global model is that of the round before. Set federation.engine: "
    "sequential, which runs your training_step unchanged. To use slots again, find out which values "
    "besides tensors the step or a hook reads or writes (attributes of self, current_epoch, counters, "
    "lists), or how it treats padded examples; set federation.pad_batches: false if the loss is no mean over "
    "examples. Earlier rounds were checked on few clients only (federation.spot_check): do not trust them "
    "before you know the reason."
)


@dataclass(frozen=True)
class TrainedClient:
    """Result of a client's training: its update, and its personal tensors before and after.

    Attributes:
        update: the client's update.
        own: its personal tensors after training, shape (o,).
        own_start: its personal tensors before training, shape (o,).
    """

    update: ClientUpdate
    own: Tensor
    own_start: Tensor


Result = TrainedClient | ClientFailure
# Trains a client from a model sequentially, changing nothing but the module and its metrics.
TrainAlone = Callable[[ClientWork, GlobalModel], TrainedClient]


def drawn(work: GroupWork, fraction: float) -> GroupWork:
    """Return the work of randomly drawn clients to check; the draw depends on seed, round and client alone.

    Clients drawn with a smaller fraction are also drawn with a larger one.

    Example:
        >>> work = GroupWork.of([ClientWork(i, 1, torch.tensor([i]), [1]) for i in range(9)])
        >>> [[client.client_id for client in drawn(work, f)] for f in (0.0, 0.3, 0.6)]
        [[], [4], [1, 3, 4, 8]]
    """
    if not fraction or not len(work):
        return work.where(np.zeros(len(work), bool))
    numbers = uniform_numbers(work.root_seed, "spot check", work.rounds, work.client_ids)
    return work.where(numbers < fraction)


def remark_of(fraction: float) -> str:
    """Return a clause for the log: the fraction of clients that are trained both ways as a check."""
    if fraction == 0:
        return ", none of them checked (federation.spot_check: 0)"
    if fraction == 1:
        return ", every client is trained both ways as a check"
    return f", one client in {1 / fraction:.0f} is trained both ways as a check"


class SpotCheck:
    """Trains some of the clients that trained in slots once more, sequentially, and compares the results.

    Args:
        fraction: fraction of the clients in slots that are checked.
        module: the module that trains.
        collector: collects the values that clients log.
        alone: trains a client sequentially.
        restore: loads a model into the module.
        precision: the Trainer's precision.
    """

    def __init__(
        self,
        fraction: float,
        module: nn.Module,
        collector: LogCollector,
        alone: TrainAlone,
        restore: Callable[[GlobalModel], None],
        precision: str | int | None,
    ) -> None:
        self._fraction, self._module, self._collector = fraction, module, collector
        self._alone, self._restore, self._precision = alone, restore, precision

    def begin(self, work: GroupWork) -> None:
        """Draw the clients to check, given the work of all clients that will train in slots."""
        self._work = {client.client_id: client for client in drawn(work, self._fraction)}
        self._found: dict[int, TrainedClient] = {}
        self._metrics = MetricStates(metrics_of(self._module) if self._work else [])

    def note(self, usable: Updates, kept: Mapping[int, Tensor]) -> None:
        """Store the results that slots computed for the drawn clients.

        Args:
            usable: updates, which the server has received.
            kept: personal tensors by client.
        """
        for row, client in enumerate(usable.client_ids if self._work else ()):
            if client in self._work:
                own = kept.get(client, usable.buffers.new_empty(0))
                (update,) = usable.rows([row])  # a copy: slots reuse their memory
                self._found[client] = TrainedClient(update, own, own)

    def compare(self, start: GlobalModel, present: GlobalModel) -> None:
        """Train the drawn clients sequentially; raise if a result differs from that in slots by more than rounding.

        Args:
            start: the model from which they started.
            present: the global model, to restore afterwards.

        Raises:
            EnginesDiffer: for the first client whose results differ by more than rounding.
        """
        if not self._work:
            return
        try:
            with self.without_trace(present):
                for client, found in self._found.items():
                    self.look(self._work[client], found, start)
        except BaseException:  # the updates of these clients do not count, nor do their metrics
            self._metrics.put_back()
            raise

    @contextmanager
    def without_trace(self, present: GlobalModel) -> Iterator[None]:
        """Restore module, logged values and random generators after the block."""
        metrics, logs = MetricStates(metrics_of(self._module)), self._collector
        frozen = [p for p in self._module.parameters() if not p.requires_grad]
        values = [p.detach().clone() for p in frozen]
        with preserve_global_generators(), logs.forgetting(), logs.listening_to(self._module):
            try:
                yield
            finally:
                metrics.put_back()
                self._restore(present)
                with torch.no_grad():
                    for param, value in zip(frozen, values, strict=True):
                        param.copy_(value)

    def look(self, work: ClientWork, found: TrainedClient, start: GlobalModel) -> None:
        """Train one client sequentially; raise if the result differs from that in slots by more than rounding.

        Raises:
            EnginesDiffer: if the results differ by more than rounding.
        """
        rounding = Rounding.of(self._precision, self._module)
        expected = _outcome(self._alone, work, start)
        num_seen = len(work.order)
        apart = difference(expected, found, work, start, self._alone, rounding, num_seen)
        if apart is None or math.isinf(apart.explained):
            return
        where = f"round {work.round_index + 1}, client {work.client_id}"
        said = f"its {apart.name} from slots differs from sequential training by {apart.gap:.1e} (relative); "
        said += f"rounding explains {apart.explained:.1e} at most"
        if isinstance(expected, ClientFailure):
            said = f"it fails in sequential training, but not in slots: {expected.reason}"
        raise EnginesDiffer(work.client_id, f"{where}: {said}. {_REMEDY}")


class Difference(NamedTuple):
    """Largest difference between two results of a client's training, and the difference that rounding explains.

    Attributes:
        name: the vector or logged value that differs.
        gap: the relative difference.
        explained: the largest relative difference that rounding explains; infinite if training is too
            unstable to compare.
    """

    name: str
    gap: float
    explained: float


def difference(
    expected: Result,
    found: Result,
    work: ClientWork,
    start: GlobalModel,
    alone: TrainAlone,
    rounding: Rounding,
    num_seen: float,
) -> Difference | None:
    """Return the largest difference between two results of a client's training; None if rounding explains all.

    Args:
        expected: the result of one engine.
        found: the result of the other engine.
        work: the client's work.
        start: the model from which it started.
        alone: trains a client with the first engine, for nudged starts.
        rounding: the rounding of both engines.
        num_seen: examples in all batches; rounding may change the predicted class of two of them, and with it
            logged values.
    """
    gaps = _gaps(expected, found, start, num_seen)
    limits = dict.fromkeys(gaps, rounding.share)
    moved = None if isinstance(expected, ClientFailure) else expected.update.delta
    for seed in range(_NUM_NUDGES):
        if all(gap <= limits[name] for name, gap in gaps.items()):
            return None
        again = _outcome(alone, work, nudged(start, moved, rounding.unit, seed=seed))
        made = _gaps(expected, again, start, num_seen)
        whole = _MARGIN * made.get(_UPDATE, 0.0)
        # rounding decides whether training fails, or changes the whole update
        if _FAILURE in made or whole >= 1:
            name = max(gaps, key=gaps.__getitem__)
            return Difference(name, gaps[name], math.inf)
        for name, limit in limits.items():
            limits[name] = max(limit, whole, _MARGIN * made.get(name, 0.0))
    name = max(gaps, key=lambda name: gaps[name] / limits[name])
    return Difference(name, gaps[name], limits[name]) if gaps[name] > limits[name] else None


def _outcome(alone: TrainAlone, work: ClientWork, start: GlobalModel) -> Result:
    try:
        return alone(work, start)
    except ClientFailure as failure:
        return failure


@dataclass(frozen=True)
class Rounding:
    """Sizes of rounding errors: of one floating-point operation, and of a client's whole update.

    Attributes:
        unit: approximate relative error of one operation.
        share: largest relative difference of an update that passes without nudged starts.
    """

    unit: float
    share: float

    @classmethod
    def of(cls, precision: str | int | None, module: nn.Module) -> Rounding:
        """Return the expected rounding errors for a module's dtypes and a Trainer's precision."""
        floating = [p for p in module.parameters() if p.is_floating_point()]
        fewest_bytes = min(p.itemsize for p in floating)
        if precision not in FULL_PRECISIONS or fewest_bytes < 4:  # or a part is in half precision
            return cls(2.0**-8, 0.1)
        if fewest_bytes == 8:  # a step may still take its loss in float32
            return cls(2.0**-52, 1e-6)
        is_coarse = _has_coarse_products(floating)
        return cls(2.0**-10, 0.02) if is_coarse else cls(2.0**-23, 1e-4)


def _has_coarse_products(params: list[nn.Parameter]) -> bool:
    """Return whether products of float32 may be computed with fewer digits (TF32)."""
    try:
        if torch.get_float32_matmul_precision() != "highest":
            return True
        is_allowed = torch.backends.cudnn.allow_tf32
    except RuntimeError:  # PyTorch knows two ways to set it and refuses to read a mixture
        return True
    has_convolutions = any(param.ndim >= 3 for param in params)
    return params[0].device.type == "cuda" and is_allowed and has_convolutions


def _gaps(expected: Result, found: Result, start: GlobalModel, num_seen: float) -> dict[str, float]:
    """Return `differences` of two results: infinite if exactly one is a failure, empty if both are failures."""
    has_failed = [isinstance(result, ClientFailure) for result in (expected, found)]
    if isinstance(expected, ClientFailure) or isinstance(found, ClientFailure):
        return {} if all(has_failed) else {_FAILURE: math.inf}
    return differences(expected, found, start, num_seen)


def differences(
    expected: TrainedClient, found: TrainedClient, start: GlobalModel, num_seen: float
) -> dict[str, float]:
    """Return relative differences between two results of a client's training, by vector or logged value.

    Args:
        expected: the result of one engine.
        found: the result of the other engine.
        start: the model from which both started.
        num_seen: examples in all batches.

    Returns:
        Relative differences: 0 for equal values, infinite if a value is missing.
    """
    one, other = expected.update, found.update
    own = found.own.to(expected.own.device)  # where it is kept, or where the module is
    of_vectors = {
        _UPDATE: _apart(one.delta, other.delta, torch.zeros_like(one.delta), 0.0),
        "buffers": _apart(one.buffers, other.buffers, start.buffers, _LEAST_CHANGE),
        "personal part": _apart(expected.own, own, expected.own_start, _LEAST_CHANGE),
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
    one: Mapping[str, Tensor], other: Mapping[str, Tensor], num_seen: float
) -> dict[str, float]:
    """Return relative differences of logged values; a difference that two examples could cause counts as 0."""
    shares = {}
    for name in sorted({*one, *other}):
        if name.endswith(PER_EXAMPLE):  # slots have it of all clients, sequential training if not 1
            shares[f"logged {name}"] = abs(float(one.get(name, 1)) - float(other.get(name, 1)))
            continue
        if name not in one or name not in other:
            shares[f"logged {name}"] = math.inf
            continue
        value, second = float(one[name]), float(other[name])
        both_nan = math.isnan(value) and math.isnan(second)
        edge = 0.0 if name == "train/loss" else 2 / num_seen * max(1.0, abs(value))
        gap = 0.0 if value == second or both_nan else abs(second - value)
        is_within = gap <= edge  # not of NaN
        shares[f"logged {name}"] = 0.0 if is_within else _share(gap - edge, abs(value))
    return shares


def _share(gap: float, whole: float) -> float:
    share = gap / whole if whole else math.inf
    return share if math.isfinite(share) else math.inf


def nudged(model: GlobalModel, moved: Tensor | None, unit: float, *, seed: int) -> GlobalModel:
    """Return a model whose parameters are moved up or down by one rounding error, at random.

    A parameter near 0 moves by the rounding error of an average parameter, or of its change in training.

    Args:
        model: the model.
        moved: change of the parameters by a client's training, shape (k,); None if unknown.
        unit: relative error of one operation.
        seed: seed of the signs.
    """
    params = model.params
    coins = torch.randint(2, params.shape, generator=torch_generator(seed, "nudge"))
    size = params.square() + params.square().mean()
    if moved is not None:
        size += moved.square().mean()
    up_or_down = (2 * coins - 1).to(params)
    return GlobalModel(params + unit * size.sqrt() * up_or_down, model.buffers)
