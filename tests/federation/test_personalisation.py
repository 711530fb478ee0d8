"""Personalisation: reductions, closed forms, what clients remember, how they are evaluated."""

import csv
from queue import SimpleQueue

import pytest
import torch
from lightning.pytorch import LightningModule, seed_everything
from lightning.pytorch.loggers import CSVLogger
from quadratics import Quadratic, trajectory
from test_corrections import Climbing, First, Searching, scaler
from test_masks import Masked, NewMasks
from torch.nn.functional import cross_entropy
from toys import (
    SaveEverywhere,
    ToyModule,
    federated,
    toy_data,
    toy_trainer,
    validating_trainer,
    weights,
)

from fl_lightning import (
    APFL,
    ClientEvaluation,
    ClientFailure,
    ConfigurationError,
    Ditto,
    FedDyn,
    Federation,
    FedProx,
    FineTuned,
    Mean,
    Personal,
    RoundFailure,
    Scaffold,
    UniformCohort,
)
from fl_lightning.client import Devices, LogNormalSpeeds
from fl_lightning.federation import recalled_models
from fl_lightning.server import FedBuff


class Rich(ToyModule):
    """With dropout and batch norm."""

    def __init__(self):
        super().__init__(dropout=0.3, batch_norm=True)


HEAD = ["net.4.*"]
KINDS = {
    "FedPer": Personal(HEAD),
    "FedBN": Personal(norms=True),
    "FedRep": Personal(HEAD, own_epochs=2),
    "Ditto": Ditto(pull=0.5),
    "APFL": APFL(),
}


def run(personal, module=Rich, *callbacks, ckpt_path=None, trainer=None, data=None, **block):
    """Fit three rounds of three of six clients, and return module and federation."""
    options = {"cohort": UniformCohort(size=3), "local_epochs": 2, "engine": "sequential"}
    data = data or toy_data(batch_size=4, drop_last=True)
    given = {"data": data, "ckpt_path": ckpt_path, "trainer": trainer, "personal": personal}
    fitted = federated(module, ahead=callbacks, **given, **options | block)
    return fitted.module, fitted.federation


def rows(path):
    """Return a table's row of every client."""
    with path.open() as file:
        return {int(row["client"]): row for row in csv.DictReader(file)}


def memories(federation):
    """Return what every client has for itself, by client."""
    present = federation.state_dict()["memory"]["present"]
    return {client: vector for name, client, vector in present if name == "personal"}


class TestReductions:
    @pytest.mark.parametrize("masked", [False, True])
    def test_the_global_model_is_that_of_fedavg_bit_for_bit(self, masked):
        """In fp16, and where masks change, so that entries of a copy are frozen in the model."""

        def end(rule):
            if masked:
                return weights(run(rule, Masked, NewMasks(), trainer={"max_epochs": 4})[0])
            return weights(run(rule, trainer={"plugins": [scaler()]})[0])

        expected = end(None)
        for rule in (Ditto(0.5), APFL()) if masked else (FineTuned(3), Ditto(0.5), APFL()):
            assert torch.equal(end(rule), expected), rule

    def test_with_no_epoch_of_their_own_heads_stay_as_they_are(self):
        class Frozen(Rich):
            def __init__(self):
                super().__init__()
                self.net[4].requires_grad_(False)

        still, federation = run(Personal(HEAD, own_epochs=0))
        assert torch.equal(weights(still), weights(run(None, Frozen)[0]))
        initial = torch.cat([p.detach().flatten() for p in still.net[4].parameters()])
        assert all(torch.equal(vector, initial) for vector in memories(federation).values())

    def test_without_pull_a_copy_is_the_clients_own_training(self):
        """In its first round; of one client the server takes the model as it is."""
        one = {"cohort": UniformCohort(size=1), "trainer": {"max_epochs": 1}}
        module, federation = run(Ditto(pull=0.0), ToyModule, **one)
        shared = torch.cat([p.detach().flatten() for p in module.parameters()])
        [own] = memories(federation).values()
        torch.testing.assert_close(own, shared, rtol=1e-6, atol=1e-7)

    def test_all_of_its_own_in_the_mixture_is_a_copy_without_pull(self):
        pair = [run(rule)[1] for rule in (APFL(mixture=1.0, mixture_rate=0.0), Ditto(pull=0.0))]
        mixed, alone = map(memories, pair)
        assert all(torch.equal(mixed[client], alone[client]) for client in alone)

    def test_nothing_of_its_own_in_the_mixture_is_the_global_model(self):
        module, federation = run(APFL(mixture=0.0, mixture_rate=0.0), ToyModule)
        assert len({tuple(vector.tolist()) for vector in memories(federation).values()}) > 1
        models = federation.personal_models(module.trainer)
        for client in memories(federation):
            before = weights(module)
            with models.of(client):
                assert torch.equal(weights(module), before)

    def test_a_strong_pull_keeps_the_copy_at_the_global_model(self):
        values, federation = trajectory(
            (5, 5), rounds=4, personal=Ditto(1e7), module=Quadratic(lr=1e-7)
        )
        for own in memories(federation).values():
            assert float(own) == pytest.approx(values[-2], abs=1e-5)


class SharedAndOwn(LightningModule):
    """a (x + z - c)² / 2: x is shared, z the client's own."""

    def __init__(self):
        super().__init__()
        self.x = torch.nn.Parameter(torch.zeros((), dtype=torch.float64))
        self.z = torch.nn.Parameter(torch.tensor(1.0, dtype=torch.float64))

    def training_step(self, batch, batch_idx):
        a, c, _ = batch
        return (0.5 * a * (self.x + self.z - c) ** 2).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class TestClosedForms:
    """K local steps of rate η = 0.1 on two quadratics; r is the residual x + z - c."""

    clients = ((1.0, 0.0), (4.0, 10.0))

    def test_fedper(self):
        x, own, expected = 0.0, [1.0, 1.0], []
        for _ in range(3):
            moves = []
            for i, (a, c) in enumerate(self.clients):
                r = x + own[i] - c  # both parts move alike: r shrinks by 1 - 2ηa
                moves.append((r - (1 - 0.2 * a) ** 5 * r) / 2)
                own[i] -= moves[-1]
            x -= sum(moves) / 2
            expected.append(x)
        self.check(Personal(["z"]), expected, own)

    def test_fedrep(self):
        x, own, expected = 0.0, [1.0, 1.0], []
        for _ in range(3):
            moves = []
            for i, (a, c) in enumerate(self.clients):
                r = (x + own[i] - c) * (1 - 0.1 * a) ** 10  # two epochs of z alone
                own[i] = r - x + c
                moves.append(r - (1 - 0.1 * a) ** 5 * r)  # then x alone
            x -= sum(moves) / 2
            expected.append(x)
        self.check(Personal(["z"], own_epochs=2), expected, own)

    def check(self, personal, expected, own):
        values, federation = trajectory((5, 5), personal=personal, module=SharedAndOwn())
        assert values == pytest.approx(expected, rel=1e-12)
        assert [float(memories(federation)[i]) for i in (0, 1)] == pytest.approx(own, rel=1e-12)

    def test_ditto(self):
        pull, plain = 0.5, trajectory((5, 5))[0]
        values, federation = trajectory((5, 5), personal=Ditto(pull))
        assert values == plain
        for client, (a, c) in enumerate(self.clients):
            own = 0.0
            for x in (0.0, *values[:-1]):
                goal = (a * c + pull * x) / (a + pull)
                own = goal + (1 - 0.1 * (a + pull)) ** 5 * (own - goal)
            assert float(memories(federation)[client]) == pytest.approx(own, rel=1e-12)

    def test_apfl(self):
        values, federation = trajectory((5, 5), personal=APFL(mixture=0.25, mixture_rate=0.001))
        assert values == trajectory((5, 5))[0]
        for client, (a, c) in enumerate(self.clients):
            own, alpha = None, 0.25
            for x in (0.0, *values[:-1]):
                share = c + (1 - 0.1 * a) ** 5 * (x - c)
                own, slopes = x if own is None else own, []
                for _ in range(5):
                    gradient = a * (alpha * own + (1 - alpha) * share - c)
                    slopes.append(gradient * (own - share))
                    own -= 0.1 * alpha * gradient
                alpha -= 0.001 * sum(slopes) / 5
                assert 0 < alpha < 1
            memory = federation.rounds.memory
            assert float(memory.get("mixture", client)) == pytest.approx(alpha, rel=1e-12)
            assert float(memories(federation)[client]) == pytest.approx(own, rel=1e-12)

    def test_a_correction_pulls_the_shared_part_alone(self):
        mu, x, own, expected = 0.5, 0.0, [1.0, 1.0], []
        for _ in range(3):
            ends = []
            for i, (a, c) in enumerate(self.clients):
                y = x
                for _ in range(5):
                    gradient = a * (y + own[i] - c)
                    y, own[i] = y - 0.1 * (gradient + mu * (y - x)), own[i] - 0.1 * gradient
                ends.append(y)
            x = sum(ends) / 2
            expected.append(x)
        options = {"personal": Personal(["z"]), "correction": FedProx(mu)}
        assert trajectory((5, 5), module=SharedAndOwn(), **options)[0] == pytest.approx(expected)


def test_personal_parameters_do_not_travel():
    plain, fedper = (run(p, ToyModule)[1].rounds.record.facts() for p in (None, KINDS["FedPer"]))
    for way in ("round/bytes_up", "round/bytes_down"):
        assert plain[way] - fedper[way] == 4 * (8 * 3 + 3)


def test_the_global_model_has_the_initial_ones():
    seed_everything(0, verbose=False)
    initial = Rich().net[4].weight
    module, federation = run(KINDS["FedPer"])
    assert torch.equal(module.net[4].weight, initial)
    assert len({tuple(vector.tolist()) for vector in memories(federation).values()}) == 6


def test_norm_counters_stay_with_the_client():
    data = toy_data(batch_size=4, drop_last=True)
    module, federation = run(KINDS["FedBN"], data=data, cohort=None)
    for client, own in memories(federation).items():
        steps = max(1, data.clients.num_examples[client] // 4)
        assert float(own[-1]) == 3 * 2 * steps * 2  # rounds, epochs, steps, passes in a step
    assert int(module.net[1].num_batches_tracked) == 0


def test_personal_models_of_several_processes_are_known_where_the_fit_began(tmp_path):
    tables = []
    for number in (1, 2):
        options = {"trainer": {"devices": number}, "aggregator": Mean(exact=True)}
        module, federation = run(APFL(), **options)
        logger = CSVLogger(tmp_path / str(number))
        trainer = validating_trainer(federation, ClientEvaluation(), logger=logger)
        trainer.validate(module, toy_data(client_val_fraction=0.3), verbose=False)
        tables.append(rows(tmp_path / logger.log_dir / "clients_validation.csv"))
    assert tables[0] == tables[1]
    assert all(row["personal/val/loss"] != row["val/loss"] for row in tables[0].values())


def test_what_is_frozen_is_frozen_in_personal_layers():
    module, federation = run(Personal(HEAD), Masked)
    masks = [module.masks.get(f"net.4.{n}", torch.ones(3).bool()) for n in ("weight", "bias")]
    mask = torch.cat([mask.flatten() for mask in masks])
    initial = torch.cat([p.detach().flatten() for p in module.net[4].parameters()])
    for own in memories(federation).values():
        assert torch.equal(own[~mask], initial[~mask])
        assert not torch.isclose(own[mask], initial[mask]).all()


def test_clients_of_an_asynchronous_run_keep_theirs():
    block = {"cohort": None, "asynchronous": FedBuff(buffer_size=2, concurrency=4)}
    devices = Devices(speeds=LogNormalSpeeds(sigma=1.0))
    for kind in ("FedPer", "APFL"):
        _, federation = run(KINDS[kind], ToyModule, devices=devices, **block)
        assert 2 <= len(memories(federation)) <= 6


class TestEvaluation:
    def evaluate(self, personal, folder, **options):
        data = toy_data(num_examples=120, batch_size=4, drop_last=True, client_val_fraction=0.3)
        logger = CSVLogger(folder)
        callbacks = (ClientEvaluation(), SaveEverywhere(folder))
        module, federation = run(
            personal, ToyModule, *callbacks, trainer={"logger": logger}, data=data, **options
        )
        return module, federation, data, folder / logger.log_dir / "clients_validation.csv"

    def test_personal_and_global_stand_side_by_side_in_fit_and_validate(self, tmp_path):
        one = {"cohort": UniformCohort(size=1)}
        _, federation, data, path = self.evaluate(KINDS["FedPer"], tmp_path, **one)
        table, trained = rows(path), memories(federation).keys()
        assert 0 < len(trained) < 6
        for client, row in table.items():
            differ = row["personal/val/loss"] != row["val/loss"]
            assert differ == (client in trained)
        again = CSVLogger(tmp_path / "again")
        federation = Federation(personal=KINDS["FedPer"], seed=4)
        trainer = validating_trainer(ClientEvaluation(), federation, logger=again)
        trainer.validate(ToyModule(), data, ckpt_path=tmp_path / "2-end.ckpt", verbose=False)
        assert rows(tmp_path / again.log_dir / "clients_validation.csv") == table

    def test_fine_tuning_is_what_a_client_would_train(self, tmp_path):
        module, federation, data, path = self.evaluate(FineTuned(local_steps=3), tmp_path)
        before = weights(module)
        for client, row in rows(path).items():
            with federation.personal_models(module.trainer).of(client):
                loss, examples = 0.0, 0
                for (x, y), size in data.held_out_batches(client):
                    loss += size * cross_entropy(module.net(x), y).item()
                    examples += size
                assert not torch.equal(weights(module), before)
            assert float(row["personal/val/loss"]) == pytest.approx(loss / examples, rel=1e-5)
        assert torch.equal(weights(module), before)


class TestFailures:
    def test_a_copy_that_diverges_is_the_clients_failure(self):
        with pytest.raises(
            ClientFailure, match=r"in personal steps: its (training loss is nan|update holds NaN)"
        ):
            run(Ditto(pull=1e30))
        with (
            pytest.warns(UserWarning, match=r"skipped: round 1, client \d: in personal steps"),
            pytest.raises(RoundFailure, match="0 of 3 clients"),
        ):
            run(Ditto(pull=1e30), on_client_failure="skip")

    @pytest.mark.parametrize("kind", ["FedRep", "Ditto"])
    def test_slots_decline_steps_of_the_clients_own(self, kind):
        with pytest.warns(UserWarning, match="clients take steps of their own"):
            run(KINDS[kind], ToyModule, engine="slots")

    @pytest.mark.parametrize(
        ("personal", "module", "block", "message"),
        [
            (Personal(["*"]), ToyModule, {}, "every trainable parameter of ToyModule is personal"),
            (APFL(), Searching, {}, "APFL does not work with LBFGS"),
            (Ditto(1.0), Climbing, {}, "federation.personal.pull .* has maximize"),
            (FineTuned(3), Masked, {}, "FineTuned trains with a new optimizer"),
            (Personal(HEAD, own_epochs=1), ToyModule, {"speedups": ["fused_optimizer"]}, "leave speedups out"),
        ],
    )  # fmt: skip
    def test_combinations_that_make_no_sense(self, personal, module, block, message):
        with pytest.raises(ConfigurationError, match=message):
            run(personal, module, **block)

    def test_a_checkpoint_of_another_personalisation(self, tmp_path):
        run(KINDS["FedPer"], ToyModule, SaveEverywhere(tmp_path), trainer={"max_epochs": 1})
        for other in (None, Personal(["net.0.*"]), Ditto(0.5)):
            with pytest.raises(ConfigurationError, match="Personal with 2 tensors, from net"):
                run(other, ToyModule, ckpt_path=tmp_path / "0-end.ckpt")


class CopyDiverges(Quadratic):
    """The second client's second pass over its ten examples, which is its copy's, has no loss."""

    def __init__(self):
        super().__init__(start=3.0)
        self.calls = SimpleQueue()  # which no client's state is

    def training_step(self, batch, batch_idx):
        if batch[0].item() == 4:
            self.calls.put(None)
        loss = super().training_step(batch, batch_idx)
        return loss * float("nan") if self.calls.qsize() > 10 else loss


class TestCorrectionsBesideACopy:
    @pytest.mark.parametrize("correction", [Scaffold("I"), FedDyn(alpha=0.5)])
    def test_they_learn_nothing_from_a_client_whose_copy_fails(self, correction):
        options = {"correction": correction, "personal": Ditto(pull=0.5), "engine": "sequential"}
        one = {"rounds": 1, **options}
        with pytest.warns(UserWarning, match="skipped: round 1, client 1: in personal steps"):
            found, federation = trajectory(
                (10, 10), module=CopyDiverges(), on_client_failure="skip", **one
            )
        expected, alone = trajectory((10, 10), module=Quadratic(start=3.0), cohort=First(), **one)
        first, second = (f.state_dict() for f in (federation, alone))
        assert found == expected
        assert first["memory"] == second["memory"]
        assert first["stages"]["correction"]["mean"] == second["stages"]["correction"]["mean"]

    @pytest.mark.parametrize(
        ("personal", "correction"), [(Ditto(pull=0.5), Scaffold("I")), (APFL(), FedDyn(alpha=0.5))]
    )
    def test_they_learn_from_the_shared_model(self, personal, correction):
        options = {"correction": correction, "engine": "sequential"}
        found, federation = trajectory((10, 10), personal=personal, **options)
        expected, plain = trajectory((10, 10), **options)
        assert found == expected
        present = federation.state_dict()["memory"]["present"]
        learnt = [entry for entry in present if entry[0] == "correction"]
        assert learnt == plain.state_dict()["memory"]["present"]


def test_personal_models_in_files_of_a_process_that_ended_are_not_evaluated(caplog):
    memory = {"present": [("personal", 0, "gone.vector", "float32", 1)]}
    saved = {"personal": {"names": ["bias"]}, "memory": memory}
    with caplog.at_level("INFO"):
        assert recalled_models(toy_trainer(), KINDS["FedRep"], 0, None, saved) is None
    assert "evaluate them from a checkpoint, with ckpt_path" in caplog.text
