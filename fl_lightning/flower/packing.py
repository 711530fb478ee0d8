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
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from fl_lightning.client.local_training import LocalTrainer
from fl_lightning.client.log_collector import LogCollector, LoggedMetrics
from fl_lightning.core.container import as_tensor, bytes_of
from fl_lightning.core.plain_json import MessageError, check_names, shown
from fl_lightning.core.space import Space
from fl_lightning.core.update import ClientUpdate, GlobalModel
from fl_lightning.federation import Transport
from fl_lightning.flower.messages import ClientAnswer, Order, OrderRefused
from fl_lightning.sparsity.masks.mask import Mask
from fl_lightning.updates.message import Agreement, Message, MessageKind, decode, encode
from fl_lightning.updates.path import Broadcast
from fl_lightning.updates.payload import Dense

_NO_MASK = "0" * 32
_UNCHANGED = Broadcast((), seed=0)


class Packing:
    """Converts the updates and global models that are sent in a run to bytes, and back.

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
        """Return the bytes of a client's update, uint8 of shape (n,), and the relative error of its compression.

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
        """Decode a client's update from its bytes.

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
                f"the update has client, examples and steps {found}, but the answer has "
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
            raise MessageError("the update's entries are too large: its norm is not finite")
        return update

    def model(self, model: GlobalModel, round_index: int, *, whole: bool = False) -> Tensor:
        """Return the bytes of the global model, uint8 of shape (n,), compressed as configured unless ``whole``."""
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
        """Decode a global model from the bytes that `model` has returned.

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
                f"the vector has shape {tuple(vector.shape)} and {vector.dtype}, "
                f"not {tuple(like.shape)} and {like.dtype}"
            )


_MODEL, _MASK = "stage/model/", "stage/mask/file"


def model_tensors(module: nn.Module, without: Collection[str] = ()) -> dict[str, Tensor]:
    """Return a module's parameters and buffers as tensors to send in an order, by prefixed name.

    Args:
        module: module of the server.
        without: names of parameters and buffers that are left out.
    """
    return {
        f"{_MODEL}{name}": tensor.detach().cpu().contiguous()
        for name, tensor in _tensors(module).items()
        if name not in without
    }


def copy_model(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy parameters and buffers, named as `model_tensors` names them, into a module.

    Raises:
        OrderRefused: if the module has no tensors of these names and shapes; then nothing is copied.
    """
    own = _tensors(module)
    given = of_stage(_MODEL, tensors)
    for name, tensor in given.items():
        if name not in own or (own[name].shape, own[name].dtype) != (tensor.shape, tensor.dtype):
            raise OrderRefused(
                "model",
                f"this site's module has no {name} of shape {tuple(tensor.shape)} and {tensor.dtype}",
            )
    with torch.no_grad():
        for name, tensor in given.items():
            own[name].copy_(tensor)


class RunMask(NamedTuple):
    """A mask of trainable entries, with its number among the masks of the run.

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
    """Return a mask in the form in which an order carries it: options and tensors."""
    return {"mask_number": mask.number}, {_MASK: as_tensor(mask.mask.to_bytes())}


def mask_of(order: Order) -> RunMask | None:
    """Read the mask that an order carries; None if it carries none.

    Raises:
        OrderRefused: if `mask_tensors` cannot have written it.
    """
    if "mask_number" not in order.options:
        return None
    try:
        mask = Mask.from_bytes(bytes_of(order.tensors.get(_MASK)))
        return RunMask(mask, int(order.options["mask_number"]))
    except (TypeError, ValueError) as error:
        raise OrderRefused("model", f"the order's mask cannot be read: {error}") from error


# of a calibration: sums of a client, and parameters to use instead of the module's
SUMS, VALUES = "stage/sums/", "stage/values/"


def examples_of(order: Order) -> dict[int, int]:
    """Return how many examples each client uses for a calibration, from the order that asks for it."""
    told = dict(order.options["examples"])
    return {client: told[client] for client in order.clients}


def of_stage(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors whose names start with a prefix, by the rest of the name."""
    return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return dict(module.named_parameters()) | dict(module.named_buffers())


log = logging.getLogger(__name__)
OPTION = "logged"
_PREFIX = "stage/metrics/"


def metric_tensors(metrics: LoggedMetrics) -> dict[str, Tensor]:
    """Return the states of logged torchmetrics objects as tensors of a site's answer, by prefixed name."""
    return {
        f"{_PREFIX}{place}/{name}": tensor.detach().cpu()
        for place, state in metrics.states.items()
        for name, tensor in state.items()
    }


def pop_metrics(
    collector: LogCollector, module: nn.Module, allows: Callable[[str], bool]
) -> LoggedMetrics:
    """Return the states of the torchmetrics objects that a site's clients have logged, and reset the objects.

    Args:
        collector: collector of logged metrics.
        module: module that has the objects.
        allows: returns True if a metric of this name may leave the site.
    """
    found = collector.metric_states(module)
    collector.collect_metrics()
    sums = {
        place: state
        for place, state in found.states.items()
        if all(isinstance(value, Tensor) for value in state.values())
    }
    for name, _, place in found.logged:
        if place not in sums:
            log.warning(
                "metric %s is not sent to the server: its state holds values of single examples",
                name,
            )
    logged = [entry for entry in found.logged if entry[2] in sums and allows(entry[1])]
    return LoggedMetrics(logged, {place: sums[place] for _, _, place in logged})


def read_metrics(logged: Any, tensors: Mapping[str, Tensor], module: nn.Module) -> LoggedMetrics:
    """Read the states of torchmetrics objects from a site's answer; raise if the module has no such objects.

    Raises:
        ValueError: if they do not fit the objects of the module.
    """
    metrics = {path: child for path, child in module.named_modules() if isinstance(child, Metric)}
    states: dict[str, dict[str, Tensor]] = {}
    entries = [_texts(entry) for entry in (logged if isinstance(logged, list) else [None])]
    for name, _, place in entries:
        if place not in metrics:
            raise ValueError(f"it logged a metric that the module does not have: {shown(place)}")
        ours: dict[str, Any] = dict(metrics[place].metric_state)
        found = {state: tensors.get(f"{_PREFIX}{place}/{state}") for state in ours}
        for state, value in ours.items():
            told = found[state]
            if told is None or not isinstance(
                value, Tensor
            ):  # a list has values of single examples
                raise ValueError(f"its metric {name} has no sum {state}")
            if (told.shape, told.dtype) != (value.shape, value.dtype):
                raise ValueError(
                    f"the state {state} of its metric {name} has another form than here"
                )
            # the state of a metric without examples may be infinite, as that of a smallest value
            if not bool((told.isfinite() | (told == value.cpu())).all()):
                raise ValueError(f"the state {state} of its metric {name} is not finite")
        states[place] = found  # type: ignore[assignment]
    return LoggedMetrics(entries, states)


def _texts(entry: Any) -> tuple[str, str, str]:
    """Check that a value is a list of three printable texts, and return them.

    Raises:
        ValueError: if it is anything else.
    """
    if isinstance(entry, list) and len(entry) == 3:
        check_names("logged", dict.fromkeys(map(str, entry)))
        if all(isinstance(part, str) for part in entry):
            return entry[0], entry[1], entry[2]
    raise ValueError("its list of logged metrics is malformed")


@runtime_checkable
class Recalibrates(Protocol):
    """Interface of a module that computes batch norm statistics for evaluations from sums over clients' examples."""

    @property
    def recomputed(self) -> Collection[str]:
        """Names of the buffers with computed statistics, whose values may differ between server and sites."""

    def client_sums(self, counts: Mapping[int, int]) -> Iterator[Mapping[str, Tensor]]:
        """Yield each client's sums for the statistics, over ``counts[client]`` examples, in the order of ``counts``."""

    def statistics(self) -> Mapping[str, Tensor]:
        """Return the sums over clients' examples from which evaluations compute the statistics."""

    def use_statistics(self, told: Mapping[str, Tensor]) -> None:
        """Use the sums that `statistics` has returned, perhaps at the server, in the next evaluation."""


def constants_digest(module: nn.Module, local: LocalTrainer) -> str:
    """Return the SHA-256 of the tensors of a module that are neither sent nor personal.

    A site whose frozen backbone came from another file would train another model unnoticed.

    Args:
        module: module that trains.
        local: trains clients, and has the names of tensors that are sent or personal.
    """
    recomputed = module.recomputed if isinstance(module, Recalibrates) else ()
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
