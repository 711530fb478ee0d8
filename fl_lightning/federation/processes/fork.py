"""Launching forked processes, and bringing their results into the parent process.

Forking takes milliseconds, needs nothing to be picklable and works in notebooks. When all processes have
ended, the parent loads the results of the first one, so that it can test or report as if it had fitted.

If a process fails, its error is raised in the parent, and the other processes are ended because they may wait
for it. Lightning calls the callbacks' ``on_exception`` in the parent, where nothing has been trained. So the
first process calls them as well: a callback such as `lightning.pytorch.callbacks.OnExceptionCheckpoint` may
save a checkpoint. That process then no longer communicates, because the others may have ended.

`torch.multiprocessing` starts the processes and ends them with the parent. It would report only the text of an
error; here the error itself reaches the parent.
"""

from __future__ import annotations

import contextlib
import gc
import io
import multiprocessing.connection
import os
import pickle
import secrets
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn, TrainerState
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor, distributed
from torch.multiprocessing.spawn import start_processes

from fl_lightning.core.errors import ConfigurationError, Interrupted, ProcessFailure
from fl_lightning.federation.checkpoints.files import WorkingFolder
from fl_lightning.federation.logs import add_metrics, logged_in_round
from fl_lightning.federation.loop import load_progress, progress
from fl_lightning.federation.processes.interruption import interruption_of
from fl_lightning.federation.stages.privacy_ledger import Spent, note_spent, spent_on

# Longest wait for the first process to fail as well, and then to save its checkpoints.
_SECONDS_TO_FAIL, _SECONDS_TO_SAVE = 1.0, 120.0


class ForkLauncher:
    """Lightning launcher that runs a Trainer's function in several forked processes on CPUs.

    Args:
        strategy: the strategy of the processes.

    Attributes:
        is_within: whether this is a forked process, not the parent.
        ends_all: True: a process that gets SIGTERM ends at once, and the parent ends the others.
    """

    is_interactive_compatible = True
    ends_all = True

    def __init__(self, strategy: DDPStrategy) -> None:
        self.is_within = False
        self._strategy = strategy
        self._processes: list[Any] = []
        self._has_fitted = False

    def launch(
        self, function: Callable[..., Any], *args: Any, trainer: Trainer, **kwargs: Any
    ) -> Any:
        """Run a Trainer's function in every forked process, and return the first process's result.

        Raises:
            ProcessFailure: if a process was killed. An error that a process raised is raised unchanged.
        """
        fits = trainer.state.fn == TrainerFn.FITTING
        if fits and self._has_fitted:
            raise ConfigurationError(
                "fit was called twice on a Trainer with several processes, whose state was lost when the first "
                "fit ended: build another Trainer, and continue with fit(ckpt_path=…)"
            )
        self._has_fitted |= fits
        _check_can_fork()
        self._processes = []  # forked processes must not hold those of an earlier launch
        _name_runs(trainer)
        assert self._strategy.cluster_environment is not None
        _ = self._strategy.cluster_environment.main_port  # chosen now, the same for all
        interruption = interruption_of(trainer) if fits else None
        with (
            interruption.passed_on(self.kill) if interruption else nullcontext(),
            WorkingFolder(Path(tempfile.gettempdir()), "fl_lightning_") as folder,
            warnings.catch_warnings(),
        ):
            # newer Pythons warn of threads at a fork; the child processes use one thread each
            warnings.filterwarnings("ignore", ".*fork", DeprecationWarning)
            # a signal that arrives now is delivered once the process can handle it
            _mask_signals(signal.SIG_BLOCK)
            try:
                context = start_processes(
                    self._run,
                    args=(trainer, folder, function, args, kwargs),
                    nprocs=self._strategy.num_processes,
                    start_method="fork",
                    join=False,
                )
            finally:
                _mask_signals(signal.SIG_UNBLOCK)
            self._processes = context.processes
            try:
                _wait(self._processes, folder)
            except BaseException:
                _wait_for_first(self._processes[0], folder / "error_0")
                # callbacks here would save the state of a process in which nothing was trained
                kept = [c for c in trainer.callbacks if not isinstance(c, Checkpoint)]  # type: ignore[attr-defined]
                trainer.callbacks = kept  # type: ignore[attr-defined]
                raise
            finally:
                self.kill(signal.SIGKILL)
            outcome: TrainerOutcome = torch.load(folder / "outcome", weights_only=False)
        return outcome.bring_into(trainer)

    def kill(self, signum: int) -> None:
        """Send a signal to the forked processes that still run.

        Raises:
            SIGTERMException: in a forked process, where Lightning's handler of SIGTERM calls this method
                and would then wait for the other processes, which may wait for this one.
        """
        if self.is_within and signum == signal.SIGTERM:
            raise SIGTERMException
        for process in self._processes:
            if process.is_alive():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signum)
        if signum == signal.SIGKILL:
            for process in self._processes:
                process.join()

    def _run(
        self,
        local_rank: int,
        trainer: Trainer,
        folder: Path,
        function: Callable[..., Any],
        args: Any,
        kwargs: Any,
    ) -> None:
        """Run the Trainer's function in a forked process, which starts with signals blocked."""
        gc.freeze()  # objects of the parent may have threads, for which freeing them here would wait
        torch.set_num_threads(1)
        self.is_within = True
        os.environ["LOCAL_RANK"] = str(local_rank)
        self._strategy.set_world_ranks()
        note = folder / f"error_{local_rank}"
        try:
            try:
                _mask_signals(signal.SIG_UNBLOCK)
                result = function(*args, **kwargs)
                if local_rank == 0:
                    torch.save(TrainerOutcome.of(trainer, result), folder / "outcome")
                    _end_runs(trainer)
            except BaseException as error:
                _write_error(error, note)
                if local_rank == 0:
                    self._call_on_exception(trainer, error)
                    _end_runs(trainer)
                raise
        except Interrupted as stop:  # also one that comes while another error is being written
            _mask_signals(signal.SIG_BLOCK)
            _write_error(stop, note)  # it replaces the other error
            sys.exit(stop.exit_code)
        finally:
            # nothing is left to interrupt, and nothing would catch the exception
            _mask_signals(signal.SIG_BLOCK)

    def _call_on_exception(self, trainer: Trainer, error: BaseException) -> None:
        """Call the callbacks' ``on_exception`` in the first forked process, where they may save checkpoints."""
        for number in (signal.SIGINT, signal.SIGTERM):  # a second Ctrl-C must not stop the saving
            signal.signal(number, signal.SIG_IGN)
        if distributed.is_initialized():
            distributed.destroy_process_group()  # no process waits for another any more
        self._strategy.barrier = lambda *_, **__: None  # type: ignore[method-assign]
        self._strategy.broadcast = lambda value, *_, **__: value  # type: ignore[method-assign]
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            callback.on_exception(trainer, trainer.lightning_module, error)


def can_fork() -> bool:
    """Return whether this process can be forked: the system supports it, and PyTorch has started no threads."""
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    has_threads = any(name.startswith("pt_autograd") for name in names)
    return "fork" in multiprocessing.get_all_start_methods() and not has_threads


def num_usable_cores() -> int:
    """Return the number of processes that can compute at once at full speed.

    That is the number of usable physical cores: two threads of a core share its arithmetic units.
    """
    from joblib import cpu_count  # slow to import

    return int(cpu_count(only_physical_cores=True))


def _check_can_fork() -> None:
    if not can_fork():
        raise ConfigurationError(
            "this process cannot be forked any more: PyTorch has started threads in it, for a GPU or because "
            "something was compiled before the first backward pass. Restart it (the notebook's kernel) and "
            "run this fit first, or use trainer.devices: 1"
        )


def _mask_signals(how: int) -> None:
    """Block or unblock the signals that stop a run, in this process and in processes forked later."""
    # the signals of `Interruption`; not every system has them
    signal.pthread_sigmask(how, (signal.SIGINT, signal.SIGTERM, signal.SIGALRM))


def _wait(processes: list[Any], folder: Path) -> None:
    """Wait until all processes are done; raise the error of the first that failed."""
    notes = [folder / f"error_{rank}" for rank in range(len(processes))]
    running = {process.sentinel: process for process in processes}
    while running:
        for sentinel in multiprocessing.connection.wait(list(running)):
            running.pop(sentinel).join()
        for rank, process in enumerate(processes):
            if process.exitcode and not notes[rank].exists():
                raise ProcessFailure(_ended_silently(rank, processes))
        if written := [note for note in notes if note.exists()]:
            # the first error; others may have failed later because they waited for this process
            raise _read_error(min(written, key=lambda note: note.stat().st_mtime_ns))


def _ended_silently(rank: int, processes: list[Any]) -> str:
    code = processes[rank].exitcode
    how = f"by {signal.Signals(-code).name}" if code < 0 else f"with code {code}"
    return (
        f"process {rank} of {len(processes)} was ended {how}, without an error of its own, probably for lack "
        "of memory: free some, and resume from the last completed round with ckpt_path: last"
    )


def _wait_for_first(process: Any, note: Path) -> None:
    """Give the first process time to save its checkpoints, if it has failed as well."""
    process.join(_SECONDS_TO_FAIL)
    if note.exists():
        process.join(_SECONDS_TO_SAVE)


class ProcessTraceback(Exception):  # noqa: N818 - it is the cause of an error, not one itself
    """Holds a traceback from another process as text, and the traceback of that error's cause, or None."""

    def __str__(self) -> str:
        return f"\n\n{self.args[0]}"


def traceback_behind(error: BaseException) -> str | None:
    """Return the traceback of an error's cause as text; None without a cause."""
    cause = error.__cause__
    if isinstance(cause, ProcessTraceback):
        return cause.args[1]  # type: ignore[no-any-return]
    return None if cause is None else "".join(traceback.format_exception(cause))


def _write_error(error: BaseException, path: Path) -> None:
    """Write an error and its traceback to a file, atomically."""
    where, behind = "".join(traceback.format_exception(error)), traceback_behind(error)
    try:
        content = pickle.dumps((error, where, behind))
        pickle.loads(content)  # some errors can be written but not read
    except Exception:  # noqa: BLE001 - whatever a user's error does when it is pickled
        content = pickle.dumps((RuntimeError(f"{type(error).__name__}: {error}"), where, None))
    unfinished = path.with_name(f"{path.name}.unfinished")
    unfinished.write_bytes(content)
    unfinished.rename(path)


def _read_error(path: Path) -> BaseException:
    """Read an error that another process has written; its ``__cause__`` holds that process's traceback."""
    error, *traces = pickle.loads(path.read_bytes())
    assert isinstance(error, BaseException)
    error.__cause__ = ProcessTraceback(*traces)
    return error


def _name_runs(trainer: Trainer) -> None:
    """Choose the run versions of loggers in the parent process, so that all forked processes use the same.

    W&B writes its buffer when Python exits. A forked process ends without that, so it ends its run itself.
    The parent, in a test after the fit, opens the same run again by its name.
    """
    for logger in trainer.loggers:
        if isinstance(logger, (TensorBoardLogger, CSVLogger)):
            _ = logger.version
        elif isinstance(logger, WandbLogger) and logger._experiment is None and not logger._id:
            logger._id = logger._wandb_init["id"] = f"w{secrets.token_hex(4)}"


def _end_runs(trainer: Trainer) -> None:
    """Finish every open run of W&B in this process, so that it writes its buffer."""
    for logger in trainer.loggers:
        if isinstance(logger, WandbLogger) and logger._experiment is not None:
            logger._experiment.finish()


@dataclass(frozen=True)
class TrainerOutcome:
    """Result of a Trainer's function in a forked process, and the Trainer's state after it."""

    # return value of the function; None for predictions, of which each process has a part
    result: Any
    state: TrainerState  # the Trainer's state
    weights: dict[str, Tensor] | None  # the module's weights, after a fit
    metrics: dict[str, Tensor]  # the Trainer's ``callback_metrics``
    new: set[str]  # names of the metrics of the last round
    progress: dict[str, Any]  # counters of rounds
    # after a fit: pickled state of each callback by Lightning's key, or the text of the error of pickling
    callbacks: dict[str, bytes | str]
    spent: Spent  # privacy cost of the module's fits

    @classmethod
    def of(cls, trainer: Trainer, result: Any) -> TrainerOutcome:
        """Collect a Trainer's state, and its function's result, in the forked process that ran the function."""
        fitted = trainer.state.fn == TrainerFn.FITTING
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        return cls(
            result=None if trainer.state.fn == TrainerFn.PREDICTING else result,
            state=trainer.state,
            weights=trainer.lightning_module.state_dict() if fitted else None,
            metrics=dict(trainer.callback_metrics),
            new=set(logged_in_round(trainer)),
            progress=progress(trainer),
            callbacks={c.state_key: _or_error(partial(_pickled, c)) for c in callbacks if fitted},
            spent=spent_on(trainer.lightning_module),
        )

    def bring_into(self, trainer: Trainer) -> Any:
        """Load the state into the parent process's Trainer, and return the function's result."""
        if self.weights is not None:
            # as a fit in one process leaves it, e.g. in double precision
            module = trainer.precision_plugin.convert_module(trainer.lightning_module)
            module.load_state_dict(self.weights, strict=False)
            load_progress(trainer, self.progress)
        trainer.state = self.state
        add_metrics(trainer, self.metrics, self.new)
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            state = self.callbacks.get(callback.state_key, b"")
            failure = _or_error(partial(_load, callback, state))
            if failure:
                warnings.warn(
                    f"the state of the callback {type(callback).__name__} after the fit could not be copied from "
                    f"the process that trained ({failure}): its state_dict must be picklable, and its "
                    "load_state_dict must work before setup and on_fit_start",
                    stacklevel=2,
                )
        if self.spent.delta:
            note_spent(trainer.lightning_module, lambda: self.spent)
        return self.result


def _or_error(call: Callable[[], Any]) -> Any:
    """Call a function of a user's callback; return its result, or the text of its error."""
    try:
        return call()
    except Exception as error:  # noqa: BLE001 - whatever a user's callback raises
        return f"{type(error).__name__}: {error}"


def _pickled(callback: Callback) -> bytes:
    file = io.BytesIO()
    torch.save(callback.state_dict(), file)
    return file.getvalue()


def _load(callback: Callback, pickled: bytes | str) -> str | None:
    """Load a callback's pickled state; if pickling had failed, return the text of that error instead."""
    if isinstance(pickled, str):
        return pickled
    if state := torch.load(io.BytesIO(pickled), weights_only=False) if pickled else {}:
        if isinstance(callback, ModelCheckpoint):
            callback.dirpath = state["dirpath"]  # else it is warned of another run's files
        callback.load_state_dict(state)
    return None
