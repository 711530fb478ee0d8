"""Rehearsal: finds out before the first round which buffers and frozen parameters clients change.

One client takes its first local steps, and everything is restored. Tensors that changed are the clients'
state, as are tensors that torch's modules are known to change. All others are constants.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.optim.swa_utils import AveragedModel

from fl_lightning.client.personal import name_matches
from fl_lightning.client.state.tensors import candidates
from fl_lightning.client.work import ClientWork
from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.seeds import seed_global_generators
from fl_lightning.federation.round_record import RoundRecord
from fl_lightning.federation.run import Run
from fl_lightning.federation.visits.visiting import Visit, visiting

# A first step may only prepare what later ones do.
_NUM_STEPS = 2


class StateRehearsal:
    """Takes a client's first local steps without a trace, to find which buffers and frozen parameters they change.

    Args:
        run: the run.
        patterns: patterns of names of tensors that clients change later than in their first steps.

    Raises:
        ConfigurationError: if a pattern matches no tensor.

    Attributes:
        failures: exceptions of clients whose rehearsed steps failed.
    """

    def __init__(self, run: Run, patterns: Sequence[str]) -> None:
        self.failures: dict[int, Exception] = {}
        self._trainer, self._module = run.trainer, run.module
        self._local, self._step = run.local, run.step
        self._plan = run.plan
        told = getattr(run.module, "changes_at_clients", ())  # names that the module lists itself
        self._patterns = [*matching(run.module, patterns), *told, *known_state(run.module)]

    @property
    def known(self) -> list[str]:
        """Names of the buffers and frozen parameters that clients are known to change, without a rehearsal."""
        return self.together([])

    @property
    def is_needed(self) -> bool:
        """True if only a rehearsal can tell which tensors clients change, or whether they change a counted average."""
        counts = any(map(_may_count, self._module.modules()))
        return counts or set(candidates(self._module)) != set(self.known)

    def together(self, answers: Iterable[Sequence[str]]) -> list[str]:
        """Return the names of tensors that clients change, known or found by rehearsals, in the module's order."""
        found = {*self._patterns, *(name for answer in answers for name in answer)}
        return [name for name in candidates(self._module) if name in found]

    def changed_by(self, work: Iterable[ClientWork]) -> list[str] | None:
        """Return the names of tensors that one client's first steps change; None if no client can take a step.

        A client that fails here fails again when it trains; otherwise see `warn_of_failures`.
        """
        for client in work:
            if client.sizes:
                try:
                    with self._nothing_left() as visit:
                        names, changed = candidates(self._module), set[str]()
                        for _ in self._steps(client):  # the second may undo what the first did
                            self._local.tensors.restore_memory()
                            changed |= visit.changed()
                except Exception as error:  # noqa: BLE001 - whatever the user's step raises
                    self.failures[client.client_id] = error
                    continue
                check_counts(self._module, changed)
                return [name for name in names if name in changed]
        return None

    def warn_of_failures(self, record: RoundRecord) -> None:
        """Warn of clients whose steps failed when they were tried before the first round, but not in training."""
        ended = {*record.finished}.difference(record.skipped, record.lost)
        for client in self.failures.keys() & ended:
            error = self.failures.pop(client)
            warnings.warn(
                f"state: the first steps of client {client} were tried before the first round, to find the buffers "
                f"that they change, and raised {type(error).__name__}: {error}. In training they did not fail. Make "
                "training_step do the same in every call, or name these buffers in federation.client_state",
                stacklevel=2,
            )

    def _steps(self, client: ClientWork) -> Iterator[None]:
        seed_global_generators(client.seed)
        if self._step.examples is None:
            steps = self._plan.steps(client)
        else:  # whose batches may be empty
            client = self._plan.shard(client)
            steps = ([batch] for batch in self._plan.batches(client))
        examples, self._step.examples = self._step.examples, None
        try:
            with self._step.counts.of(client):
                for index, batches in enumerate(islice(steps, _NUM_STEPS)):
                    self._step(batches, index)
                    yield
        finally:
            self._step.examples = examples

    @contextmanager
    def _nothing_left(self) -> Iterator[Visit]:
        """Restore everything after the block, including the optimizers and the fp16 scale."""
        local = self._local
        local.start_round()
        model = local.read()
        with visiting(self._trainer, logs=local.collector) as visit:
            try:
                yield visit
            finally:
                local.restore(model)


def known_state(module: nn.Module) -> list[str]:
    """Return the names of tensors that torch's modules change in training, even if in eval mode now.

    These are statistics of batch and instance norm (unless their momentum is 0), the vectors of spectral
    norm, and averaged models.

    Example:
        >>> known_state(nn.BatchNorm1d(2).eval())
        ['running_mean', 'running_var']
    """
    kept: set[int] = set()
    for child in module.modules():
        if isinstance(child, AveragedModel):
            kept |= {id(t) for t in (*child.parameters(), *child.buffers())}
        elif isinstance(child, _SpectralNorm) or (
            isinstance(child, _NormBase) and child.momentum != 0
        ):
            kept |= {id(buffer) for buffer in child.buffers(recurse=False)}
        for hook in child._forward_pre_hooks.values():
            if isinstance(hook, SpectralNorm):
                kept |= {id(getattr(child, f"{hook.name}_{part}")) for part in "uv"}
    return [name for name, tensor in candidates(module).items() if id(tensor) in kept]


def _may_count(module: nn.Module) -> bool:
    is_norm = isinstance(module, _NormBase)
    return isinstance(module, AveragedModel) or (is_norm and module.momentum is None)


def check_counts(module: nn.Module, changed: Collection[str]) -> None:
    """Raise if clients change a running average that depends on the count of its updates.

    Raises:
        ConfigurationError: if one does: its count is an integer buffer, which is reset for every client.
    """
    for name, child in module.named_modules():
        is_changed = any(each.startswith(f"{name}.") for each in changed)
        fault = ""
        if isinstance(child, AveragedModel) and is_changed:
            if child.avg_fn is None and child.multi_avg_fn is None:
                fault = "weighs all updates equally: use multi_avg_fn=get_ema_multi_avg_fn(decay)"
            elif not child.n_averaged:
                fault = "copies the model at its first update: call n_averaged.fill_(1) in __init__"
        elif isinstance(child, _NormBase) and child.momentum is None and is_changed:
            fault = "weighs all batches equally: give it a momentum, e.g. 0.1"
        if fault:
            raise ConfigurationError(
                f"{name} ({type(child).__name__}) counts its updates in an integer buffer, which is reset for "
                f"every client, and {fault}"
            )


def matching(module: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Return the names of buffers and frozen parameters that match a pattern, as a whole or after a dot.

    Raises:
        ConfigurationError: if a pattern matches no name.

    Example:
        >>> matching(nn.Sequential(nn.BatchNorm1d(2)), ["running_*"])
        ['0.running_mean', '0.running_var']
    """
    names = list(candidates(module))
    found: set[str] = set()
    for pattern in patterns:
        matches = {name for name in names if name_matches(name, pattern)}
        if not matches:
            shown = ", ".join(names[:20]) or "none"
            raise ConfigurationError(
                f"federation.client_state: no floating-point buffer or frozen parameter matches "
                f"{pattern!r}; available: {shown}"
            )
        found |= matches
    return [name for name in names if name in found]
