"""A mask found, and a head fitted, on examples that are at sites: clients send sums over theirs.

Clients' sums are handed on one by one in the order of the clients, so that they add up to the same bits
as in simulation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.flower.messages import Order
from fl_lightning.flower.packing import model_tensors, of_stage
from fl_lightning.flower.server.correspondence import Correspondence, by_site
from fl_lightning.flower.server.greeting import Greeting
from fl_lightning.sparsity.sensitivity.protocol import Scores

VALUES, SUMS = "stage/values/", "stage/sums/"


class CalibrationAtSites:
    """Asks clients at sites; a missing answer ends the run, as every one is needed.

    Args:
        correspondence: with sites.
        greeting: knows the run.
        trainer: of the server.
        site_of: the site of each client.
    """

    def __init__(
        self,
        correspondence: Correspondence,
        greeting: Greeting,
        trainer: Trainer,
        site_of: Mapping[int, str],
    ) -> None:
        self._correspondence, self._greeting = correspondence, greeting
        self._trainer, self._site_of = trainer, site_of

    def scores(
        self, values: Mapping[str, Tensor], ids: tuple[int, int], asked: Mapping[int, int]
    ) -> Iterator[Scores]:
        """Yield the scores of so many examples of each client, in the order given.

        Args:
            values: at which entries are scored, by name.
            ids: version of the mask, and round of its calibration.
            asked: the number of examples by client.
        """
        tensors = model_tensors(self._trainer.lightning_module, without=values.keys())
        tensors |= {f"{VALUES}{name}": value.detach().cpu() for name, value in values.items()}
        options = {"what": "scores", "version": ids[0], "round": ids[1]}
        like = {name: value.shape for name, value in values.items()}
        for client, num_examples, sums in self._ask(options, tensors, asked):
            if {name: tensor.shape for name, tensor in sums.items()} != like:
                raise ConfigurationError(self._of(client, "its scores are not of these entries"))
            if not all(map(_are_scores, sums.values())):
                raise ConfigurationError(self._of(client, "its scores are no finite numbers ≥ 0"))
            if num_examples != asked[client]:
                raise ConfigurationError(
                    self._of(
                        client, f"it scored {num_examples} examples instead of {asked[client]}"
                    )
                )
            yield Scores(sums, num_examples)

    def sums(self, clients: Sequence[int], like: Tensor) -> Iterator[Tensor]:
        """Yield the clients' sums for the head, in the order given.

        Args:
            clients: who.
            like: a tensor of the form that it has.
        """
        form = like.shape, like.dtype
        tensors = model_tensors(self._trainer.lightning_module)
        for client, _, sums in self._ask({"what": "head"}, tensors, dict.fromkeys(clients, 0)):
            told = sums.get("head")
            if told is None or (told.shape, told.dtype) != form or not told.isfinite().all():
                raise ConfigurationError(self._of(client, "it sent no finite sums for the head"))
            yield told

    def _ask(
        self, options: Mapping[str, Any], tensors: Mapping[str, Tensor], asked: Mapping[int, int]
    ) -> Iterator[tuple[int, int, dict[str, Tensor]]]:
        """Yield of each client in turn: its id, its number of examples and its sums."""
        came: dict[int, tuple[int, dict[str, Tensor]]] = {}
        waiting = list(asked)
        for reply in self._correspondence.ask(self._orders(options, tensors, asked)):
            if reply.answer is None:
                raise ConfigurationError(
                    f"calibration: site {reply.site}: {reply.reason}. Start the run again"
                )
            for part in reply.parts:
                if part.answer is not None:
                    came[part.client] = part.answer.num_examples, of_stage(SUMS, part.tensors)
            while waiting and waiting[0] in came:
                client = waiting.pop(0)
                yield client, *came.pop(client)
        if waiting:
            raise ConfigurationError(self._of(waiting[0], "its site's answer has nothing of it"))

    def _orders(
        self, options: Mapping[str, Any], tensors: Mapping[str, Tensor], asked: Mapping[int, int]
    ) -> dict[str, Order]:
        about = {**options, "num_clients": len(self._site_of)}
        return {
            site: self._greeting.write(
                "calibrate",
                some,
                about | {"examples": [[client, asked[client]] for client in some]},
                tensors,
                self._trainer.current_epoch,
            )
            for site, some in by_site(asked, self._site_of).items()
        }

    def _of(self, client: int, what: str) -> str:
        return f"calibration: client {client} at site {self._site_of[client]}: {what}"


def _are_scores(told: Tensor) -> bool:
    if told.dtype not in (torch.float32, torch.float64):
        return False
    return bool((told.isfinite() & (told >= 0)).all())
