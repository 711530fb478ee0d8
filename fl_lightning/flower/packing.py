"""Conversion of updates, models, masks and states of metrics to parts of messages, and back.

Updates and models have the bytes that a simulation counts. What the receiver decodes is bit-identical to the
update or model of a simulated round, because both use `UpdatePath` and `Broadcast`. Orders to train leave out
frozen parameters; an order with a new mask has the whole model.

States of logged torchmetrics objects are sent to the server and pooled there: the metric is that of all clients'
examples together, not a mean of metrics. A state that is a list holds values of single examples (predictions,
labels): such a metric stays at its site.

Frozen weights and constants in buffers are not sent: `constants_digest` shows whether both sides have the same.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from fl_lightning.client.local_training import LocalTrainer
from fl_lightning.client.log_collector import LogCollector
from fl_lightning.core.container import as_tensor, bytes_of
from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.metrics import pool
from fl_lightning.core.plain_json import MessageError
from fl_lightning.core.space import Space
from fl_lightning.core.update import ClientUpdate, GlobalModel
from fl_lightning.federation import Transport
from fl_lightning.flower.messages import ClientAnswer, Order, OrderRefused
from fl_lightning.nas.shared_weights import SharedWeights
from fl_lightning.sparsity.masks.mask import Mask
from fl_lightning.updates.message import Agreement, Message, MessageKind, decode, encode
from fl_lightning.updates.path import Broadcast
from fl_lightning.updates.payload import Dense

_NO_MASK = "0" * 32
_UNCHANGED = Broadcast((), seed=0)


class Packing:
    """Converts the updates and models of a run to bytes, and back.

    Args:
        transport: compression of updates and models.
        space: parameters that are sent.
        num_buffers: size of the buffers that the server sends.
        num_buffers_up: size of the buffers that clients send.
    """

    def __init__(
        self, transport: Transport, space: Space, num_buffers: int, num_buffers_up: int
    ) -> None:
        self._path, self._broadcast, self._sent = (
            transport.path,
            transport.broadcast,
            transport.sent,
        )
        self._space = space
        self._num_buffers, self._num_buffers_up = num_buffers, num_buffers_up
        self._agreed = space.mask_fingerprint() or _NO_MASK

    @property
    def _like(self) -> Tensor:
        return torch.empty(self._space.size, dtype=self._space.dtype, device="meta")

    def update(self, update: ClientUpdate, round_index: int) -> tuple[Tensor, float]:
        """Return the bytes of an update, uint8 of shape (n,), and the relative error of its compression.

        With error feedback, the client keeps the error until its next round.
        """
        update = replace(update, metrics={}, buffers=update.buffers[: self._num_buffers_up])
        arrival = self._sent(update, round_index)
        params = arrival.payload
        if params is None and update.active is not None:
            params = Dense(update.delta[update.active])
        message = Message.of_update(
            update,
            space=self._agreed,
            round_index=round_index,
            params=params,
            transforms=self._path.names,
        )
        return as_tensor(encode(message)), float(arrival.error)

    def opened_update(
        self,
        data: Tensor | None,
        answer: ClientAnswer,
        round_index: int,
        active: Tensor | None = None,
    ) -> ClientUpdate:
        """Decode the update of a client.

        Args:
            data: bytes of the update, uint8 of shape (n,).
            answer: answer of the client, whose numbers of examples and steps were checked.
            round_index: round of the order.
            active: True for coordinates that a client with a mask of its own trains and sends, shape (k,);
                None for all.

        Raises:
            MessageError: if there are no bytes, or if they are not an update of this client, this round,
                this space and these numbers.
        """
        like = self._like if active is None else self._like[: int(active.count_nonzero())]
        num_params, names = self._path.num_sent(len(like)), self._path.names
        agreed = self._agreement("update", round_index, num_params, self._num_buffers_up, names)
        message = decode(bytes_of(data), agreed)
        found = message.client_id, message.num_examples, message.num_steps
        if found != (answer.client, answer.num_examples, answer.num_steps):
            raise MessageError(
                f"the update is of client, examples and steps {found}, the answer of "
                f"{(answer.client, answer.num_examples, answer.num_steps)}"
            )
        delta = self._path.opened(
            message.params, round_index=round_index, client_id=answer.client, like=like
        )
        self._check(delta, like)
        update, device = message.to_update(), self._space.device
        delta = delta.to(device)
        if active is not None:
            delta = delta.new_zeros(self._space.size).masked_scatter_(active, delta)
        update = replace(update, buffers=update.buffers.to(device), delta=delta, active=active)
        if not bool(update.norm.isfinite()):  # as clients check it: no sum of updates overflows
            raise MessageError("the update has numbers that are too large")
        return update

    def model(self, model: GlobalModel, round_index: int, *, whole: bool = False) -> Tensor:
        """Return the bytes of a model, uint8 of shape (n,), compressed as configured unless ``whole``."""
        broadcast = _UNCHANGED if whole else self._broadcast
        payload = broadcast.send(model.params, model.buffers, round_index).payload
        message = Message(
            "model",
            space=self._agreed,
            round_index=round_index,
            client_id=0,
            params=Dense(model.params) if payload is None else payload,
            buffers=Dense(model.buffers),
            transforms=broadcast.names,
        )
        return as_tensor(encode(message))

    def opened_model(self, data: Tensor, round_index: int, *, whole: bool = False) -> GlobalModel:
        """Decode the bytes of `model`, such as the model from which the clients of a round start.

        Raises:
            MessageError: for bytes that are not one of this round and this space.
        """
        broadcast, device = _UNCHANGED if whole else self._broadcast, self._space.device
        num_params, names = broadcast.num_sent(self._space.size), broadcast.names
        agreed = self._agreement("model", round_index, num_params, self._num_buffers, names)
        message = decode(bytes_of(data), agreed)
        params = broadcast.opened(message.params, round_index, self._like)
        self._check(params, self._like)
        return GlobalModel(params.to(device), message.buffers.to_dense().to(device))

    def _agreement(
        self,
        kind: MessageKind,
        round_index: int,
        num_params: int,
        num_buffers: int,
        names: tuple[str, ...],
    ) -> Agreement:
        return Agreement(
            kind=kind,
            space=self._agreed,
            round_index=round_index,
            num_params=num_params,
            num_buffers=num_buffers,
            transforms=names,
        )

    def _check(self, vector: Tensor, like: Tensor) -> None:
        if (vector.shape, vector.dtype) != (like.shape, like.dtype):
            raise MessageError(
                f"the numbers are {tuple(vector.shape)} of {vector.dtype}, "
                f"not {tuple(like.shape)} of {like.dtype}"
            )


_MODEL, _BITS = "stage/model/", "stage/mask/"
_FIELDS = ("version", "hash", "shapes")  # the version is that of the layout of bits


def model_tensors(module: nn.Module, without: Collection[str] = ()) -> dict[str, Tensor]:
    """Return the parameters and buffers of a module as tensors of an order.

    Args:
        module: module of the server.
        without: names of parameters and buffers that are left out.
    """
    return {
        f"{_MODEL}{name}": tensor.detach().cpu().contiguous()
        for name, tensor in _tensors(module).items()
        if name not in without
    }


def hold_model(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy the tensors of `model_tensors` into a module.

    Raises:
        OrderRefused: if the module has no tensors of these names and shapes; then nothing is copied.
    """
    own = _tensors(module)
    given = of_stage(_MODEL, tensors)
    for name, tensor in given.items():
        if name not in own or (own[name].shape, own[name].dtype) != (tensor.shape, tensor.dtype):
            raise OrderRefused("model", f"this site's module has no {name} of its form")
    with torch.no_grad():
        for name, tensor in given.items():
            own[name].copy_(tensor)


class RunMask(NamedTuple):
    """A mask of a run.

    Attributes:
        mask: the mask.
        number: number of the mask in the run, from 0.
    """

    mask: Mask
    number: int

    def __str__(self) -> str:
        """Number and hash, by which server and sites compare masks."""
        return f"{self.number} {self.mask.hash()}"


def mask_tensors(mask: RunMask) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return a mask as options and tensors of an order."""
    state = mask.mask.state_dict()
    bits = {f"{_BITS}{name}": tensor for name, tensor in state["bits"].items()}
    return {"mask": {name: state[name] for name in _FIELDS}, "mask_number": mask.number}, bits


def mask_of(order: Order) -> RunMask | None:
    """Read the mask of an order; None if the order has none.

    Raises:
        OrderRefused: if `mask_tensors` cannot have written it.
    """
    if "mask_number" not in order.options:
        return None
    try:
        told = {name: order.options["mask"][name] for name in _FIELDS}
        mask = Mask.from_state_dict(told | {"bits": of_stage(_BITS, order.tensors)})
        return RunMask(mask, int(order.options["mask_number"]))
    except (ConfigurationError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise OrderRefused("model", f"the order has no mask: {error}") from error


# sums of a client for a calibration, and the name of those for batch norm among what a site lets leave
SUMS, STATISTICS = "stage/sums/", "batch_norm/sums"


def named_sums(found: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return the batch norm sums of several networks as one mapping, by number of the network and name."""
    return {f"{at}/{name}": sums for at, own in enumerate(found) for name, sums in own.items()}


def of_stage(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors whose names start with a prefix, by the rest of the name."""
    return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return dict(module.named_parameters()) | dict(module.named_buffers())


log = logging.getLogger(__name__)
OPTION = "logged"
_PREFIX = "stage/metrics/"


@dataclass(frozen=True)
class MetricSums:
    """States of torchmetrics objects, summed over the clients of a site.

    Attributes:
        logged: name, name per epoch and module path of each metric.
        states: state tensors by name, by module path.
    """

    logged: list[list[str]]
    states: dict[str, dict[str, Tensor]]

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The states as tensors of an answer."""
        return {
            f"{_PREFIX}{place}/{name}": tensor.detach().cpu()
            for place, state in self.states.items()
            for name, tensor in state.items()
        }


def take_metric_sums(
    collector: LogCollector, module: nn.Module, allows: Callable[[str], bool]
) -> MetricSums:
    """Return the states of the torchmetrics objects that a site's clients have logged, and reset the objects.

    Args:
        collector: collector of logged metrics.
        module: module that has the objects.
        allows: returns True if a metric of this name may leave the site.
    """
    states: dict[str, dict[str, Tensor]] = {}
    logged: list[list[str]] = []
    places = {id(child): path for path, child in module.named_modules()}
    for name, metric in collector.metrics.items():
        epoch_name, place = collector.epoch_names[name], places.get(id(metric))
        state: dict[str, Any] = dict(metric.metric_state)
        if place is None or not all(isinstance(value, Tensor) for value in state.values()):
            log.warning(
                "metric %s is not sent to the server: its state holds values of single examples",
                name,
            )
        elif allows(epoch_name):
            states[place] = {key: value.clone() for key, value in state.items()}
            logged.append([name, epoch_name, place])
    collector.collect_metrics()
    return MetricSums(logged, states)


def metric_sums_of(logged: Any, tensors: Mapping[str, Tensor], module: nn.Module) -> MetricSums:
    """Read the states of a site's torchmetrics objects.

    Raises:
        ValueError: if they do not fit the objects of the module.
    """
    metrics = {path: child for path, child in module.named_modules() if isinstance(child, Metric)}
    states: dict[str, dict[str, Tensor]] = {}
    for entry in logged if isinstance(logged, list) else [None]:
        name, _, place = _texts(entry, 3)
        if place not in metrics:
            raise ValueError("what it has logged is no metric of the module")
        ours: dict[str, Any] = dict(metrics[place].metric_state)
        found = {state: tensors.get(f"{_PREFIX}{place}/{state}") for state in ours}
        for state, value in ours.items():
            told = found[state]
            if told is None or (told.shape, told.dtype) != (value.shape, value.dtype):
                raise ValueError(f"the state {state} of its metric {name} does not fit")
            # the state of a metric without examples may be infinite, as that of a smallest value
            if not bool((told.isfinite() | (told == value.cpu())).all()):
                raise ValueError(f"the state {state} of its metric {name} is not finite")
        states[place] = found  # type: ignore[assignment]
    return MetricSums(logged, states)


def _texts(entry: Any, number: int) -> list[str]:
    """Return a value that must be a list of ``number`` texts.

    Raises:
        ValueError: if it is anything else.
    """
    texts = [part for part in entry if isinstance(part, str)] if isinstance(entry, list) else []
    if len(texts) != number or texts != entry:
        raise ValueError("what it has logged is no metric of the module")
    return texts


def pool_metric_sums(
    sums: Iterable[MetricSums], collector: LogCollector, module: nn.Module
) -> None:
    """Merge the states of all sites into the module's torchmetrics objects."""
    all_of_them = list(sums)
    for name, epoch_name, place in sorted({tuple(e) for each in all_of_them for e in each.logged}):
        collector.add_metric(name, epoch_name, module.get_submodule(place))  # type: ignore[arg-type]
    for place in sorted({place for each in all_of_them for place in each.states}):
        states = [each.states[place] for each in all_of_them if place in each.states]
        pool(module.get_submodule(place), states)  # type: ignore[arg-type]


def constants_digest(module: nn.Module, local: LocalTrainer) -> str:
    """Return the SHA-256 of the tensors of a module that are neither sent nor personal.

    A site whose frozen backbone came from another file would train another model unnoticed.

    Args:
        module: module that trains.
        local: knows which tensors are sent, and which are personal.
    """
    recomputed = module.recomputed if isinstance(module, SharedWeights) else ()
    sent = (local.space, local.buffers, local.personal)
    elsewhere = {*recomputed, *(name for each in sent for name in each.names)}
    named = [*module.named_parameters(), *module.named_buffers()]
    digest = hashlib.sha256()
    for name, tensor in sorted(named, key=lambda pair: pair[0]):
        if name not in elsewhere and tensor.is_floating_point():
            digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} ".encode())
            flat = tensor.detach().cpu().contiguous().reshape(-1)
            digest.update(flat.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
