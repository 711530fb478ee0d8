"""k-means: Lloyd's step against scikit-learn, metrics against scikit-learn, federated on iris."""

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule, seed_everything
from sklearn import metrics as oracle
from sklearn.cluster import KMeans as Oracle
from torch import nn
from toys import SaveEverywhere, toy_data, validating_trainer, weights

from fl_lightning import ClientEvaluation, FederatedDataModule, Federation
from fl_lightning.data import Iris, LabelShards
from fl_lightning.models import KMeans
from fl_lightning.server import ClusterFedAvg


def iris(num_clients=5, **options):
    return FederatedDataModule(Iris(seed=0), num_clients=num_clients, seed=0, **options)


def whole(rows):
    """All vectors and species of a set."""
    return rows.gather(torch.arange(len(rows)))


def fit(module, data, *callbacks, max_epochs=3, ckpt_path=None, devices=1, **options):
    seed_everything(1, verbose=False)
    federation = Federation(**{"local_epochs": 3, "seed": 1, **options})
    trainer = validating_trainer(federation, *callbacks, max_epochs=max_epochs, devices=devices)
    trainer.fit(module, datamodule=data, ckpt_path=ckpt_path)
    return trainer


def test_one_client_is_lloyd():
    """Ten local steps on the whole set end where scikit-learn does from the same start."""
    data = iris(num_clients=1)
    data.setup("fit")
    vectors = whole(data.source.train_set)[0]
    module = KMeans(3, 4, start="common")
    module.centroids.data.copy_(vectors[[0, 40, 80]])
    start = vectors[[0, 40, 80]].double().numpy()
    fit(module, data, local_epochs=10, max_epochs=1)
    expected = Oracle(3, init=start, n_init=1, max_iter=10, tol=0).fit(vectors.double().numpy())
    np.testing.assert_allclose(
        module.centroids.detach().numpy(), expected.cluster_centers_, atol=2e-6
    )


def test_central_training_needs_nothing_else():
    data = Iris(seed=0)
    data.setup("fit")
    module = KMeans(3, 4, start="common")
    module.centroids.data.copy_(whole(data.train_set)[0][[0, 40, 80]])
    trainer = validating_trainer(max_epochs=10, log_every_n_steps=1, check_val_every_n_epoch=10)
    trainer.fit(module, datamodule=data)
    assert float(trainer.callback_metrics["val/v_measure"]) > 0.6


def test_scores_are_those_of_scikit_learn():
    module, data = KMeans(3, 4), iris()
    trainer = fit(module, data, aggregator=ClusterFedAvg(3))
    vectors, labels = whole(data.source.val_set)
    found = module(vectors)
    for name, score in {
        "homogeneity": oracle.homogeneity_score,
        "completeness": oracle.completeness_score,
        "v_measure": oracle.v_measure_score,
        "adjusted_rand": oracle.adjusted_rand_score,
    }.items():
        value = float(trainer.callback_metrics[f"val/{name}"])
        assert value == pytest.approx(score(labels, found), abs=1e-5), name
    nearest = torch.cdist(vectors, module.centroids).amin(1).square().mean()
    assert float(trainer.callback_metrics["val/inertia"]) == pytest.approx(nearest.item(), rel=1e-5)


def test_clients_of_one_species_each_find_all_three_together():
    """Each start is drawn by a client of its own flowers; the mean by position would be nonsense."""
    options = {"partition": LabelShards(classes_per_client=2)}
    together, apart = KMeans(3, 4, seed=0), KMeans(3, 4, seed=0)
    merged = fit(together, iris(**options), aggregator=ClusterFedAvg(3), max_epochs=5)
    averaged = fit(apart, iris(**options), max_epochs=1)
    assert float(merged.callback_metrics["val/v_measure"]) > 0.7
    first = float(averaged.callback_metrics["val/v_measure"])
    assert first < float(merged.callback_metrics["val/v_measure"])


def test_scores_of_each_client(tmp_path, capsys):
    module = KMeans(3, 4)
    data = iris(client_val_fraction=0.3)
    from lightning.pytorch.loggers import CSVLogger

    seed_everything(1, verbose=False)
    federation = Federation(aggregator=ClusterFedAvg(3), seed=1)
    logger = CSVLogger(tmp_path)
    trainer = validating_trainer(federation, ClientEvaluation(), max_epochs=2, logger=logger)
    trainer.fit(module, datamodule=data)
    [table] = tmp_path.rglob("clients_validation.csv")
    head, *rows = table.read_text().splitlines()
    assert "val/adjusted_rand" in head
    assert "val/homogeneity" in head
    assert len(rows) == 5


def test_resumes_to_the_same_bits(tmp_path):
    options = {"aggregator": ClusterFedAvg(3)}
    whole = KMeans(3, 4, seed=0)
    fit(whole, iris(), SaveEverywhere(tmp_path), **options)
    for moment in ("0-trained", "1-end"):
        module = KMeans(3, 4, seed=0)
        fit(module, iris(), ckpt_path=tmp_path / f"{moment}.ckpt", **options)
        assert torch.equal(weights(module), weights(whole)), moment


def test_two_processes_find_the_same_centroids():
    ends = [KMeans(3, 4, seed=0) for _ in range(2)]
    for devices, module in enumerate(ends, 1):
        fit(module, iris(), devices=devices, aggregator=ClusterFedAvg(3))
    assert torch.equal(ends[0].centroids, ends[1].centroids)


class SetsItsOwn(LightningModule):
    """A module without a gradient: its step puts the mean of what it sees into its parameter."""

    def __init__(self):
        super().__init__()
        self.mean = nn.Parameter(torch.zeros(4))

    def training_step(self, batch, batch_idx):
        self.mean.data.copy_(batch[0].mean(0))
        self.log("train/size", float(len(batch[0])))

    def validation_step(self, batch, batch_idx):
        pass

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


def test_an_update_need_not_be_a_gradient_step():
    """What a client sends is where it began minus where it ended, however it got there."""
    data, module = toy_data(batch_size=60), SetsItsOwn()
    trainer = fit(module, data, local_epochs=1, max_epochs=2)
    pooled = data.source.train.tensors[0].mean(0)
    torch.testing.assert_close(module.mean.detach(), pooled, rtol=0, atol=1e-6)
    assert "train/size" in trainer.callback_metrics
