"""Clients that train one after the other in one module, with all that stages do to them.

Weights, optimizer state, attributes and the fp16 scale that a client leaves never reach the next one.
Torchmetrics objects pool over the cohort; those of a client that fails are wound back.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace

from torch import nn

from fl_lightning.client.local_training import LocalTrainer
from fl_lightning.client.log_collector import LogCollector
from fl_lightning.client.work import ClientWork, GroupWork
from fl_lightning.core.errors import ClientFailure
from fl_lightning.core.metrics import MetricStates, metrics_of
from fl_lightning.core.seeds import seed_global_generators
from fl_lightning.core.update import ClientUpdate, Updates
from fl_lightning.federation.plan import WorkPlan
from fl_lightning.federation.stage import Missing, Stages, Start, Turn, Upload


class OneByOne:
    """Trains clients one after the other.

    Args:
        module: what trains.
        local: takes a client's steps in it.
        plan: knows clients' batches.
        collector: learns what they log.
        stages: what else happens while they train.
        counted: counts a client's steps inside a block, for its module's Trainer.
    """

    def __init__(
        self,
        module: nn.Module,
        local: LocalTrainer,
        plan: WorkPlan,
        collector: LogCollector,
        stages: Stages,
        counted: Callable[[ClientWork], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self._module, self._local, self._plan = module, local, plan
        self._collector, self._stages, self._counted = collector, stages, counted
        self._metrics = metrics_of(module)

    def train(self, start: Start, work: GroupWork) -> Generator[Upload | Missing, None, None]:
        """Train clients that begin alike, and yield what they send.

        Afterwards the module holds whatever the last of them left.
        """
        with self._collector.listening_to(self._module):
            for client in list(work):
                yield self._train(client, start)

    def _train(self, work: ClientWork, start: Start) -> Upload | Missing:
        turn = Turn(work, start, num_bytes=start.num_bytes)
        metrics = MetricStates(self._metrics) if self._metrics else None
        try:
            with self.around(turn):
                update = self.take_steps(turn)
                learnt = self._stages.learn(update, work, start) if self._stages.learns else None
        except BaseException as error:  # also an interruption, after which a checkpoint may follow
            if metrics is not None:
                metrics.put_back()
            if not isinstance(error, ClientFailure):
                raise
            return Missing(start._replace(num_bytes=turn.num_bytes), error)
        if learnt is not None:
            learnt()
        self._local.keeps_lists = True
        made = Updates.of(update)
        updates = without_buffers(made) if self._stages.is_private else made
        return Upload(start._replace(num_bytes=turn.num_bytes), updates, updates)

    def around(self, turn: Turn) -> AbstractContextManager[object]:
        """A block in which the module is one client's."""
        has_stages = bool(self._stages.having["around"])
        return self._among_stages(turn) if has_stages else self._counted(turn.work)

    @contextmanager
    def _among_stages(self, turn: Turn) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(self._counted(turn.work))
            for stage in self._stages.having["around"]:
                stack.enter_context(stage.around(turn))
            yield

    def take_steps(self, turn: Turn) -> ClientUpdate:
        """Run the local steps of a client."""
        work = turn.work
        with ExitStack() as stack:
            for stage in self._stages.having["steps"]:
                stack.enter_context(stage.steps(turn))
            seed_global_generators(work.seed)
            turn.update = update = self._local.train(
                turn.start.model,
                client_id=work.client_id,
                num_examples=work.num_examples,
                batches=self._plan.steps(work),
                masks=turn.masks,
            )
        return update


def without_buffers(updates: Updates) -> Updates:
    """Updates as they leave the clients of a private run."""
    return replace(updates, buffers=updates.buffers[:, :0])
