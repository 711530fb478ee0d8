"""The bar of rounds: what stands in it, and for whom there is room."""

import logging
import re
import sys
import warnings
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from terminal_screen import Terminal, seen
from toys import ToyModule, toy_data, validating_trainer

from fl_lightning import (
    ConfigurationError,
    Federation,
    RoundProgressBar,
    RunLog,
    standard_callbacks,
)
from fl_lightning.reports import progress as run_bar
from fl_lightning.reports.log_file import with_place
from fl_lightning.reports.progress import Inner, Pace, number, round_line, run_line
from fl_lightning.reports.screen import plain

NAMES = st.text("abcdefgh/_", min_size=1, max_size=30)
METRICS = st.dictionaries(NAMES, st.floats(-1e9, 1e9), min_size=1, max_size=6)


@hypothesis.given(metrics=METRICS, share=st.floats(0, 1), width=st.integers(60, 160))
def test_metrics_stand_whole_in_their_order_or_not_at_all(metrics, share, width):
    line = plain(run_line("round 7/50", share, "12:03 left", metrics, width), width)
    assert len(line) <= width
    shown = line.split("12:03 left")[1].split("  ")[1:]
    assert shown == [f"{name} {number(value)}" for name, value in metrics.items()][: len(shown)]
    first = (
        f"round 7/50  12:03 left  {next(iter(metrics))} {number(next(iter(metrics.values())))}  "
    )
    assert shown or len(first) > width, "the first one goes before the bar"


def test_the_bar_takes_what_room_is_left():
    line = plain(run_line("round 5/10", 0.5, "0:10 left", {}, 79))
    assert line == f"round 5/10  {'━' * 15}{' ' * 15}  0:10 left"
    assert "━" not in plain(run_line("round 5/10", 0.5, "0:10 left", {"a" * 40: 1.0}, 72))


class TestTheTimeThatIsLeft:
    def test_it_is_that_of_the_last_rounds_without_the_first(self, monkeypatch):
        now = [0.0]
        monkeypatch.setattr(run_bar.time, "monotonic", lambda: now[0])
        pace = Pace()
        assert pace.words(4) == ""
        for seconds, said in ((60, "3:00 left"), (10, "0:20 left"), (20, "0:15 left")):
            pace.begin()
            now[0] += seconds
            pace.end()
            assert pace.words(4) == said
        now[0] += 5
        assert pace.words(3) == "in 1:35"
        assert pace.words(None) == "in 1:35"


def test_a_part_of_a_round_has_its_own_count():
    inner = Inner("clients", 5)
    inner.done = 2
    assert re.fullmatch(r"clients 2/5  ━+ +  0:00", plain(inner.line(77)))
    assert plain(Inner("batches", float("inf")).line(77)) == "batches 0  0:00"
    assert plain(Inner("writing report.html", 0).line(77)) == "writing report.html  0:00"


def test_the_line_of_a_round_says_how_many_clients_counted():
    for logged, said in (
        ({"cohort_size": 1, "skipped": 0}, "1 client"),
        ({"cohort_size": 10, "skipped": 2}, "8 of 10 clients (2 skipped)"),
        ({"cohort_size": 9, "skipped": 2, "lost": 1}, "6 of 9 clients (2 skipped, 1 lost)"),
    ):
        trainer = validating_trainer(max_epochs=3)
        for name, value in logged.items():
            trainer.callback_metrics[f"round/{name}"] = torch.tensor(float(value))
        assert round_line(trainer) == f"epoch 1/3: {said}"


def test_a_warning_of_this_package_has_no_place_in_the_code():
    assert with_place("skipped: client 3", UserWarning, run_bar.__file__, 7) == "skipped: client 3"
    elsewhere = with_place("careful", UserWarning, "mine.py", 7)
    assert elsewhere == "careful (UserWarning, mine.py:7)"


def test_impossible_options_are_refused_and_a_bar_that_was_never_opened_is_not_closed():
    with pytest.raises(ConfigurationError, match=r"refresh_rate must be .* at least 0"):
        RoundProgressBar(-1)
    with pytest.raises(ConfigurationError, match="level must be one of 'debug', 'info'"):
        RunLog("loud")
    # where processes are started, nobody sets callbacks up, and all hear of an exception
    RoundProgressBar().on_exception(None, None, RuntimeError())
    RunLog().on_exception(None, None, RuntimeError())


def test_companions_say_all_there_is_without_a_second_of_anything(tmp_path, caplog, capsys):
    """A fit in Python: overview, rounds, results, and everything in the log file."""
    bar = RoundProgressBar()
    trainer = validating_trainer(
        Federation(seed=0),
        *standard_callbacks(bar, log_level="debug"),
        logger=CSVLogger(tmp_path, name="", version=""),
        enable_progress_bar=True,
        enable_checkpointing=True,
        max_epochs=2,
    )
    assert [c for c in trainer.callbacks if isinstance(c, RoundProgressBar)] == [bar]
    before = logging.getLogger("fl_lightning").level, len(logging.getLogger().handlers)
    with caplog.at_level(logging.INFO):
        trainer.fit(ToyModule(), datamodule=toy_data(client_val_fraction=0.3))
    assert before == (logging.getLogger("fl_lightning").level, len(logging.getLogger().handlers))
    log = (tmp_path / "run.log").read_text()
    for said in ("| INFO | data: ", "| INFO | model: ToyModule, ", "| INFO | federation: "):
        assert log.count(said) == 1
    assert len(re.findall(r"\| INFO \| round \d/2: ", log)) == 2
    table = capsys.readouterr().out
    assert re.search(r"model +clients +std +worst 10 %", table)
    assert "results of the model after round 2" in table
    assert float(trainer.callback_metrics["clients/val/loss_mean"]) > 0


class Printing(ToyModule):
    def on_train_epoch_end(self):
        self.print(f"epoch {self.current_epoch} is over")


@pytest.mark.parametrize("rate", [0, 1])
def test_a_module_prints_by_lightnings_own_call(rate, capsys):
    bar = RoundProgressBar(refresh_rate=rate)
    trainer = validating_trainer(
        Federation(local_steps=1), bar, enable_progress_bar=True, max_epochs=2
    )
    trainer.fit(Printing(), datamodule=toy_data())
    printed = capsys.readouterr().out
    assert [printed.count(f"epoch {n} is over") for n in (0, 1)] == [1, 1]


class Careful(ToyModule):
    def on_train_epoch_end(self):
        warnings.warn("careful", UserWarning, stacklevel=1)


@pytest.mark.filterwarnings("default:careful")
def test_a_log_ahead_of_the_federation_shows_warnings_of_a_second_fit(tmp_path):
    for version in range(2):
        logger = CSVLogger(tmp_path, "toy", version=version)
        trainer = validating_trainer(
            RunLog(), Federation(local_steps=1), max_epochs=1, logger=logger
        )
        trainer.fit(Careful(), datamodule=toy_data())
        said = Path(logger.log_dir, "run.log").read_text()
        assert said.count("careful") == 1


def test_a_calibration_counts_in_the_same_place(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    bar = RoundProgressBar()
    bar.setup(validating_trainer(bar, enable_progress_bar=True), None, "fit")
    with bar.counting(bar.trainer, "Calibration", 3) as tick:
        tick()
        print("said meanwhile", file=sys.stderr)
        lines = seen(terminal.getvalue().replace("\n", "\r\n"), 80)
    assert lines[0] == "said meanwhile"
    assert re.match(r"Calibration 1/3  ━+╺?━+  0:", lines[1])
    assert seen(terminal.getvalue().replace("\n", "\r\n"), 80) == ["said meanwhile", ""]
