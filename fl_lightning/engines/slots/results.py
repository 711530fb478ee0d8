"""Results of clients in slots: collected when a client finishes, and returned in groups.

Clients finish one by one. Later operations on updates (norm, checks, sums) have a fixed cost, paid once per
group instead of once per client. `SlotOwn` copies personal parameters into and out of slots.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import is_

import numpy as np
import torch
from torch import Tensor

from fl_lightning.client.work import GroupWork
from fl_lightning.core.errors import ClientFailure
from fl_lightning.core.metrics import PER_EXAMPLE
from fl_lightning.core.seeds import Integers
from fl_lightning.core.space import Space
from fl_lightning.core.update import ClientUpdate, GlobalModel, Updates, check_finite
from fl_lightning.engines.functional.functional_step import OWN_LOSS, Tensors
from fl_lightning.engines.slots.stacked_step import StackedStep

# Deltas with fewer entries are copied twice in less time than one operator call per tensor takes.
_FEW_NUMBERS = 100_000


class SlotResults:
    """Buffer for the updates of clients that have finished, at most one per slot.

    Args:
        step: stacked step, which holds the slots' tensors.
        space: layout of the trainable parameters.
        buffers: layout of the floating-point buffers.
        names: names of logged values in updates, by the name that the module logs, if different.
    """

    def __init__(
        self, step: StackedStep, space: Space, buffers: Space, names: Mapping[str, str]
    ) -> None:
        self._step, self._space, self._names = step, space, names
        params = [step.params[name] for name in space.names]
        self._rows = SlotRows([param.view(len(param), -1) for param in params])
        self._indices = [space.active.get(name) for name in space.names]
        self._sizes = [
            param[0].numel() if index is None else len(index)
            for param, index in zip(params, self._indices, strict=True)
        ]
        self._buffers = [step.buffers[name] for name in buffers.names if step.buffers]
        self._clients: list[int] = []
        self._sum_rows = SlotRows()
        self._sums: list[Tensor] = []
        self._final_buffers: list[Tensor] = []

    def open(self, start: GlobalModel, work: GroupWork) -> None:
        """Prepare for a group of clients that start from a global model."""
        self._start, self._work = start, work
        self._clear()

    def has_room(self, count: int) -> bool:
        """True if the buffer has room for ``count`` more updates."""
        return len(self._clients) + count <= self._step.options.num_slots

    @torch.no_grad()
    def collect(self, slots: list[int], clients: list[int]) -> Tensor:
        """Copy finished clients' results from their slots into the buffer, and return their deltas.

        Args:
            slots: slots of the clients.
            clients: positions of the clients in the group's work.
        """
        first, count = len(self._clients), len(slots)
        if not first:
            shape = self._step.options.num_slots, self._space.size
            self._deltas = self._start.params.new_empty(shape)
        deltas = self._deltas[first : first + count]
        self._write(deltas, self._ends(slots))
        self._clients += clients
        self._sum_rows = self._sum_rows.following([*self._step.sums.values()])
        self._sums.append(torch.stack(self._sum_rows.of(slots)))  # copies: slots are reused
        if self._buffers:
            # buffer[slots] would synchronise with a GPU
            rows = [torch.stack([buffer[slot] for slot in slots]) for buffer in self._buffers]
            ends = [row.reshape(count, -1).to(self._start.buffers.dtype) for row in rows]
            self._final_buffers.append(torch.cat(ends, 1))
        return deltas

    def _write(self, deltas: Tensor, ends: list[Tensor]) -> None:
        """Write start - end into ``deltas``, given the clients' final parameters, one tensor after the other."""
        places = deltas.view(-1).split(self._sizes * len(deltas))
        start = self._start.params
        if self._space.size <= _FEW_NUMBERS:
            torch._foreach_copy_(list(places), ends)
            torch.sub(start, deltas, out=deltas)
            return
        starts = start.split(self._sizes) * len(deltas)
        for place, begin, end in zip(places, starts, ends, strict=True):
            torch.sub(begin, end, out=place)

    def _ends(self, slots: list[int]) -> list[Tensor]:
        """Return the final parameters of the clients in some slots, without entries that masks freeze."""
        pairs = zip(self._rows.of(slots), self._indices * len(slots), strict=True)
        return [row if index is None else row.index_select(0, index) for row, index in pairs]

    def pop(self) -> Iterator[Updates]:
        """Yield the buffered updates as one group, unless there are none, and empty the buffer."""
        if not self._clients:
            return
        clients, names = np.array(self._clients, np.int64), list(self._step.sums)
        taken = torch.cat(self._sums).view(len(clients), len(names), 2).unbind(1)
        sums = dict(zip(names, taken, strict=True))
        group = self.group(clients, self._deltas[: len(clients)], sums)
        self._clear()
        yield group

    def group(self, clients: Integers, deltas: Tensor, sums: Tensors) -> Updates:
        """Build the `Updates` of m clients from their deltas and sums of logged values.

        Args:
            clients: positions of the clients in the group's work.
            deltas: deltas of the clients, shape (m, k).
            sums: sums of loss and logged values, see `StackedStep`, shape (m, 2).
        """
        work, count = self._work, len(clients)
        means = {name: total[:, 0] / total[:, 1] for name, total in sums.items()}
        own = {"train/loss": means.pop(OWN_LOSS)}  # the module may log another train/loss
        examples = sums[OWN_LOSS][:, 1]
        for name in list(means):
            if bool((sums[name][:, 1] != examples).any()):  # weighted by batch_size of `log`
                means[name + PER_EXAMPLE] = sums[name][:, 1] / examples
        final = self._final_buffers
        return Updates(
            client_ids=work.client_ids[clients].tolist(),
            deltas=deltas,
            buffers=torch.cat(final) if final else self._start.buffers.expand(count, -1),
            num_examples=work.num_examples[clients].tolist(),
            num_steps=work.num_steps[clients].tolist(),
            metrics=own | {self._renamed(name): value for name, value in means.items()},
        )

    def _renamed(self, name: str) -> str:
        suffix = PER_EXAMPLE if name.endswith(PER_EXAMPLE) else ""
        name = name.removesuffix(suffix)
        return self._names.get(name, name) + suffix

    def _clear(self) -> None:
        self._clients, self._sums, self._final_buffers = [], [], []


def usable_rows(
    group: Updates, check_loss: Callable[[ClientUpdate], None] | None = None
) -> tuple[Updates, list[ClientFailure]]:
    """Return the usable updates of a group, and a ClientFailure for each of the others.

    Clients with an error train again one by one, which decides whether they fail.

    Args:
        group: updates of clients that trained together.
        check_loss: raises ClientFailure for an update whose loss the server cannot use; None if the server
            uses no loss.
    """
    others = group.metrics["train/loss"].sum() + group.buffers.sum()
    if check_loss is None and math.isfinite(others) and math.isfinite(group.norms.sum()):
        return group, []
    rows, failures = [], list[ClientFailure]()
    for row, update in enumerate(group):
        try:
            check_finite(update)
            if check_loss is not None:
                check_loss(update)
        except ClientFailure as failure:
            failures.append(failure)
        else:
            rows.append(row)
    return group.rows(rows) if failures else group, failures


class SlotRows:
    """Caches the view of each slot in stacked tensors of shape (G, …).

    Args:
        tensors: stacked tensors, each of shape (G, …).

    Example:
        >>> import torch
        >>> counts, states = torch.arange(3), torch.zeros(3, 2)
        >>> rows = SlotRows([counts, states])
        >>> rows.of([1, 2])
        [tensor(1), tensor([0., 0.]), tensor(2), tensor([0., 0.])]
        >>> rows.following([counts, states]) is rows, rows.following([counts]).of([0])
        (True, [tensor(0)])
    """

    def __init__(self, tensors: Sequence[Tensor] = ()) -> None:
        self._tensors = list(tensors)
        self._rows: dict[int, list[Tensor]] = {}

    def following(self, tensors: Sequence[Tensor]) -> SlotRows:
        """Return the cached views of these tensors; the object itself if its tensors are the same objects."""
        have = self._tensors
        is_same = len(have) == len(tensors) and all(map(is_, have, tensors))
        return self if is_same else SlotRows(tensors)

    def of(self, slots: Iterable[int]) -> list[Tensor]:
        """Return the views of all tensors in some slots, ordered by slot."""
        found: list[Tensor] = []
        for slot in slots:
            rows = self._rows.get(slot)
            if rows is None:
                rows = self._rows[slot] = [tensor[slot] for tensor in self._tensors]
            found += rows
        return found


# Maps a client id to the client's personal parameters, shape (o,), or to None before its first round.
OwnOf = Callable[[int], Tensor | None]


class SlotOwn:
    """Loads the clients' personal parameters into their slots, and keeps the trained ones.

    Args:
        space: layout of the personal parameters.
        stacked: tensors of the slots by name, shape (G, …); personal tensors that are not among them never
            change.
        start: returns the personal parameters of a client before its first round, shape (o,).

    Attributes:
        kept: personal parameters of finished clients, by client id.
    """

    def __init__(self, space: Space, stacked: Tensors, start: Callable[[], Tensor]) -> None:
        self._space, self._start = space, start
        self._rows = [stacked.get(name) for name in space.names]
        self.kept: dict[int, Tensor] = {}
        self._own: OwnOf | None = None

    def open(self, own: OwnOf | None) -> None:
        """Prepare for a group of clients; ``own`` returns each client's personal parameters."""
        self._own, self.kept = own, {}

    @torch.no_grad()
    def enter(self, slot: int, client: int) -> None:
        """Write a client's personal parameters into a slot."""
        for rows, view in zip(self._rows, self._space.views(self._before(client)), strict=True):
            if rows is not None:
                rows[slot].copy_(view)

    @torch.no_grad()
    def leave(self, slot: int, client: int) -> bool:
        """Store a finished client's personal parameters; returns True if they are finite."""
        after = self._before(client).clone()
        for rows, view in zip(self._rows, self._space.views(after), strict=True):
            if rows is not None:
                view.copy_(rows[slot])
        self.kept[client] = after
        return bool(after.isfinite().all())

    def _before(self, client: int) -> Tensor:
        own = None if self._own is None else self._own(client)
        return self._start() if own is None else own
