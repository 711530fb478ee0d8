"""Lightning's command line with a ``federation:`` block; without the block, the same files train centrally."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import yaml
from jsonargparse import get_loader, set_loader
from jsonargparse.typing import PositiveInt
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter, Checkpoint, ModelCheckpoint
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.model_helpers import is_overridden
from typing_extensions import override

from fl_lightning.callbacks.client_evaluation import ClientEvaluation
from fl_lightning.callbacks.predictions import Predictions
from fl_lightning.callbacks.standard_callbacks import standard_callbacks
from fl_lightning.cli.checks import check_values
from fl_lightning.cli.configs import with_paths
from fl_lightning.cli.devices import asks_for_several, automatic_processes, take_what_was_started
from fl_lightning.cli.errors import Parser, bug_behind, built_trainer, explain
from fl_lightning.cli.help import OPTIONS
from fl_lightning.cli.names import expanded, whole
from fl_lightning.cli.runs import (
    RunConfig,
    console,
    how_to_resume,
    in_columns,
    report_whereabouts,
    write_atomically,
)
from fl_lightning.cli.yaml_files import interpolating, loader
from fl_lightning.core.errors import ConfigurationError, Interrupted, check_range
from fl_lightning.data.federated import FederatedDataModule
from fl_lightning.federation import (
    EarlierRun,
    Federation,
    Interruption,
    check_checkpoint,
    check_strategy,
    checkpoint_folders,
    clean_up_after,
    find_run,
    interruptible,
    keep_rows,
    resume_loggers,
    set_folder,
    take_folders,
)
from fl_lightning.reports.evaluated_model import ResultsTable, shown_path
from fl_lightning.reports.layout import in_lines
from fl_lightning.reports.log_file import Level, detail, take_early_messages
from fl_lightning.reports.overview import DryRun
from fl_lightning.reports.run_report import RunReport
from fl_lightning.reports.screen import clear_leftovers

# YAML with short class names
_SHORT = "short"
set_loader(_SHORT, loader(get_loader("yaml")), exceptions=(yaml.YAMLError,))
# with references between options: ${model.image_size}
set_loader("omegaconf", loader(interpolating(get_loader("yaml"))), exceptions=(yaml.YAMLError,))
set_loader("omegaconf+", loader(get_loader("yaml")), exceptions=(yaml.YAMLError,))


class FederatedCLI(LightningCLI):
    """Lightning's command line with a ``federation`` block and runs that can be resumed.

    For a script of your own, whose subcommands then are ``fit``, ``validate``, ``test`` and ``predict``:

        if __name__ == "__main__":
            FederatedCLI(MyModule, MyDataModule)

    Args:
        model_class: a `LightningModule`, whose options are ``--model.…``; if None, ``--model`` names any class.
        datamodule_class: a `LightningDataModule`. A data module that is not federated becomes the ``source``
            of `FederatedDataModule`: ``--data.num_clients 10 --data.source.batch_size 32``. If None,
            ``--data`` names any class.
        options: further options of `LightningCLI`, some with other defaults. Without ``args``, the command line
            of the process is read, and a configuration error ends the process with one sentence. With
            ``run=False`` model, data and Trainer are built for a fit, and nothing runs.
    """

    def __init__(
        self,
        model_class: type[LightningModule] | None = None,
        datamodule_class: type[LightningDataModule] | None = None,
        **options: Any,
    ) -> None:
        self._source, self._command = datamodule_class, ""
        if datamodule_class is None or issubclass(datamodule_class, FederatedDataModule):
            self._source = None
        else:  # the option ``source`` accepts any class
            options.pop("subclass_mode_data", None)
        ours: dict[str, Any] = {
            "save_config_callback": RunConfig,
            "save_config_kwargs": {"save_to_log_dir": False},
            "seed_everything_default": 0,
            "auto_configure_optimizers": False,
            "parser_class": Parser,
            "parser_kwargs": {
                "description": "Federated learning for PyTorch Lightning.",
                "allow_abbrev": False,
                "parser_mode": _SHORT,
                **(options.pop("parser_kwargs", None) or {}),
            },
        }
        args = options.pop("args", None)
        data = datamodule_class if self._source is None else FederatedDataModule
        run = partial(super().__init__, model_class, data, **{**ours, **options})
        is_ours = data is not None and data.__module__.startswith("fl_lightning.")

        def read(words: list[str]) -> list[str]:
            words = whole(with_paths(words), data=is_ours)
            self._command = words[0] if words else ""
            return words

        if args is None:
            ended_with_a_sentence(lambda: run(args=read(sys.argv[1:])))
        else:
            run(args=read(args) if isinstance(args, list) else expanded(args))

    def _prepare_subcommand_parser(
        self, klass: type, subcommand: str, **kwargs: Any
    ) -> LightningArgumentParser:
        """Return a subcommand's parser; it has no options if the command line names another subcommand, to save 0.2 s."""
        if self._command in self.subcommands() and subcommand != self._command:
            return self.init_parser(**kwargs)
        return super()._prepare_subcommand_parser(klass, subcommand, **kwargs)

    @property
    def _settings(self) -> Any:
        """Parsed options of the subcommand; all parsed options with ``run=False``, which has no subcommand."""
        return self.config.get(str(self.config.get("subcommand")), self.config)

    @override
    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add this package's options to those of Lightning; to add your own, override `add_arguments_to_parser`."""
        super().add_core_arguments_to_parser(parser)
        if self._source is not None:
            path = f"{self._source.__module__}.{self._source.__qualname__}"
            parser.set_defaults({"data.source": {"class_path": path}})
        for name, kind, default in (
            ("federation", Federation | None, None),
            ("test_after_fit", bool, True),
            ("report", bool, True),
            ("num_threads", PositiveInt | None, None),
            ("dry_run", bool, False),
            ("resume_changed", bool, False),
            ("log_level", Level, "info"),
        ):
            parser.add_argument(f"--{name}", type=kind, default=default, help=OPTIONS[name])

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse the command line, and check values that Lightning accepts although they cannot work."""
        super().parse_arguments(parser, args)
        check_values(self._settings)

    def _parse_ckpt_path(self) -> None:
        """If the command evaluates a model, read the model's options from the checkpoint, as Lightning does.

        A fit keeps the given options, which Lightning would silently replace by the checkpoint's. Instead,
        they are compared with the configuration of the checkpoint's run.
        """
        is_fit = self.config.get("subcommand") == "fit"
        given = None if is_fit else self._settings.get("ckpt_path")
        if given and Path(given).is_file():
            check_checkpoint(Path(given))
            super()._parse_ckpt_path()

    @override
    def instantiate_classes(self) -> None:
        """Set the number of threads, find the run that ``--ckpt_path`` names, and build all objects."""
        config = self._settings
        if config.get("num_threads") is not None:
            check_range("num_threads", config.num_threads, "from 1 to 1024")
            torch.set_num_threads(config.num_threads)
        self._run: EarlierRun | None = None
        if self._is_dry:
            self._leave_nothing(config)
        is_evaluation = self.subcommand in ("validate", "test", "predict")
        if is_evaluation and config.get("ckpt_path") is None and not _names_weights(config.model):
            rank_zero_info(
                "ckpt_path: no checkpoint is given, so the model has its initial weights"
            )
        if config.get("ckpt_path") is not None:
            plain = yaml.safe_load(
                self.parser.dump(self.config, skip_none=False, skip_validation=True)
            )
            is_fit = self.subcommand == "fit"
            run = find_run(config, plain[self.subcommand], is_fit=is_fit)
            self._run = run if is_fit else None
        resume_loggers(config, self._run)
        super().instantiate_classes()
        if self._run is not None:  # the saved configuration is that from the start of the run
            config["ckpt_path"] = self._run.config.get("ckpt_path")

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Build the Trainer with its callbacks: the federation, the configuration's, and those that every run has."""
        federation = self._get(self.config_init, "federation")
        options = self._get(self.config_init, "trainer")
        given = self._given(options)
        options["callbacks"] = [*given]
        if self.subcommand == "fit":
            self._interruption = Interruption()
            options["callbacks"].insert(
                0, self._interruption
            )  # ahead of callbacks that start a round
        if self._is_fit and not options["fast_dev_run"]:
            set_folder(options, self._run)
        take_what_was_started(options)
        if options["enable_model_summary"] is None:
            # the overview has a line about the model, the log file its layers
            options["enable_model_summary"] = False
        if federation is not None:
            options["callbacks"].append(federation)
            self._choose_processes(options, federation)
        if self._is_dry:
            options["callbacks"].insert(1, DryRun(options, federation, self.datamodule))
        options["callbacks"] += self._standard_callbacks(
            given, options, is_federated=federation is not None
        )
        trainer = built_trainer(partial(super().instantiate_trainer, **kwargs), options)
        write_atomically(trainer)
        if self._is_fit:
            self._take_folders(trainer)
        if federation is not None and self._is_fit:
            check_strategy(trainer)
        return trainer

    def _take_folders(self, trainer: Trainer) -> None:
        """Create the folders of a new fit, or clean up those of a resumed fit."""
        take_folders(trainer, self._run)
        if self._run is not None and trainer.is_global_zero:
            clean_up_after(self._run)
            keep_rows(trainer, check_checkpoint(self._run.checkpoint))

    def _given(self, options: Mapping[str, Any]) -> list[Callback]:
        """Return the configuration's callbacks; in a dry run, they write checkpoints only into a temporary folder."""
        given = options.get("callbacks") or []
        given = given if isinstance(given, list) else [given]
        if not self._is_dry:
            return given
        for callback in given:
            if isinstance(callback, ModelCheckpoint):
                callback.dirpath = None
        return [c for c in given if isinstance(c, ModelCheckpoint) or not isinstance(c, Checkpoint)]

    def _standard_callbacks(
        self, given: Sequence[Callback], options: Mapping[str, Any], *, is_federated: bool
    ) -> list[Callback]:
        """Return the callbacks that every run has, except those that the configuration has already."""
        own = self._settings
        self._results = ResultsTable(
            waits_for_test=self.subcommand is not None and own.test_after_fit,
            is_wanted=own.get("verbose", True) and not self._is_dry,
        )
        found = standard_callbacks(
            *(*given, self._results),
            log_level=own.log_level,
            progress_bar=options["enable_progress_bar"] is not False,
            checkpoint=is_federated and options["enable_checkpointing"] is not False,
            is_federated=is_federated,
            report=False,  # added below, with options of the command line
        )
        if self.subcommand == "predict" and not any(
            isinstance(c, BasePredictionWriter) for c in given
        ):
            found.append(Predictions())
        if self.subcommand != "predict" and not any(isinstance(c, RunReport) for c in given):
            found.append(RunReport(page=own.report, waits_for_test=self.subcommand is not None))
        evaluates = (ClientEvaluation,) if self._is_dry else ()
        return [each for each in found if each not in given and not isinstance(each, evaluates)]

    def _choose_processes(self, options: Any, federation: Federation) -> None:
        """Set ``devices: auto`` to one process per core if clients train on CPUs, and choose the strategy."""
        if self._is_fit:
            num_threads = self._settings.num_threads
            count = automatic_processes(options, federation, self.datamodule, num_threads)
            if count > 1:
                options["devices"], options["strategy"] = count, "federated"
                rank_zero_info(
                    f"trainer.devices: {count} processes of one thread each, by the number of cores; with "
                    "--trainer.devices 1, this process trains alone",
                    **detail(),
                )
        if options["strategy"] == "auto" and asks_for_several(options):
            options["strategy"] = "federated"
            rank_zero_info(
                "trainer.strategy: federated, because there are several devices", **detail()
            )

    @property
    def _is_dry(self) -> bool:
        """True if the command only estimates the costs of a fit."""
        return bool(self.subcommand == "fit" and self._settings.dry_run)

    def _leave_nothing(self, config: Any) -> None:
        """Send the files of a dry run into a temporary folder, which is removed at the end."""
        if config.ckpt_path is not None:
            raise ConfigurationError(
                "dry_run: it cannot estimate a resumed run: leave out ckpt_path"
            )
        self._scratch = TemporaryDirectory(prefix="fl_dry_run_")
        config.trainer.default_root_dir = self._scratch.name
        config.trainer.logger = config.trainer.logger is not False
        config.trainer.profiler = None
        config.report = config.test_after_fit = False

    @property
    def _is_fit(self) -> bool:
        """True if the Trainer is built for a fit, also with ``run=False``."""
        return self.subcommand in (None, "fit")

    def fit(self, *args: Any, **kwargs: Any) -> None:
        """Fit the model; if it is interrupted, print how to resume."""
        # the checkpoints of a dry run are removed, so that it cannot be resumed
        folders = [] if self._is_dry else checkpoint_folders(self.trainer)
        try:
            self.trainer.fit(*args, **kwargs)
        except Interrupted as stop:
            raise Interrupted(stop.signum, how_to_resume(folders)) from stop
        finally:
            if self._is_dry:
                self._scratch.cleanup()
        take_early_messages()  # else they would be written twice: a child process has logged them
        if self._interruption.is_asked:  # during the last round
            raise Interrupted(signal.SIGINT, how_to_resume(folders))

    def after_fit(self) -> None:
        """Test the last model, and print the paths of checkpoints, logs and report."""
        if self._is_dry:
            return
        data = self.datamodule
        self._results.keep(self.trainer)
        is_wanted = self._settings.test_after_fit
        has_test = is_overridden("test_step", self.model, LightningModule)
        has_data = data is not None and is_overridden("test_dataloader", data, LightningDataModule)
        wants_test = is_wanted and has_test and has_data
        # Lightning returns nothing from a test without examples
        if not wants_test or not self.trainer.test(self.model, datamodule=data, verbose=False):
            if is_wanted:  # the table and the report have waited for this test
                self._results.report(self.trainer)
            for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
                if isinstance(callback, RunReport) and callback.waits_for_test:
                    callback.finish(self.trainer)
        report_whereabouts(self.trainer, data)

    def after_predict(self) -> None:
        """Print the path of the file of predictions."""
        for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, Predictions) and callback.path is not None:
                print(f"\n{in_columns(f'predictions: {shown_path(str(callback.path))}')}")

    def validate(self, **kwargs: Any) -> None:
        """Validate the model; `ResultsTable` prints the metrics instead of Lightning."""
        self.trainer.validate(**{**kwargs, "verbose": False})

    def test(self, **kwargs: Any) -> None:
        """Test the model; `ResultsTable` prints the metrics instead of Lightning."""
        self.trainer.test(**{**kwargs, "verbose": False})


def _names_weights(model: Any) -> bool:
    """Return whether an option of a model, or of its network, names pretrained weights."""
    own = ("pretrained", "checkpoint_path", "weights")
    return any(value and name.rpartition(".")[2] in own for name, value in model.items())


def ended_with_a_sentence(run: Callable[[], None]) -> None:
    """Run a function; if the user can correct its error, print one sentence instead of a traceback and exit.

    The exit code is 1 for such errors, and for Ctrl-C and SIGTERM the usual one of the shell.
    """
    try:
        with interruptible(), console():
            run()
    except Interrupted as stop:
        clear_leftovers()
        print(in_lines(f"fl-lightning: {stop}", sys.stderr), file=sys.stderr)
        sys.exit(stop.exit_code)
    except SIGTERMException:
        sys.exit(Interrupted(signal.SIGTERM).exit_code)
    except Exception as error:
        sentence = explain(error)
        if sentence is None:
            raise
        clear_leftovers()
        print(bug_behind(error), end="", file=sys.stderr)
        sys.exit(in_lines(f"fl-lightning: {sentence}", sys.stderr))
