"""Processes forked from this one, and what comes back from them.

Forking takes milliseconds, needs nothing to be picklable and works in notebooks. When all are done
the first one's results are brought into this process, so that what follows a fit (a test, a message
about checkpoints) goes on as if it had happened here. When one fails, its error is raised here and
the others are ended: they may be waiting for it. Only the first may still save what it has.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing.connection
import os
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.multiprocessing.spawn import start_processes

from fl_lightning.core.errors import ConfigurationError, Interrupted, ProcessFailure
from fl_lightning.federation.checkpoints.memory_files import WorkingFolder
from fl_lightning.federation.processes.interruption import interruption_of
from fl_lightning.federation.processes.last_words import (
    call_on_exception,
    end_runs,
    forget_checkpoints,
    name_runs,
    read_error,
    wait_for_first,
    write_error,
)
from fl_lightning.federation.processes.results import TrainerOutcome
from fl_lightning.federation.processes.shared_memory import Neighbours

if TYPE_CHECKING:
    from lightning.pytorch.strategies import DDPStrategy


class ForkLauncher:
    """What Lightning calls to run a Trainer's function in several processes on CPUs.

    Args:
        strategy: whose processes they are.

    Attributes:
        neighbours: what the processes of a launch are to each other, in each of them.
        ends_all: that one which is asked to end by SIGTERM ends all, without a word to the others.
    """

    is_interactive_compatible = True
    ends_all = True

    def __init__(self, strategy: DDPStrategy) -> None:
        self.neighbours: Neighbours | None = None
        self._strategy = strategy
        self._processes: list[Any] = []
        self._has_fitted = False

    def launch(
        self, function: Callable[..., Any], *args: Any, trainer: Trainer, **kwargs: Any
    ) -> Any:
        """Run a function in every process and return the first one's result.

        Raises:
            ProcessFailure: if a process was ended from outside. Its own error, if it raised one.
        """
        fits = trainer.state.fn == TrainerFn.FITTING
        if fits and self._has_fitted:
            raise ConfigurationError(
                "fit was called twice on a Trainer with several processes, whose state ended with "
                "the first: build another Trainer, and continue with fit(ckpt_path=…)"
            )
        self._has_fitted |= fits
        _check_can_fork()
        self._processes = []  # the new ones have nothing to do with those of another run
        _settle_folders(trainer)
        name_runs(trainer)
        self.neighbours = neighbours = Neighbours(self._strategy.num_processes)
        assert self._strategy.cluster_environment is not None
        _ = self._strategy.cluster_environment.main_port  # chosen now, the same for all
        interruption = interruption_of(trainer) if fits else None
        with (
            interruption.passed_on(self.kill) if interruption else nullcontext(),
            WorkingFolder(Path(tempfile.gettempdir()), "fl_lightning_") as folder,
            warnings.catch_warnings(),
        ):
            # newer Pythons warn of threads when they fork: one thread each is left to the children
            warnings.filterwarnings("ignore", ".*fork", DeprecationWarning)
            _hold_signals()  # one that comes now waits in every process until it can be told of
            try:
                context = start_processes(
                    _run,
                    args=(
                        self._strategy,
                        trainer,
                        neighbours,
                        folder,
                        function,
                        args,
                        kwargs,
                    ),
                    nprocs=self._strategy.num_processes,
                    start_method="fork",
                    join=False,
                )
            finally:
                _let_signals_in()
            self._processes = context.processes
            neighbours.leave()  # this one is none of them
            self.neighbours = None
            try:
                _wait(self._processes, folder)
            except BaseException:
                wait_for_first(self._processes[0], folder / "error_0")
                forget_checkpoints(trainer)
                raise
            finally:
                self.kill(signal.SIGKILL)
            outcome: TrainerOutcome = torch.load(folder / "outcome", weights_only=False)
        return outcome.bring_into(trainer)

    def kill(self, signum: int) -> None:
        """Send a signal to the processes that still run.

        Raises:
            SIGTERMException: in one of them, where Lightning's handler of SIGTERM hands it on by this
                and then waits for the others to hear of it; but they may be waiting for this one.
        """
        if self.neighbours is not None and signum == signal.SIGTERM:
            raise SIGTERMException
        for process in self._processes:
            if process.is_alive():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signum)
        if signum == signal.SIGKILL:
            for process in self._processes:
                process.join()


def can_fork() -> bool:
    """Return whether this process can be divided: not on every system, nor once it has threads."""
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    has_threads = any(name.startswith("pt_autograd") for name in names)
    return "fork" in multiprocessing.get_all_start_methods() and not has_threads


def _check_can_fork() -> None:
    if not can_fork():
        raise ConfigurationError(
            "this process cannot be divided in several any more: PyTorch has started threads in "
            "it, for a GPU or because something was compiled before the first backward pass. "
            "Restart it (the notebook's kernel) and start with this fit, or use devices: 1"
        )


def _settle_folders(trainer: Trainer) -> None:
    """Have loggers choose their version_N here, not one each as soon as the first one exists."""
    for logger in trainer.loggers:
        if isinstance(logger, (TensorBoardLogger, CSVLogger)):
            _ = logger.version


def _run(
    local_rank: int,
    strategy: DDPStrategy,
    trainer: Trainer,
    neighbours: Neighbours,
    folder: Path,
    function: Callable[..., Any],
    args: Any,
    kwargs: Any,
) -> None:
    """What a process does; begins with signals held back."""
    gc.freeze()  # what the parent has left may have threads, and freeing it here wait for them
    torch.set_num_threads(1)
    os.environ["LOCAL_RANK"] = str(local_rank)
    strategy.set_world_ranks()
    neighbours.join(local_rank)
    note = folder / f"error_{local_rank}"
    try:
        try:
            _let_signals_in()
            result = function(*args, **kwargs)
            if local_rank == 0:
                torch.save(TrainerOutcome.of(trainer, result), folder / "outcome")
                end_runs(trainer)
        except BaseException as error:
            write_error(error, note)
            neighbours.leave()  # and need not wait
            if local_rank == 0:
                call_on_exception(trainer, strategy, error)
                end_runs(trainer)
            raise
    except Interrupted as stop:  # also one that comes while another error is being noted
        _hold_signals()
        write_error(stop, note)  # has nothing to tell that the note does not
        neighbours.leave()
        sys.exit(stop.exit_code)
    finally:
        _hold_signals()  # there is nothing left to interrupt, and nobody to catch it


def _hold_signals() -> None:
    """Have what asks to stop wait: in this process, and in those that it forks from now on."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _asking())


def _let_signals_in() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _asking())


def _asking() -> tuple[signal.Signals, ...]:
    """Return the signals that `Interruption` listens to; not every system has them."""
    return signal.SIGINT, signal.SIGTERM, signal.SIGALRM


def _wait(processes: list[Any], folder: Path) -> None:
    """Return when all are done; raise what the first one that failed raised."""
    running = {process.sentinel: process for process in processes}
    while running:
        for sentinel in multiprocessing.connection.wait(list(running)):
            running.pop(sentinel).join()
        notes = [folder / f"error_{rank}" for rank in range(len(processes))]
        for rank, process in enumerate(processes):
            if process.exitcode and not notes[rank].exists():
                raise ProcessFailure(_ended_silently(rank, processes))
        written = [note for note in notes if note.exists()]
        written.sort(key=lambda note: note.stat().st_mtime_ns)
        errors = [read_error(note) for note in written]
        # those that waited for another one in vain may have been faster to end
        causes = [error for error in errors if not isinstance(error, ProcessFailure)]
        if causes or (errors and not running):
            raise (causes or errors)[0]


def _ended_silently(rank: int, processes: list[Any]) -> str:
    code = processes[rank].exitcode
    how = f"by {signal.Signals(-code).name}" if code < 0 else f"with code {code}"
    return (
        f"process {rank} of {len(processes)} was ended {how}, without an error of its own: free "
        "memory if there was too little, and go on from the last round with ckpt_path: last"
    )
