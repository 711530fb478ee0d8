"""Clients that train together in slots, and count as a whole or not at all."""

from __future__ import annotations

from collections.abc import Generator

import numpy as np

from fl_lightning.client.work import ClientWork, GroupWork
from fl_lightning.core.errors import ClientFailure
from fl_lightning.core.update import Updates
from fl_lightning.engines import usable_rows
from fl_lightning.federation.clients.one_by_one import upload_of
from fl_lightning.federation.execution.slot_engine import SlotEngine
from fl_lightning.federation.execution.spot_check import SpotCheck
from fl_lightning.federation.stage import Missing, Stages, Start, Upload
from fl_lightning.federation.transaction import Transaction


class InSlots:
    """Trains those clients of a group that slots can train."""

    def __init__(self, stages: Stages, spot_check: SpotCheck) -> None:
        self._stages, self._spot_check = stages, spot_check

    def train(
        self, slots: SlotEngine, start: Start, work: GroupWork, transaction: Transaction
    ) -> Generator[Upload | Missing, None, GroupWork]:
        """Train clients that begin alike, yield what they send, and return those who have not trained.

        Raises:
            CannotStack: if slots meet what they cannot run.
        """
        stages = self._stages
        stackable, others = slots.split(work)
        by_id = {client.client_id: client for client in stackable} if stages.learns else {}
        check = self._spot_check.begin(stackable)
        again: list[int] = []
        transaction.begin()
        for group in slots.train(start.model, stackable, stages.term, stages.own):
            usable, failures = usable_rows(group)
            # one after the other they may not fail: example by example there may be a 0 / 0
            again.extend(failure.client_id for failure in failures)
            refused: list[ClientFailure] = []
            if stages.learns:
                usable, refused = self._learnt(usable, by_id, start)
            for failure in (*failures, *refused):
                slots.leave_out(failure.client_id)
            for failure in refused:
                yield Missing(start, failure)
            yield upload_of(usable, start, stages)
            for client_id in usable.client_ids if slots.kept else ():
                stages.keep(client_id, slots.kept[client_id])
            check.note(usable, slots.kept)
        check.compare(start.model, start.present)
        transaction.commit()
        is_again = np.isin(stackable.client_ids, again)
        return GroupWork.of([*others, *stackable.where(is_again)]) if again else others

    def _learnt(
        self, updates: Updates, work: dict[int, ClientWork], start: Start
    ) -> tuple[Updates, list[ClientFailure]]:
        """Return the updates from which clients have learnt, and why others could not."""
        rows, failures = [], []
        for row, update in enumerate(updates):
            try:
                learnt = self._stages.learn(update, work[update.client_id], start)
            except ClientFailure as failure:
                failures.append(failure)
            else:
                learnt()
                rows.append(row)
        return updates.rows(rows) if failures else updates, failures
