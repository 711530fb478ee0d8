"""Personalisation in a run: loading, training and storing clients' personal tensors.

A client's personal tensors are in the module while the client trains. New ones take effect when the
server has stepped. The server never sees them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fl_lightning.client.corrections.correction import AddedTerm, GradientTerm
from fl_lightning.client.personal import Mixing, Personalisation
from fl_lightning.client.work import ClientWork
from fl_lightning.core.errors import ClientFailure, ConfigurationError
from fl_lightning.core.metrics import MetricStates, metrics_of
from fl_lightning.core.seeds import derive_seed, seed_global_generators
from fl_lightning.core.update import GlobalModel
from fl_lightning.federation.checks.fit import ADDED_TO_LOSS, any_maximises
from fl_lightning.federation.run import Run
from fl_lightning.federation.stage import LocalTraining, Stage, check_same, kind_of
from fl_lightning.federation.visits.personal_models import MEMORY, MIXTURE
from fl_lightning.sparsity.optimizers.masked_optimizer import MaskedOptimizer

_PURPOSE = "own epochs"
Masks = Mapping[str, Tensor]


class Personaliser(Stage):
    """Loads each client's personal tensors, which stay with the client, into the module; trains and stores them.

    Attributes:
        names: names of the personal tensors.
    """

    key = "personal"

    def __init__(self, rule: Personalisation, *, is_corrected: bool) -> None:
        self._rule, self._is_corrected = rule, is_corrected
        self._trained: Tensor | None = None
        self._mixture: Tensor | None = None

    def enter(self, run: Run) -> None:
        """Find which tensors the personalisation rule makes personal, and set them in the run's sequential engine."""
        self._check(run.optimizers)
        self._memory, self._local = run.memory, run.local
        self._step, self._counts, self._plan = run.step, run.step.counts, run.plan
        self._module = run.module
        self._metrics = metrics_of(run.module)
        self.names = self._rule.names(run.module)
        if self.names:
            self._local.set_personal(self.names, beside=self._rule.beside)
        if self.names and (self._rule.beside or self._rule.own_epochs is not None):
            self.one_at_a_time = "clients take steps of their own (federation.personal)"

    def _check(self, optimizers: Sequence[Optimizer]) -> None:
        if self._rule.tuning_steps and any(isinstance(o, MaskedOptimizer) for o in optimizers):
            raise ConfigurationError(
                "federation.personal: FineTuned trains with a new optimizer, without the masks of SparseSGDM or "
                "SparseAdamW: use Personal or Ditto, or an optimizer without masks"
            )
        if self._rule.pull and not self._is_corrected and any_maximises(optimizers):
            raise ConfigurationError(f"federation.personal.pull {ADDED_TO_LOSS}")

    @property
    def kind(self) -> str | None:
        """Name of the personalisation rule in checkpoints; None if no tensor is personal."""
        return type(self._rule).__name__ if self.names else None

    @contextmanager
    def around(self, training: LocalTraining) -> Iterator[None]:
        """Load a client's personal tensors into the module inside the block, and the global values after it."""
        client, self._trained = training.work.client_id, None
        if self.names and not self._rule.beside:
            self._local.load_personal(self.tensors_of(client))
        try:
            yield
        finally:
            if self.names:
                self._local.load_personal(None)
        if training.counts and self.names and self._trained is not None:
            self.store(client, self._trained)

    @contextmanager
    def steps(self, training: LocalTraining) -> Iterator[None]:
        """Train personal tensors before, after or together with the local steps on shared tensors, by the rule."""
        if training.counts and self._rule.own_epochs:
            self._train_ahead(training)
        with nullcontext() if self._rule.own_epochs is None else frozen(self._module, self.names):
            yield
        if training.counts:
            self._train_after(training)

    def _train_ahead(self, training: LocalTraining) -> None:
        """Train the personal tensors alone, before the local steps on the shared tensors."""
        model, work, masks = training.start.model, training.work, training.masks
        assert self._rule.own_epochs is not None
        epochs = self._plan.more_epochs(work, self._rule.own_epochs, _PURPOSE)
        seed = derive_seed(work.root_seed, _PURPOSE, work.round_index, work.client_id)
        with frozen(self._module, self._local.space.names):
            self._local.load_personal(self._train(model, epochs, seed, masks))

    def _train_after(self, training: LocalTraining) -> None:
        """Train a client's own copy of the model, if the rule has one, and note the tensors to store.

        The copy takes the same steps as the shared model: the same batches, draws and masks.
        """
        self._trained, self._mixture = self._local.personal_end, None
        if not (self.names and self._rule.beside):
            return
        assert training.update is not None
        model, work, delta = training.start.model, training.work, training.update.delta
        mixing: Mixing | None = None
        self._local.load_personal(self.tensors_of(work.client_id))
        if self._rule.mixture is not None:
            before = self._memory.get(MIXTURE, work.client_id)
            mixture = self._rule.mixture if before is None else float(before)
            self._step.term = mixing = Mixing(self._local.space, model.params - delta, mixture)
        elif self._rule.pull:
            term = GradientTerm(self._rule.pull)
            self._step.term = AddedTerm(self._local.space, model.params, term)
        try:
            self._trained = self._train(model, work, work.seed, training.masks, mixing)
        finally:
            self._step.term = None
            self._local.load_personal(None)  # the module is the shared model's again
        if mixing is not None:
            self._mixture = torch.tensor(
                [mixing.adapted(self._rule.mixture_rate)], dtype=torch.float64
            )

    def _train(
        self,
        model: GlobalModel,
        work: ClientWork,
        seed: int,
        masks: Masks | None,
        mixing: Mixing | None = None,
    ) -> Tensor:
        """Train personal tensors by local steps that change nothing else, and return them."""
        steps = self._plan.steps(work)
        metrics, scale = MetricStates(self._metrics), self._local.round_start.scale()
        seed_global_generators(seed)
        try:
            with self._counts.of(work):
                self._local.train(
                    model,
                    client_id=work.client_id,
                    num_examples=work.num_examples,
                    batches=steps if mixing is None else mixing.steps(steps),
                    masks=masks,
                )
        except ClientFailure as failure:
            located = f"in personal steps: {failure.reason}"
            raise ClientFailure(failure.client_id, located) from failure.__cause__
        finally:
            metrics.put_back()
            self._local.round_start.set_scale(scale)
        return self._local.personal_end

    def store(self, client: int, tensors: Tensor) -> None:
        """Store the personal tensors of a client whose update is used."""
        self._memory.put(MEMORY, client, tensors)
        if self._mixture is not None:
            self._memory.put(MIXTURE, client, self._mixture)

    def tensors_of(self, client: int) -> Tensor | None:
        """Return a client's personal tensors, shape (o,); None if it never took part."""
        vector = self._memory.get(MEMORY, client)
        return None if vector is None else vector.to(self._local.space.device)

    def state_dict(self) -> dict[str, Any]:
        """Return the rule's name and the names of personal tensors; their values are saved as client states."""
        return {"kind": self.kind, "names": list(self.names)}

    def check(self, state: dict[str, Any] | None) -> None:
        """Raise if the checkpoint has another personalisation rule; a model copy (`Ditto`) keeps the saved names."""
        saved = state or {"kind": None, "names": []}
        if saved["kind"] != self.kind or not self._rule.beside:
            own = self.state_dict()
            check_same("choice of federation.personal", kind_of(saved), kind_of(own))
        if saved["names"] != self.names:
            self.names = list(saved["names"])
            self._local.set_personal(self.names, beside=True)


@contextmanager
def frozen(module: nn.Module, names: list[str]) -> Iterator[None]:
    """Freeze the named parameters inside this block."""
    chosen = set(names)
    params = [p for n, p in module.named_parameters() if n in chosen and p.requires_grad]
    for param in params:
        param.requires_grad_(False)
        param.grad = None
    try:
        yield
    finally:
        for param in params:
            param.requires_grad_(True)
