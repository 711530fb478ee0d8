"""Which numbers travel between clients and server, and how they follow the module from round to round.

Parameters that train, as the masks allow, and clients' state besides (statistics of batch norm, e.g.). Masks may
change between rounds; which state clients change becomes known when the first of them trains.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fl_lightning.core.update import GlobalModel
from fl_lightning.federation.clients.fit_clients import FitClients
from fl_lightning.federation.run import Run
from fl_lightning.federation.stage import Stages
from fl_lightning.server.server import Server


class TravellingNumbers:
    """Keeps server and stages on the coordinates that the module's parameters have.

    Args:
        run: whose module.
        clients: the clients' side.
        server: the server's side.
        stages: of the run.

    Attributes:
        module_has_all: whether the module holds every bit of the server's model.
        is_kept_by_lightning: whether the checkpoint's weights do.
    """

    def __init__(self, run: Run, clients: FitClients, server: Server, stages: Stages) -> None:
        self._run, self._local = run, run.local
        self._clients, self._server, self._stages = clients, server, stages
        self._place(None)

    def follow_state(self) -> None:
        """Put the state that clients are now known to have into the server's model."""
        self._server.replace_buffers(self._local.buffers.read())
        self._note_where_it_is_kept()

    def follow_masks(self) -> None:
        """Move to other coordinates if masks have changed; not inside a round.

        Raises:
            ConfigurationError: if they may not change.
        """
        if not self._local.has_new_masks:
            return
        before, kept = self._local.space, self.is_kept_by_lightning
        self._clients.renew_space()
        after = self._local.space
        if (after.names, after.mask_fingerprint()) == (before.names, before.mask_fingerprint()):
            return  # the same ones were set again, as resuming does
        positions = after.positions_in(before)
        model = self._local.read()
        if not kept:  # the server's has bits that the module lacks
            old = self._server.model
            known = old.params[positions.clamp(min=0)]
            model = GlobalModel(torch.where(positions >= 0, known, model.params), old.buffers)
        self._place(positions)
        self._server.relocate(model, positions)

    def _place(self, positions: Tensor | None) -> None:
        for stage in self._stages:
            stage.place(self._local.space, positions)
        self._note_where_it_is_kept()

    def _note_where_it_is_kept(self) -> None:
        spaces = (self._local.space, self._local.buffers)
        saved = self._run.module.state_dict().keys()
        self.module_has_all = all(s.is_lossless and saved >= set(s.names) for s in spaces)
        # Lightning loads a checkpoint's weights before it makes a module one of double precision
        self.is_kept_by_lightning = self.module_has_all and all(
            s.dtype == torch.float32 for s in spaces
        )
