"""``trainer.strategy: federated``: several processes, each training other clients of a round.

Clients train independently, so no gradients are exchanged and the module is not wrapped. The processes
start from the same weights, exchange results once per round, and share validation and test.

Processes evaluate different examples. Values that the module logs per epoch are therefore reduced over
processes, as with ``sync_dist=True``; means are weighted by batch sizes. Values that are logged per step
are not reduced: the processes' numbers of steps differ.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.data import extract_batch_size
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch.utils.data import DistributedSampler
from typing_extensions import override

from fl_lightning.client.log_collector import shadowed
from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.metrics import kept_apart, metrics_of
from fl_lightning.federation.hooks import overrides
from fl_lightning.federation.processes.fork import ForkLauncher
from fl_lightning.federation.processes.ranks import Ranks

# Hooks in which modules and callbacks compute values of all examples.
_ENDS = ("on_validation_epoch_end", "on_test_epoch_end")
# Packages whose callbacks compute none, or exchange what they need.
_KNOWN = ("fl_lightning.", "lightning.", "pytorch_lightning.")


class FederatedStrategy(DDPStrategy):
    """Lightning strategy with several processes that train different clients and exchange no gradients.

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
    _evaluates_all = False
    _evaluating: contextlib.ExitStack | None = None  # closed when an evaluation ends

    @property
    @override
    def launcher(self) -> ForkLauncher | None:  # type: ignore[override]
        """Launcher of the processes: forks them on CPUs, else Lightning's own."""
        environment = self.cluster_environment
        if self._fork is None and environment is not None and self.parallel_devices:
            on_cpu = self.parallel_devices[0].type == "cpu"
            can_fork = on_cpu and "fork" in multiprocessing.get_all_start_methods()
            if can_fork and not environment.creates_processes_externally:
                self._fork = ForkLauncher(self)
        return self._fork or super().launcher  # type: ignore[return-value]

    @override
    def setup_environment(self) -> None:
        """Join the group of processes, and silence Lightning's warnings that do not apply."""
        # a warning about repeated examples, which `process_dataloader` avoids
        warnings.filterwarnings("ignore", message="Using `DistributedSampler` with the dataloaders")
        # where every process evaluates all examples
        warnings.filterwarnings("ignore", message=r".*`self.log\(.*sync_dist=True\)` when logging")
        super().setup_environment()

    @override
    def setup(self, trainer: Trainer) -> None:
        """Set up module and optimizers; raise for a fit without a federation.

        Raises:
            ConfigurationError: for a fit without a federation, which would train a module per process.
        """
        in_rounds = getattr(trainer.datamodule, "trains_in_rounds", False)  # type: ignore[attr-defined]
        if trainer.state.fn == TrainerFn.FITTING and not in_rounds:
            raise ConfigurationError(
                "trainer.strategy federated exchanges no gradients, so it cannot train without a federation: "
                "add a federation block (or a Federation to the callbacks), or use trainer.strategy ddp"
            )
        super().setup(trainer)

    @override
    def configure_ddp(self) -> None:
        """Copy the first process's weights and buffers to all processes; no DDP wrapper is added."""
        assert self.model is not None
        assert self.lightning_module is not None
        ranks = Ranks(self.lightning_module.trainer)
        with torch.no_grad():
            for tensor in [*self.model.parameters(), *self.model.buffers()]:
                first = tensor.detach().contiguous()
                ranks.broadcast(first, source=0)
                tensor.copy_(first)

    @override
    def process_dataloader(self, dataloader: object) -> object:
        """Change a loader's sampler so that no example is repeated; Lightning would repeat some for equal shares."""
        batches = getattr(dataloader, "batch_sampler", None)
        assert self.lightning_module is not None
        is_prediction = self.lightning_module.trainer.predicting
        self._evaluates_all = self._computes_at_the_end and not is_prediction
        for owner in (dataloader, batches):
            sampler = getattr(owner, "sampler", None)
            whole = self._evaluates_all
            if isinstance(sampler, DistributedSampler) and (whole or not sampler.drop_last):
                _without_padding(sampler, whole=whole)
        return super().process_dataloader(dataloader)

    @property
    def _computes_at_the_end(self) -> bool:
        """True if the module or a callback may compute a value from all examples, such as a quantile.

        It is no mean of the processes' values, so that every process evaluates all examples.
        """
        module = self.lightning_module
        assert module is not None
        owners = (module, *module.trainer.callbacks)  # type: ignore[attr-defined]
        others = [o for o in owners if not type(o).__module__.startswith(_KNOWN)]
        return any(overrides(owner, hook) for owner in others for hook in _ENDS)

    def on_validation_start(self) -> None:
        """Replace the module's logging, so that values are reduced over processes."""
        self.on_validation_end()  # of an evaluation that failed
        module, self._evaluating = self.lightning_module, contextlib.ExitStack()
        assert module is not None
        self._logs = EvaluationLogs(module, is_shared=not self._evaluates_all)
        self._evaluating.enter_context(self._logs.listening())
        if self._evaluates_all:  # exchanged states would count each example once per process
            self._evaluating.enter_context(kept_apart(metrics_of(module)))

    def on_validation_end(self) -> None:
        """Restore the module's own logging."""
        if self._evaluating is not None:
            self._evaluating.close()

    on_test_start, on_test_end = on_validation_start, on_validation_end

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        """Run the validation step on a batch, whose size is the weight of the logged means."""
        with self._weighing(*args):
            return super().validation_step(*args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        """Run the test step on a batch, whose size is the weight of the logged means."""
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
        """End the processes that this process started, because they would wait for it."""
        super().on_exception(exception)
        if self.launcher is not None:
            self.launcher.kill(getattr(signal, "SIGKILL", signal.SIGTERM))


class EvaluationLogs:
    """Reduces over processes the values that a module logs per epoch in validation and test.

    Args:
        module: the module, whose own ``log`` and ``log_dict`` get the values.
        is_shared: True if each process evaluates a part of the examples, False if each evaluates all.

    Attributes:
        batch: the batch of the current step; None between steps.
    """

    def __init__(self, module: LightningModule, *, is_shared: bool = True) -> None:
        self.batch: Any = None
        self._module, self._is_shared = module, is_shared
        self._log, self._log_dict = module.log, module.log_dict

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Reduce over processes the values that the module logs inside the block."""
        with (
            shadowed(self._module, "log", self.log),
            shadowed(self._module, "log_dict", self.log_dict),
        ):
            yield

    def log(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        """Log a value, to be reduced over processes; the arguments are those of `LightningModule.log`."""
        self._reduce(options)
        if self.batch is not None:
            size = options.get("batch_size")
            size = extract_batch_size(self.batch) if size is None else size
            # Lightning divides a whole number of examples by the number of processes and rounds down
            options["batch_size"] = float(size)
        self._log(name, value, *args, **options)

    def log_dict(self, dictionary: Any, *args: Any, **options: Any) -> None:
        """Log several values, to be reduced over processes; Lightning's ``log_dict`` calls `log` for each."""
        self._reduce(options)
        self._log_dict(dictionary, *args, **options)

    def _reduce(self, options: dict[str, Any]) -> None:
        if not self._is_shared:  # a sum would count each example once per process
            reduction = options.get("reduce_fx", "mean")
            options["sync_dist"] = getattr(reduction, "__name__", reduction) != "sum"
        elif not options.get("on_step"):
            options.setdefault("sync_dist", True)


def _without_padding(sampler: DistributedSampler[object], *, whole: bool) -> None:
    """Give each process its share of the examples, none repeated, or, if ``whole``, all examples.

    Every process also gets all examples if a share would be empty, because a process without a batch would not
    know the names of the metrics to reduce. Means over examples do not change.
    """
    num_examples = len(sampler.dataset)  # type: ignore[arg-type]
    if whole or num_examples < sampler.num_replicas:
        sampler.rank, sampler.num_replicas = 0, 1
    sampler.total_size = num_examples
    sampler.num_samples = len(range(sampler.rank, num_examples, sampler.num_replicas))


StrategyRegistry.register(
    "federated", FederatedStrategy, description="several processes, each with its own clients"
)
