"""What somebody sees who runs a command: at a terminal of 80 and 120 columns, and without one."""

import re
from pathlib import Path

import pytest
import typed
from terminal_screen import seen, typed_at_a_terminal

CONFIG = str(Path(__file__).parents[2] / "configs" / "quickstart.yaml")
WORDS = [
    *("fl-lightning", "fit", "--config", CONFIG, "--trainer.max_epochs", "3"),
    *("--federation.local_epochs", "1"),
]
ONE = ["--trainer.devices", "1"]
BEFORE = {
    80: """\
data        Digits, 20 clients with 58 to 59 examples, 1,174 in all; 5 of 10
            classes each
model       ImageClassifier (VisionTransformer), 152,074 parameters
optimizer   AdamW, lr 0.003
federation  5 of 20 clients a round, 1 local epoch, 3 rounds; Mean
machine     CPU, 2 processes of 1 thread
run         runs/quickstart/version_0
bytes       a client sends about 609 kB and receives 609 kB a round; 5 clients
            in 3 rounds: 9.13 MB and 9.13 MB
engine      sequential, because 36 local steps do not repay a trial
""",
    120: """\
data        Digits, 20 clients with 58 to 59 examples, 1,174 in all; 5 of 10 classes each
model       ImageClassifier (VisionTransformer), 152,074 parameters
optimizer   AdamW, lr 0.003
federation  5 of 20 clients a round, 1 local epoch, 3 rounds; Mean
machine     CPU, 2 processes of 1 thread
run         runs/quickstart/version_0
bytes       a client sends about 609 kB and receives 609 kB a round; 5 clients in 3 rounds: 9.13 MB and 9.13 MB
engine      sequential, because 36 local steps do not repay a trial
""",
}
AFTER = """
results of the model after round 3, the last one of this fit

               model  clients    std  worst 10 %
test/accuracy  #        -       -           -
test/loss      #        -       -           -
val/accuracy   #    #   #       #
val/loss       #    #   #       #
"""


@pytest.fixture(scope="module", params=[80, pytest.param(120, marks=pytest.mark.slow)])
def shown(request, tmp_path_factory):
    """The number of columns, everything that was written, and the screen at the end."""
    columns = request.param
    folder = tmp_path_factory.mktemp(f"columns_{columns}")
    devices = ["--trainer.devices", "2"]
    code, written = typed_at_a_terminal([*WORDS, *devices], folder, columns)
    assert code == 0, written[-2000:]
    return columns, written, seen(written, columns)


def without_numbers(text):
    """Return a text in which measured numbers, which depend on the processor, are one sign."""
    return re.sub(r"\d+\.\d{3,}|\d\.\d+e-\d+", "#", text)


class TestAtATerminal:
    def test_before_the_first_round_there_are_few_lines(self, shown):
        columns, _, lines = shown
        end = next(i for i, line in enumerate(lines) if line.startswith("round 3/3"))
        assert end <= 12
        assert "\n".join(lines[:end]) + "\n" == BEFORE[columns]

    def test_the_bar_counts_rounds_and_shows_the_monitored_metric_first(self, shown):
        columns, written, lines = shown
        bars = [
            line
            for line in re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;]*m", "", written))
            if "round 1/3" in line
        ]
        assert any(
            re.search(r"round 1/3  ━+[╺╸]?━+  0:\d\d left  val/accuracy 0\.", b) for b in bars
        )
        [last] = [line for line in lines if line.startswith("round 3/3")]
        assert re.fullmatch(r"round 3/3  ━+  in 0:\d\d  val/accuracy \S+  val/loss \S+.*", last)
        assert re.search(r"[\d.]+$", last), "a metric was cut off"
        assert len(last) < columns
        assert ("train/loss" in last) == (columns == 120)

    def test_at_the_end_there_are_results_files_and_the_next_command(self, shown):
        columns, written, lines = shown
        assert "writing report.html  0:0" in written
        end = next(i for i, line in enumerate(lines) if line.startswith("round 3/3"))
        table = "\n".join(lines[end + 1 : end + 9])
        squeezed = re.sub(r" +", " ", without_numbers(table))
        assert squeezed == re.sub(r" +", " ", AFTER.rstrip("\n"))
        files = " ".join(" ".join(lines[end + 9 :]).split())
        folder = "runs/quickstart/version_0"
        for said in (
            f"report {folder}/report.html",
            f"checkpoint {folder}/checkpoints/last.ckpt (after round 3)",
            f"messages {folder}/run.log",
            "look tensorboard --logdir runs",
        ):
            assert said in files
        command = f"fl-lightning validate --config {folder}/config.yaml --ckpt_path {folder}/ch"
        assert f"next        {command}" in written, "a command in several lines cannot be pasted"
        assert all(len(line) <= columns for line in lines)


PRINTING = """
import warnings
import torch
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.loggers import CSVLogger
from fl_lightning import FederatedDataModule, FederatedStrategy, Federation, ImageClassifier, standard_callbacks
from fl_lightning.data import Digits

class Talks(ImageClassifier):
    def training_step(self, batch, batch_idx):
        print("a word")
        print("begun, ", end="")
        print("and ended")
        if batch_idx == 0:
            warnings.warn(f"careful in process {self.global_rank}")
        return super().training_step(batch, batch_idx)

if __name__ == "__main__":
    seed_everything(0, verbose=False)
    trainer = Trainer(
        accelerator="cpu", devices=2, strategy=FederatedStrategy(), max_epochs=2,
        logger=CSVLogger("runs"), enable_model_summary=False,
        callbacks=[Federation(local_steps=1), *standard_callbacks()],
    )
    trainer.fit(Talks("lenet", num_classes=10, in_chans=1, image_size=32),
        datamodule=FederatedDataModule(Digits(image_size=32), num_clients=4))
"""


class TestInPython:
    def test_what_is_printed_stands_on_lines_of_its_own_above_the_bar(self, tmp_path):
        (tmp_path / "printing.py").write_text(PRINTING)
        code, written = typed_at_a_terminal(["python", "-m", "printing"], tmp_path, 80)
        assert code == 0, written
        lines = seen(written, 80)
        assert lines.count("a word") == lines.count("begun, and ended") == 8
        assert all("━" not in line or line.startswith("round 2/2") for line in lines)
        assert "careful in process 0" in "\n".join(lines)
        assert any(line.startswith("federation  4 of 4 clients a round") for line in lines)
        log = next(tmp_path.rglob("run.log")).read_text()
        assert "WARNING | careful in process 0 (UserWarning, " in log
        assert "WARNING | process 1: careful in process 1 (UserWarning, " in log
        assert len(re.findall(r"INFO \| round \d/2: .*train/loss", log)) == 2


class TestWithoutATerminal:
    def run(self, folder, *more):
        said = [folder / "out.txt", folder / "err.txt"]
        import os
        import sys

        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        variables = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}
        process = typed.start([*WORDS, *ONE, *more], folder, variables, said)
        process.join(120)
        assert process.exitcode == 0, said[1].read_text()
        return [path.read_text() for path in said]

    def test_a_round_is_a_line_with_time_and_level(self, tmp_path):
        out, err = self.run(tmp_path, "--log_level", "warning", "--report", "false")
        assert "\r" not in out + err
        assert "\x1b" not in out + err
        for line in err.splitlines():
            assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} \| (INFO|WARNING) \| \S", line)
        rounds = re.findall(
            r"\| INFO \| round (\d)/3: val/accuracy \S+, val/loss .*, 5 clients", err
        )
        assert rounds == ["1", "2", "3"]
        assert "test/accuracy" in out
        log = tmp_path / "runs/quickstart/version_0/run.log"
        assert "INFO" not in log.read_text()

    @pytest.mark.slow
    def test_the_log_file_has_all_that_was_said_and_goes_on_when_resumed(self, tmp_path):
        _, err = self.run(tmp_path)
        log = tmp_path / "runs/quickstart/version_0/run.log"
        first = log.read_text()
        for line in err.splitlines():
            assert line.split(" | ", 1)[1] in first
        assert "Seed set to 0" in first
        assert re.search(r"network\.head +\| Linear +\| 650", first)
        assert first.count("results of the model") == 1
        _, err = self.run(tmp_path, "--trainer.max_epochs", "4", "--ckpt_path", "last")
        assert re.search(r"run: .*, resumed from .*/last.ckpt after round 3\n", err)
        assert log.read_text().startswith(first)
        assert "round 4/4: val/accuracy" in log.read_text()
        assert log.read_text().count("round 3/3:") == 1


def test_a_run_that_fails_leaves_its_reason_in_the_log_file_and_no_bar(tmp_path):
    failing = ["--federation.min_replies", "5", "--federation.on_client_failure", "skip"]
    lr = ["--model.init_args.optimizer.init_args.lr", "1e30"]
    code, written = typed_at_a_terminal([*WORDS, *ONE, *failing, *lr], tmp_path, 80)
    assert code == 1
    lines = seen(written, 80)
    assert any(line.startswith("fl-lightning: round ") for line in lines)
    log = (tmp_path / "runs/quickstart/version_0/run.log").read_text()
    assert re.search(r"ERROR \| RoundFailure: round \d: \d of 5 clients sent a valid update", log)
    assert "    Traceback (most recent call last):" in log
