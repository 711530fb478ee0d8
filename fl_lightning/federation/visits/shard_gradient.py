"""The gradient of a client's whole shard at the global model.

    ∇F_i(x) = Σ_b n_b/n ∇f_b(x),    n = Σ_b n_b

b: the batches of one pass; where the data's loader has ``drop_last``, full ones only, as in training.
Random draws (dropout, augmentation) are the client's own for this pass, keyed by seed, round and
client.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fl_lightning.client.local_training import LocalTrainer
from fl_lightning.client.work import ClientWork
from fl_lightning.core.errors import ClientFailure, ConfigurationError
from fl_lightning.core.lonely_example import help_with_one_example
from fl_lightning.core.seeds import derive_seed, seed_global_generators
from fl_lightning.core.update import GlobalModel
from fl_lightning.federation.plan import WorkPlan
from fl_lightning.federation.visits.lightning_step import LightningStep
from fl_lightning.federation.visits.visiting import visiting

# A scale at which fp16's gradients overflow is lowered so much before the next try.
_LOWER = 16.0


class ShardGradient:
    """Computes it in the module that clients train in.

    Args:
        module: with the training step.
        local: the sequential engine.
        step: gives gradients.
        plan: knows the clients' shards.
    """

    def __init__(
        self, module: torch.nn.Module, local: LocalTrainer, step: LightningStep, plan: WorkPlan
    ) -> None:
        self._module, self._local, self._step, self._plan = module, local, step, plan
        self._size = 0  # of the batch at work

    def __call__(self, model: GlobalModel, work: ClientWork) -> Tensor:
        """Return it, shape (k,); afterwards the module holds the global model.

        Raises:
            ClientFailure: if a step raised, or the gradient is not finite.
        """
        local, step = self._local, self._step
        step.forget_gradients()  # of the last step, which would only take memory
        with visiting(step.trainer, logs=local.collector, in_place=True):
            try:
                return self._finite(model, work)
            except (ClientFailure, ConfigurationError):
                raise
            except Exception as error:
                located = f"in the gradient of its whole shard: {type(error).__name__}: {error}"
                located += help_with_one_example(error, [self._size], work.num_examples)
                raise ClientFailure(work.client_id, located) from error
            finally:
                local.restore(model)

    def _finite(self, model: GlobalModel, work: ClientWork) -> Tensor:
        """Return the gradient at the largest scale, of a loss before it goes backward, that fits."""
        seed = derive_seed(work.root_seed, "shard gradient", work.round_index, work.client_id)
        scale = self._step.scale
        while True:
            self._local.restore(model)
            seed_global_generators(seed)
            gradient = self._scaled(work, scale) / scale
            if bool(gradient.isfinite().all()):
                return gradient
            if scale <= 1.0:
                reason = "the gradient of its whole shard holds NaN or infinite values"
                raise ClientFailure(work.client_id, reason)
            scale = max(1.0, scale / _LOWER)

    def _scaled(self, work: ClientWork, scale: float) -> Tensor:
        self._step.forget_gradients()
        shard = self._plan.shard(work)
        num_examples = sum(shard.sizes)
        for index, (batch, size) in enumerate(self._plan.batches(shard)):
            self._size = size
            self._step.backward(batch, size, index, factor=scale * size / num_examples)
        space = self._local.space
        zeros = torch.zeros(space.size, dtype=space.dtype, device=space.device)
        for param, active, view in space.entries(zeros):
            if param.grad is not None:
                grad = param.grad.to_dense() if param.grad.is_sparse else param.grad
                flat = grad.reshape(-1)
                view.view(-1).copy_(flat if active is None else flat.index_select(0, active))
        return zeros
