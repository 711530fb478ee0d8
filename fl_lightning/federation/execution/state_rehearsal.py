"""Which buffers and frozen parameters clients change, found out before the first round.

The first local steps of a client are taken, and everything is put back. What they changed is clients'
state, as is what torch's modules are known to change; the rest are constants.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice

import torch

from fl_lightning.client.state.python_state import PythonState
from fl_lightning.client.state.same_values import same_numbers
from fl_lightning.client.state.state_tensors import candidates, known_state, matching, whole_numbers
from fl_lightning.client.work import ClientWork
from fl_lightning.core.metric_states import MetricStates, metrics_of
from fl_lightning.core.seeds import preserve_global_generators, seed_global_generators
from fl_lightning.federation.run import NOT_THE_USERS, Run

# A first step may only prepare what later ones do.
_NUM_STEPS = 2


class StateRehearsal:
    """Takes local steps that leave nothing behind.

    Args:
        run: whose clients take them.

    Raises:
        ConfigurationError: if a pattern finds nothing.
    """

    def __init__(self, run: Run) -> None:
        self._module, self._local, self._step = run.module, run.local, run.step
        self._plan, self._scaler = run.plan, run.scaler
        patterns = run.options.client_state
        self._patterns = [*matching(run.module, patterns), *known_state(run.module)]

    @property
    def known(self) -> list[str]:
        """Names of what is state, whatever the steps do."""
        return self.together([])

    @property
    def is_needed(self) -> bool:
        """Whether there is anything of which that is not known."""
        return set(candidates(self._module)) != set(self.known)

    def together(self, answers: Iterable[Sequence[str]]) -> list[str]:
        """Return in the module's order what is known, or was found in one of several rehearsals."""
        found = {*self._patterns, *(name for answer in answers for name in answer)}
        return [name for name in candidates(self._module) if name in found]

    def changed_by(self, work: Iterable[ClientWork]) -> list[str] | None:
        """Return what the first of some clients changes; None if none of them can take a step.

        A client that fails is met again, where it counts.
        """
        for client in work:
            if client.sizes:
                try:
                    with self._nothing_left() as before:
                        self._take_steps(client)
                        self._local.bring_home()
                        now = candidates(self._module)
                        return [n for n, t in now.items() if not same_numbers(t.cpu(), before[n])]
                except Exception:  # noqa: BLE001, S112 - whatever the user's step raises
                    continue
        return None

    def _take_steps(self, client: ClientWork) -> None:
        seed_global_generators(client.seed)
        if self._step.examples is None:
            steps = self._plan.steps(client)
        else:  # whose batches may be empty
            steps = ([batch] for batch in self._plan.batches(self._plan.shard(client)))
        examples, self._step.examples = self._step.examples, None
        try:
            for index, batches in enumerate(islice(steps, _NUM_STEPS)):
                self._step(batches, index)
        finally:
            self._step.examples = examples

    @contextmanager
    def _nothing_left(self) -> Iterator[dict[str, torch.Tensor]]:
        """Yield copies of what may be state; put everything back after the block."""
        module, local = self._module, self._local
        local.start_round()
        model, scale = local.read(), self._scaler.present()
        metrics = MetricStates(metrics_of(module))
        python = PythonState(module, ignore=NOT_THE_USERS, global_generators=False)
        tensors, whole = candidates(module), whole_numbers(module)
        before = {name: t.detach().to("cpu", copy=True) for name, t in tensors.items()}
        numbers = [tensor.clone() for tensor in whole]
        with preserve_global_generators():
            try:
                yield before
            finally:
                with torch.no_grad():
                    for name, tensor in tensors.items():
                        if not same_numbers(tensor.cpu(), before[name]):
                            tensor.copy_(before[name])
                    for tensor, value in zip(whole, numbers, strict=True):
                        tensor.copy_(value)
                metrics.put_back()
                local.collector.discard()
                self._step.forget_gradients()
                self._scaler.go_on_from(scale)
                try:
                    local.restore(model)
                finally:
                    python.put_back()
