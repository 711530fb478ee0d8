"""Local models on the common test set: whose they are, and that nothing changes by looking at them."""

import csv

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from toys import ToyModule, toy_data, validating_trainer, weights

from fl_lightning import (
    CentralDP,
    ClientEvaluation,
    ConfigurationError,
    Federation,
    Personal,
    PoissonCohort,
    RunReport,
    UniformCohort,
)


def fit(
    folder,
    *,
    clients=3,
    rounds=2,
    every=0,
    local_models=True,
    callbacks=(),
    batch_norm=True,
    **options,
):
    federation = Federation(local_steps=3, **options)
    evaluation = ClientEvaluation(every_n_rounds=every, local_models=local_models)
    logger = CSVLogger(folder, "toy", version=0)
    trainer = validating_trainer(
        evaluation, federation, *callbacks, max_epochs=rounds, logger=logger
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = ToyModule(batch_norm=batch_norm)
    trainer.fit(module, datamodule=toy_data(num_clients=clients))
    return module, trainer, folder / "toy" / "version_0" / "local_models.csv"


def losses(path):
    """Return (round, client) to test loss."""
    with path.open() as file:
        rows = [*csv.DictReader(file)]
    return {(int(r["round"]), r["client"]): float(r["test/loss"]) for r in rows}


def plain_loss(module, trainer):
    (batches,) = (trainer.datamodule.test_dataloader(),)
    module.eval()
    with torch.no_grad():
        parts = [(torch.nn.functional.cross_entropy(module.net(x), y), len(y)) for x, y in batches]
    return float(sum(loss * n for loss, n in parts)) / sum(n for _, n in parts)


@pytest.mark.parametrize("engine", ["sequential", "slots"])
def test_of_one_client_the_local_model_is_the_next_global_one(tmp_path, engine):
    module, trainer, path = fit(tmp_path, clients=1, engine=engine)
    found = losses(path)
    assert found.keys() == {(1, "0"), (1, "global"), (2, "0"), (2, "global")}
    for number in (1, 2):
        assert found[number, "0"] == pytest.approx(found[number, "global"], abs=1e-6)
    assert found[2, "global"] == pytest.approx(plain_loss(module, trainer), abs=1e-6)
    assert found[1, "global"] != found[2, "global"]


def test_local_models_differ_while_the_server_stays(tmp_path):
    _, _, path = fit(tmp_path, server_optimizer=lambda params: torch.optim.SGD(params, lr=0.0))
    found = losses(path)
    assert len({found[1, client] for client in "012"}) == 3
    assert all(found[1, client] != found[1, "global"] for client in "012")


def test_looking_changes_nothing(tmp_path):
    seen, _, _ = fit(tmp_path / "a", cohort=UniformCohort(fraction=0.5), every=1)
    unseen, _, path = fit(
        tmp_path / "b", cohort=UniformCohort(fraction=0.5), every=1, local_models=False
    )
    assert torch.equal(weights(seen), weights(unseen))
    assert not path.exists()


@pytest.mark.filterwarnings("ignore:Experiment logs directory")
def test_every_nth_round_in_one_table_that_the_report_draws(tmp_path):
    path = tmp_path / "toy" / "version_0" / "local_models.csv"
    path.parent.mkdir(parents=True)
    path.write_text("round,client,test/loss\n2,global,7.0\n9,global,7.0\n")
    fit(tmp_path, rounds=4, every=2, callbacks=[RunReport()])
    assert {number for number, _ in losses(path)} == {2, 4}
    assert 7.0 not in losses(path).values()  # of a run before
    assert (path.parent / "figures" / "local_models_and_the_global_one-test_loss.svg").exists()
    with (path.parent / "metrics.csv").open() as file:
        logged = [row for row in csv.DictReader(file) if row.get("local/test/loss_mean")]
    own = [losses(path)[4, client] for client in "012"]
    assert float(logged[-1]["local/test/loss_mean"]) == pytest.approx(sum(own) / 3, abs=1e-6)
    assert float(logged[-1]["global/test/loss"]) == pytest.approx(losses(path)[4, "global"])


def test_personal_layers_are_part_of_a_local_model(tmp_path):
    _, _, path = fit(tmp_path, clients=1, rounds=1, personal=Personal(["net.4.*"]))
    found = losses(path)
    assert found[1, "0"] != pytest.approx(found[1, "global"], abs=1e-6)


def test_privacy_names_them_as_what_no_noise_covers(tmp_path):
    private = CentralDP(clip_norm=1.0, noise_multiplier=1.0)
    with pytest.warns(UserWarning, match="not: .*local models on the common test set"):
        fit(tmp_path, rounds=1, privacy=private, batch_norm=False)
    central = validating_trainer(ClientEvaluation(local_models=True))
    with pytest.raises(ConfigurationError, match="add a Federation"):
        central.fit(ToyModule(), datamodule=toy_data())


@pytest.mark.filterwarnings("ignore:Experiment logs directory")
def test_a_new_fit_in_an_old_folder_keeps_no_row_of_the_old_one(tmp_path):
    fit(tmp_path, rounds=3, every=1)
    *_, path = fit(tmp_path, rounds=2, every=2)  # ends before the old one, and skips a round
    assert {number for number, _ in losses(path)} == {2}


@pytest.mark.filterwarnings("ignore:privacy")
def test_a_private_round_without_updates_has_no_local_models(tmp_path):
    private = CentralDP(clip_norm=1.0, noise_multiplier=1.0)
    nobody = PoissonCohort(fraction=1e-9)
    *_, path = fit(tmp_path, rounds=1, cohort=nobody, privacy=private, batch_norm=False)
    assert losses(path).keys() == {(1, "global")}
