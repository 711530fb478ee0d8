"""``trainer.strategy: federated``: several processes, each training other clients of a round.

Clients train independently, so no gradients are exchanged and the module is not wrapped. The processes
start from the same weights, exchange results once per round, and share validation and test.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch.utils.data import DistributedSampler
from typing_extensions import override

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.federation.logs import EvaluationLogs
from fl_lightning.federation.processes.fork import ForkLauncher


class FederatedStrategy(DDPStrategy):
    """Several processes without gradient exchange.

    On CPUs the processes are forked, have one thread each and use gloo. On GPUs there is one process per
    GPU, started as by Lightning's ``ddp``, with NCCL. Processes that torchrun or SLURM started are used
    as well.

    Args: those of `lightning.pytorch.strategies.DDPStrategy`, without those on gradients.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(strategy="federated", devices=2, accelerator="cpu", logger=False)
        >>> type(trainer.strategy).__name__, trainer.world_size
        ('FederatedStrategy', 2)
    """

    _fork: ForkLauncher | None = None
    _logs: EvaluationLogs | None = None

    @property
    @override
    def launcher(self) -> ForkLauncher | None:  # type: ignore[override]
        """Launcher of the processes."""
        environment = self.cluster_environment
        if self._fork is None and environment is not None and self.parallel_devices:
            on_cpu = self.parallel_devices[0].type == "cpu"
            can_fork = on_cpu and "fork" in multiprocessing.get_all_start_methods()
            if can_fork and not environment.creates_processes_externally:
                self._fork = ForkLauncher(self)
        return self._fork or super().launcher  # type: ignore[return-value]

    @override
    def setup_environment(self) -> None:
        """Join the other processes."""
        # a warning about repeated examples, which `process_dataloader` avoids
        warnings.filterwarnings("ignore", message="Using `DistributedSampler` with the dataloaders")
        super().setup_environment()

    @override
    def setup(self, trainer: Trainer) -> None:
        """Set up module and optimizers.

        Raises:
            ConfigurationError: for a fit without a federation, which would train a module per process.
        """
        in_rounds = getattr(trainer.datamodule, "trains_in_rounds", False)  # type: ignore[attr-defined]
        if trainer.state.fn == TrainerFn.FITTING and not in_rounds:
            raise ConfigurationError(
                "trainer.strategy federated exchanges no gradients, and there is no federation: add "
                "a federation block (or a Federation to the callbacks), or use trainer.strategy ddp"
            )
        super().setup(trainer)

    @override
    def configure_ddp(self) -> None:
        """Broadcast weights and buffers of the first process."""
        assert self.model is not None
        with torch.no_grad():
            for tensor in [*self.model.parameters(), *self.model.buffers()]:
                first = tensor.detach().contiguous()
                torch.distributed.broadcast(first, src=0)
                tensor.copy_(first)

    @override
    def process_dataloader(self, dataloader: object) -> object:
        """Evaluate every example once, where Lightning would repeat some for equal shares."""
        batches = getattr(dataloader, "batch_sampler", None)
        for owner in (dataloader, batches):
            sampler = getattr(owner, "sampler", None)
            if isinstance(sampler, DistributedSampler) and not sampler.drop_last:
                _without_padding(sampler)
        return super().process_dataloader(dataloader)

    def on_validation_start(self) -> None:
        """Begin to reduce the values that the module logs."""
        assert self.lightning_module is not None
        self._logs = EvaluationLogs(self.lightning_module).start()

    def on_validation_end(self) -> None:
        """Restore the module's own logging."""
        if self._logs is not None:
            self._logs.stop()

    on_test_start, on_test_end = on_validation_start, on_validation_end

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        """Evaluate a batch, with its size as the weight of logged means."""
        with self._weighing(*args):
            return super().validation_step(*args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        """Evaluate a batch, with its size as the weight of logged means."""
        with self._weighing(*args):
            return super().test_step(*args, **kwargs)

    @contextlib.contextmanager
    def _weighing(self, batch: Any, *args: Any) -> Iterator[None]:
        assert self._logs is not None
        self._logs.batch = batch
        try:
            yield
        finally:
            self._logs.batch = None

    @override
    def on_exception(self, exception: BaseException) -> None:
        """End the processes that this process started: they would wait for it."""
        super().on_exception(exception)
        if self.launcher is not None:
            self.launcher.kill(getattr(signal, "SIGKILL", signal.SIGTERM))


def _without_padding(sampler: DistributedSampler[object]) -> None:
    """Set shares of unequal length; if some would be empty, all processes evaluate everything.

    A process without a batch would not know the names of the metrics to reduce; means over examples do
    not change if all processes evaluate the same examples.
    """
    num_examples = len(sampler.dataset)  # type: ignore[arg-type]
    if num_examples < sampler.num_replicas:
        sampler.rank, sampler.num_replicas = 0, 1
    sampler.total_size = num_examples
    sampler.num_samples = len(range(sampler.rank, num_examples, sampler.num_replicas))


StrategyRegistry.register(
    "federated", FederatedStrategy, description="several processes, each with its own clients"
)
