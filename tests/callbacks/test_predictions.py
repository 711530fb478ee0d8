"""What predict returns, as a file."""

import csv

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from fl_lightning.callbacks.predictions import Predictions


class Answers(LightningModule):
    def __init__(self, answer):
        super().__init__()
        self.answer = answer

    def predict_step(self, batch, index, dataloader_idx=0):
        return self.answer(batch[0])


class Stream(IterableDataset):
    def __iter__(self):
        yield from ((torch.tensor([float(n)]),) for n in range(3))


def loader(count=5, **options):
    return DataLoader(TensorDataset(torch.arange(float(count)).unsqueeze(1)), 2, **options)


def predict(answer, loaders, folder):
    writer = Predictions()
    trainer = Trainer(
        callbacks=[writer],
        default_root_dir=folder,
        logger=False,
        accelerator="cpu",
        enable_progress_bar=False,
    )
    return writer, trainer.predict(Answers(answer), loaders)


def rows_of(path):
    with path.open() as file:
        return list(csv.reader(file))


@pytest.mark.parametrize(
    ("answer", "names", "row"),
    [
        (lambda x: x[:, 0], ["prediction"], ["3.0"]),
        (lambda x: torch.cat([x, 2 * x], 1), ["prediction_0", "prediction_1"], ["3.0", "6.0"]),
        (lambda x: x[:, 0] > 1, ["prediction"], ["True"]),
    ],
)
def test_tensors_become_rows_of_the_examples(answer, names, row, tmp_path):
    writer, _ = predict(answer, loader(), tmp_path)
    first, *rows = rows_of(writer.path)
    assert first == ["loader", "row", *names]
    assert rows[3] == ["0", "3", *row]
    assert len(rows) == 5


@pytest.mark.filterwarnings("ignore:predict returned None")
def test_several_loaders_are_numbered(tmp_path):
    def answer(x):
        return x[:, 0] if len(x) == 3 else None  # nothing for the first loader

    writer, _ = predict(answer, [loader(2), DataLoader(loader(3).dataset, 3)], tmp_path)
    head, *rows = rows_of(writer.path)
    assert head == ["loader", "row", "prediction"]
    assert [row[:2] for row in rows] == [["1", "0"], ["1", "1"], ["1", "2"]]


def test_examples_of_a_stream_are_counted(tmp_path):
    writer, _ = predict(lambda x: x[:, 0], DataLoader(Stream(), 2), tmp_path)
    assert [row[1:] for row in rows_of(writer.path)[1:]] == [
        ["0", "0.0"],
        ["1", "1.0"],
        ["2", "2.0"],
    ]


@pytest.mark.parametrize(
    "answer", [lambda x: {"mean": x.mean(), "rows": x}, lambda x: torch.zeros(len(x), len(x))]
)
def test_what_is_no_table_is_kept_as_it_is(answer, tmp_path):
    writer, given = predict(answer, loader(), tmp_path)
    assert writer.path == tmp_path / "predictions.pt"
    found = torch.load(writer.path, weights_only=True)
    torch.testing.assert_close(found, [given], rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:predict returned None")
def test_a_file_that_is_there_stays_and_nothing_is_written_where_nothing_is_predicted(tmp_path):
    writer, _ = predict(lambda x: None, loader(), tmp_path)
    assert writer.path is None
    assert not list(tmp_path.iterdir())
    (tmp_path / "predictions.csv").write_text("mine")
    writer, _ = predict(lambda x: x[:, 0], loader(), tmp_path)
    assert writer.path == tmp_path / "predictions_1.csv"
    assert (tmp_path / "predictions.csv").read_text() == "mine"
