"""Corrections of drift and FedNova: closed forms, reductions, and every way a step is taken."""

import copy
import functools
import itertools
import math
from queue import SimpleQueue

import numpy as np
import pytest
import torch
import torchmetrics
from lightning.pytorch import seed_everything
from lightning.pytorch.plugins.precision import MixedPrecision
from quadratics import Quadratic, TwoQuadratics, trajectory
from test_closures import Sharp
from test_masks import Masked, NewMasks
from torch.utils.data import DataLoader, TensorDataset
from toys import SaveEverywhere, ToyModule, federated, toy, toy_data, weights

from fl_lightning import (
    APFL,
    ClientFailure,
    ConfigurationError,
    Ditto,
    FedDyn,
    FedLC,
    FedProx,
    Mean,
    Moon,
    NormalisedMean,
    Personal,
    Scaffold,
    UniformCohort,
)
from fl_lightning.client import memory as client_memory
from fl_lightning.data import Cohort, LabelShards
from fl_lightning.data.partitions.partition import IID
from fl_lightning.federation.checkpoints.files import memory_folder
from fl_lightning.server import FedAdam

ALIKE = {"weight_by_examples": False}
NOVA = {"aggregator": NormalisedMean(**ALIKE)}

# of two quadratics, with what the clients' optimizer has besides; the last number is where it ends
TRAJECTORIES = {
    "FedProx": ((10, 10), {"correction": FedProx(mu=1.0)}, [3.99609375, 5.50355686, 6.07222346], 6.41668756),
    "SCAFFOLD": ((10, 10), {"correction": Scaffold()}, [4.96976691, 6.85221093, 7.56524145], 8),
    "SCAFFOLD, unequal": ((2, 10), {"correction": Scaffold()}, [4.96976691, 6.85221093, 7.56524145], 8),
    "FedNova": ((2, 10), NOVA, [2.98186015, 4.22474116, 4.74279135], 5.11305153),
    "FedNova, momentum": ((2, 10), NOVA, [1.29298146, 1.03677549, 1.08754304], 1.07914705),
    "FedDyn": ((10, 10), {"correction": FedDyn(alpha=1.0)}, [7.99218750, 8.42906967, 8.13264151], 8),
}  # fmt: skip


@pytest.mark.parametrize("engine", ["sequential", "slots"])
@pytest.mark.parametrize("name", TRAJECTORIES)
def test_two_quadratics_move_as_published_and_end_where_they_should(name, engine):
    copies, options, first, last = TRAJECTORIES[name]
    module = Quadratic(momentum=0.9) if name == "FedNova, momentum" else Quadratic()
    rounds = {"sequential": 60 if name == "FedDyn" else 30, "slots": 3}[engine]
    values, federation = trajectory(copies, rounds=rounds, module=module, engine=engine, **options)
    assert values[:3] == pytest.approx(first, abs=5e-9)
    if engine == "sequential":
        assert values[-1] == pytest.approx(last, abs=5e-9)
    assert (federation.rounds.clients.engine.slots is not None) == (engine == "slots")


class Solved(Quadratic):
    """One step of rate 1 / (a + α) solves a client's regularised problem."""

    def __init__(self, alpha):
        super().__init__()
        self.alpha = alpha

    def training_step(self, batch, batch_idx):
        self.trainer.optimizers[0].param_groups[0]["lr"] = 1 / (batch[0].item() + self.alpha)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("alpha", "expected", "last"),
    [(1.0, [8, 8, 8], 8), (0.1, [9.75609756, 5.76496674, 5.66762209], 7.99998498)],
)
def test_feddyn_with_local_problems_solved_exactly(alpha, expected, last):
    options = {"correction": FedDyn(alpha=alpha), "engine": "sequential"}
    values, _ = trajectory((1, 1), rounds=200 if alpha < 1 else 3, module=Solved(alpha), **options)
    assert values[:3] == pytest.approx(expected, abs=5e-9)
    assert values[-1] == pytest.approx(last, abs=5e-9)


def test_scaffold_with_full_gradients():
    """c_i = a_i (x - z_i), so that a step of the client is one of the mean objective, but for a_i."""
    x, expected = 0.0, []
    variates = [0.0, 0.0]
    for _ in range(3):
        mean, ends = sum(variates) / 2, []
        gradients = [1.0 * x, 4.0 * (x - 10)]
        for (a, centre), variate in zip(((1.0, 0.0), (4.0, 10.0)), variates, strict=True):
            y = x
            for _ in range(10):
                y -= 0.1 * (a * (y - centre) - variate + mean)
            ends.append(y)
        x, variates = sum(ends) / 2, gradients
        expected.append(x)
    for engine in ("sequential", "slots"):
        values, _ = trajectory((10, 10), correction=Scaffold("I"), engine=engine)
        assert values == pytest.approx(expected, rel=1e-12)


class Skipping(Quadratic):
    """Its second client skips every second of its batches, or all."""

    def __init__(self, every=2, **options):
        super().__init__(**options)
        self.every = every

    def training_step(self, batch, batch_idx):
        is_second = batch[0].item() == 4
        return (
            None if is_second and batch_idx % self.every == 0 else super().training_step(batch, 0)
        )


class TestStepsThatWereNotTaken:
    @pytest.mark.parametrize(
        "options", [NOVA, {"correction": Scaffold()}], ids=["FedNova", "SCAFFOLD"]
    )
    def test_batches_that_are_skipped_are_no_steps(self, options):
        found, federation = trajectory((10, 10), module=Skipping(), **options)
        expected, other = trajectory((10, 5), **options)
        assert found == expected
        assert federation.state_dict()["memory"] == other.state_dict()["memory"]
        if options is NOVA:
            assert found == pytest.approx([6.9168, 7.3600, 7.3884], abs=5e-5)

    @pytest.mark.parametrize("correction", [Scaffold(), Scaffold("I"), FedDyn(alpha=0.3)])
    def test_without_any_there_is_nothing_to_remember(self, correction):
        _, federation = trajectory((10, 10), module=Skipping(every=1), correction=correction)
        present = federation.state_dict()["memory"]["present"]
        assert [client for _, client, _ in present] == [0]

    @pytest.mark.parametrize("exact", [False, True])
    def test_without_any_a_client_counts_for_nothing_in_fednova(self, exact):
        nova = {"aggregator": NormalisedMean(**ALIKE, exact=exact)}
        alone = {"cohort": First(), "aggregator": Mean(**ALIKE)}
        found, _ = trajectory((10, 10), module=Skipping(every=1, start=3.0), **nova)
        expected, _ = trajectory((10, 10), module=Quadratic(start=3.0), **alone)
        assert found == pytest.approx(expected, rel=1e-12)

    def test_fednova_refuses_moves_without_an_optimizer(self):
        class Jumping(Quadratic):
            def training_step(self, batch, batch_idx):
                self.x.data += 1.0

        with pytest.raises(ConfigurationError, match=r"is 0\.0 for client 0: use Mean"):
            trajectory((2, 2), module=Jumping(), **NOVA)

    @pytest.mark.parametrize(("exponent", "fused"), [(10, None), (24, None), (24, True)])
    def test_steps_that_a_gradient_scaler_leaves_out_are_none(self, exponent, fused):
        """A variate is the mean gradient of the steps taken: how often the scale fell were none."""
        module = toy(Unscheduled, fused=fused)
        start, plugin = weights(module), scaler(exponent)
        trainer = {"max_epochs": 1, "plugins": [plugin]}
        options = {"local_steps": 16, "engine": "sequential", "correction": Scaffold()}
        *_, federation = federated(module, data=toy_data(1), trainer=trainer, **options)
        num_skipped = exponent - math.log2(plugin.scaler.get_scale())
        assert (num_skipped > 2) == (exponent == 24)
        [(_, _, variate)] = federation.state_dict()["memory"]["present"]
        expected = (start - weights(module)) / (0.01 * (16 - num_skipped))
        torch.testing.assert_close(variate.double(), expected, rtol=1e-3, atol=1e-5)


class OneBad(TwoQuadratics):
    """One of the second client's examples is not a number."""

    def train_dataloader(self):
        a, c, owner = super().train_dataloader().dataset.tensors
        c[-1] = math.nan
        return DataLoader(TensorDataset(a, c, owner), batch_size=1)


class Measuring(Quadratic):
    """Logs an object that holds the curvatures seen."""

    def __init__(self):
        super().__init__(start=3.0)
        self.curvature = torchmetrics.MeanMetric()

    def training_step(self, batch, batch_idx):
        self.curvature.update(batch[0])
        self.log("curvature", self.curvature)
        return super().training_step(batch, batch_idx)


ONE_STEP = {"local_steps": 1, "local_epochs": None, "correction": Scaffold("I"), "seed": 1}


@pytest.mark.parametrize("engine", ["sequential", "slots"])
class TestAGradientThatIsNotFinite:
    """Of a whole shard, though the client's step is fine: it does not draw the bad example."""

    def test_the_client_is_named(self, engine):
        message = "round 1, client 1: the gradient of its whole shard holds NaN"
        with pytest.raises(ClientFailure, match=message):
            trajectory((40, 40), source=OneBad, engine=engine, **ONE_STEP)

    def test_the_client_is_skipped_and_the_others_count(self, engine):
        options = ONE_STEP | {"engine": engine}
        with pytest.warns(UserWarning, match=r"skipped: round \d, client 1: the gradient"):
            found, federation = trajectory(
                (40, 40), module=Measuring(), source=OneBad, on_client_failure="skip", **options
            )
        expected, alone = trajectory((40, 40), module=Measuring(), cohort=First(), **options)
        assert found == expected
        first, second = (f.state_dict() for f in (federation, alone))
        assert first["memory"] == second["memory"]
        assert first["stages"]["correction"]["mean"] == second["stages"]["correction"]["mean"]
        assert federation.rounds.record.pooled == {"curvature": 1.0}
        assert (federation.rounds.clients.engine.slots is not None) == (engine == "slots")


class First(Cohort):
    """A cohort for tests: client 0 alone."""

    def expected_size(self, num_clients):
        return 1

    def sample(self, round_index, population, seed):
        return np.array([0])


class Unscheduled(ToyModule):
    def __init__(self, fused):
        super().__init__(lr=0.01, momentum=0.0)
        self.fused = fused

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr, fused=self.fused)


class Groups(ToyModule):
    """Two parameter groups with different rates."""

    def configure_optimizers(self):
        groups = [
            {"params": self.net[0].parameters()},
            {"params": self.net[4].parameters(), "lr": 0.03},
        ]
        return torch.optim.SGD(groups, lr=self.lr, momentum=self.momentum, weight_decay=0.01)


def run(
    module=ToyModule,
    *callbacks,
    ckpt_path=None,
    data=None,
    precision="64-true",
    trainer=None,
    **block,
):
    """Fit three rounds of three of six clients, and return module and federation."""
    block = {"cohort": UniformCohort(size=3), "local_epochs": 2} | block
    trainer = {"precision": precision, **(trainer or {})}
    dtype = torch.float64 if precision == "64-true" else torch.float32
    data = data or toy_data(batch_size=4, dtype=dtype)
    make = lambda: module().to(dtype)
    given = {"data": data, "ckpt_path": ckpt_path, "trainer": trainer}
    fitted = federated(make, ahead=callbacks, **given, **block)
    return fitted.module, fitted.federation


def test_as_alpha_vanishes_feddyn_becomes_fedavg():
    """But for the server's h / α, which does not depend on α in the first round."""
    one = {"trainer": {"max_epochs": 1}, "cohort": UniformCohort(fraction=1.0)}
    start = run(**one, server_optimizer=lambda p: torch.optim.SGD(p, lr=0.0))[0]
    plain, small = run(**one)[0], run(**one, correction=FedDyn(alpha=1e-9))[0]
    # all take part: mean Δ by examples and h / α = mean Δ by clients
    alike = run(**one, aggregator=Mean(**ALIKE))[0]
    moved = weights(start) - weights(plain) + weights(start) - weights(alike)
    torch.testing.assert_close(weights(start) - moved, weights(small), rtol=1e-7, atol=1e-8)


class InTheLoss:
    """The same pull as a term of the loss, as a user would write it."""

    mu = 0.5

    def on_train_epoch_start(self):
        self.begin = [p.detach().clone() for p in self.parameters()]

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        pairs = zip(self.parameters(), self.begin, strict=True)
        return loss + self.mu / 2 * sum((p - x).square().sum() for p, x in pairs)


class Searching(ToyModule):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), max_iter=4, line_search_fn="strong_wolfe")


def scaler(exponent=10):
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**exponent))


PATHS = {
    "lean": (ToyModule, {}, 1e-11),
    "groups": (Groups, {}, 1e-11),
    "masks": (Masked, {}, 1e-11),
    "clipping": (ToyModule, {"trainer": {"gradient_clip_val": 0.05}}, 1e-11),
    "accumulation": (ToyModule, {"trainer": {"accumulate_grad_batches": 2}}, 1e-11),
    "line search": (Searching, {}, 1e-9),
    "sharpness-aware": (Sharp, {}, 1e-11),
    "fused": (ToyModule, {"speedups": ["fused_optimizer"]}, 1e-11),
    "fp16": (ToyModule, {"precision": None}, 2e-3),
}


@pytest.mark.parametrize("path", PATHS)
def test_a_pull_is_a_term_of_the_loss_however_steps_are_taken(path):
    module, options, tolerance = PATHS[path]

    class Expected(InTheLoss, module):
        pass

    def end(kind, **block):
        trainer = {"max_epochs": 2, **options.get("trainer", {})}
        if path == "fp16":
            trainer["plugins"] = [scaler()]
        return weights(run(kind, engine="sequential", **options | block | {"trainer": trainer})[0])

    expected = end(Expected, speedups=None)
    found = end(module, correction=FedProx(mu=InTheLoss.mu))
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


class TestMemories:
    @pytest.mark.parametrize(("module", "callbacks"), [(Groups, []), (Masked, [NewMasks()])])
    def test_the_servers_variate_is_the_mean_of_all_clients(self, module, callbacks):
        """Of vectors in the coordinates of the present mask."""
        _, federation = run(module, *callbacks, correction=Scaffold(), trainer={"max_epochs": 4})
        state, size = federation.state_dict(), federation.rounds.server.model.params.numel()
        total = sum(vector for _, _, vector in state["memory"]["present"])
        assert len(state["memory"]["present"]) > 3
        assert total.shape == (size,)
        torch.testing.assert_close(
            state["stages"]["correction"]["mean"], total / 6, rtol=1e-12, atol=1e-14
        )

    def test_files_beside_a_checkpoint_are_read_or_refused(self, tmp_path, monkeypatch):
        monkeypatch.setattr(client_memory, "INSIDE_CHECKPOINT_BYTES", 0)
        options = {"correction": Scaffold(), "client_memory_gb": 1e-7}  # one vector
        options |= {"trainer": {"default_root_dir": tmp_path / "work"}}
        expected, _ = run(ToyModule, SaveEverywhere(tmp_path), **options)
        files = sorted(memory_folder(tmp_path / "1-end.ckpt").glob("*.vector"))
        assert len(files) > 1
        for moment in ("1-trained", "1-end"):
            module, _ = run(ckpt_path=tmp_path / f"{moment}.ckpt", **options)
            assert torch.equal(weights(module), weights(expected)), moment
        for path in files:
            path.write_bytes(bytes(path.stat().st_size))
        with pytest.raises(ConfigurationError, match="was changed or damaged"):
            run(ckpt_path=tmp_path / "1-end.ckpt", **options)
        for path in files:
            path.unlink()
        with pytest.raises(ConfigurationError, match="is missing: move a checkpoint together with"):
            run(ckpt_path=tmp_path / "1-end.ckpt", **options)

    def test_a_variate_is_the_mean_gradient_of_the_steps(self):
        """With one step of one full batch, momentum and two rates: the gradient at the start."""
        options = {
            "data": toy_data(batch_size=1000, dtype=torch.float64),
            "local_epochs": 1,
            "trainer": {"max_epochs": 1},
        }
        ends = [run(Groups, correction=Scaffold(which), **options)[1] for which in ("I", "II")]
        first, second = (dict_of(end.state_dict()["memory"]["present"]) for end in ends)
        decay = 0.01 * torch.cat([p.detach().flatten() for p in run_start(Groups)])
        for key, gradient in first.items():
            torch.testing.assert_close(second[key], gradient + decay, rtol=1e-9, atol=1e-12)

    def test_the_gradient_of_a_whole_shard_has_only_full_batches_if_the_loader_drops_others(self):
        """Two batches of 4 of a client's 10 examples; batch norm could do nothing with a single one."""
        data = toy_data(partition=IID(), batch_size=4, dtype=torch.float64, drop_last=True)
        one = {"data": data, "trainer": {"max_epochs": 1}, "correction": Scaffold("I")}
        _, federation = run(ToyModule, **one)
        seed_everything(0, verbose=False)
        module = ToyModule().double()
        for _, client, variate in federation.state_dict()["memory"]["present"]:
            x, y = data.train_batch(data.clients[client])
            gradients = []
            for example, label in zip(x, y, strict=True):
                loss = torch.nn.functional.cross_entropy(module.net(example[None]), label[None])
                parts = torch.autograd.grad(loss, list(module.parameters()))
                gradients.append(torch.cat([part.flatten() for part in parts]))
            rest = torch.stack(gradients).sum(0) - 8 * variate  # of the two left out
            pairs = itertools.combinations(gradients, 2)
            assert sum(torch.allclose(rest, a + b, rtol=1e-9, atol=1e-12) for a, b in pairs) == 1

    def test_another_correction_is_refused(self, tmp_path):
        once = {"trainer": {"max_epochs": 1}}
        run(ToyModule, SaveEverywhere(tmp_path), correction=FedDyn(), **once)
        with pytest.raises(ConfigurationError, match="another correction"):
            run(ckpt_path=tmp_path / "0-end.ckpt", correction=Scaffold())

    def test_a_client_of_slots_that_fails_leaves_no_memory(self):
        """The others of its group are done: what they learnt counts."""
        data = toy_data(batch_size=1000, dtype=torch.float64)
        data.setup("fit")
        (bad,) = data.train_dataset.tensors[0][data.clients[5], 0][:1]

        class Fails(ToyModule):
            def training_step(self, batch, batch_idx):
                added = torch.where(batch[0][:, 0] == bad, torch.nan, 0.0).mean()
                return super().training_step(batch, batch_idx) + added

        skips = {"on_client_failure": "skip", "cohort": None, "trainer": {"max_epochs": 1}}
        with pytest.warns(UserWarning, match="skipped: round 1, client 5"):
            _, federation = run(
                Fails, data=data, correction=Scaffold(), engine="slots", slots=2, **skips
            )
        assert federation.rounds.clients.engine.slots is not None
        present = federation.state_dict()["memory"]["present"]
        assert [client for _, client, _ in present] == [0, 1, 2, 3, 4]


class Seeing(ToyModule):
    """Has features."""

    def features(self, batch):
        return self.net[:3](batch[0])


class TestMoon:
    def test_two_rounds_by_hand(self):
        """One client, one step a round: in the second round its last model is the global one before."""
        data = toy_data(num_clients=1, batch_size=1000, dtype=torch.float64)
        block = {"cohort": None, "local_epochs": 1, "data": data}
        half = {"server_optimizer": lambda p: torch.optim.SGD(p, lr=0.5)}
        moon = Moon(mu=2.0, temperature=0.7)
        found = weights(run(Seeing, correction=moon, trainer={"max_epochs": 2}, **block, **half)[0])

        seed_everything(0, verbose=False)
        module, rate = Seeing().double(), 0.1
        x, y = data.train_dataset.tensors
        last = None
        for _ in range(2):
            start = [p.detach().clone() for p in module.parameters()]
            loss = torch.nn.functional.cross_entropy(module.net(x), y)
            if last is not None:
                z, old = module.features((x, y)), last.features((x, y)).detach()
                near = torch.cosine_similarity(z, z.detach()) / 0.7
                far = torch.cosine_similarity(z, old) / 0.7
                share = near.exp() / (near.exp() + far.exp())
                loss = loss - 2.0 * share.log().mean()
            gradients = torch.autograd.grad(loss, list(module.parameters()))
            last = copy.deepcopy(module)
            for p, own, s, g in zip(
                module.parameters(), last.parameters(), start, gradients, strict=True
            ):
                own.data = s - rate * g
                p.data = s - 0.5 * rate * g
            rate *= 0.9
        torch.testing.assert_close(found, weights(module), rtol=1e-6, atol=1e-7)

    def test_masks_that_change_let_it_start_anew(self):
        class Both(Masked, Seeing):
            pass

        module, federation = run(Both, NewMasks(), correction=Moon(), trainer={"max_epochs": 4})
        assert weights(module).isfinite().all()
        sizes = {len(v) for _, _, v in federation.state_dict()["memory"]["present"]}
        assert sizes == {federation.rounds.server.model.params.numel()}


class Forward(ToyModule):
    """Its logits are what forward returns."""

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        return torch.nn.functional.cross_entropy(self(batch[0]), batch[1])


class Calibrated(Forward):
    """The paper's loss, as a user would write it."""

    def training_step(self, batch, batch_idx):
        data, x, y = self.trainer.datamodule, *batch
        [own] = [
            i for i, shard in enumerate(data.clients) if y.tolist() == data.labels[shard].tolist()
        ]
        counts = torch.tensor([(data.labels[data.clients[own]] == c).sum() for c in range(3)])
        margins = 0.7 * torch.where(counts > 0, counts, 1e-8).double() ** -0.25
        calibrated = torch.exp(self.net(x) - margins)
        return -torch.log(calibrated[torch.arange(len(y)), y] / calibrated.sum(1)).mean()


class TestFedLC:
    def options(self):
        # a client's whole shard is one batch, so that the batch tells whose it is
        partition = LabelShards(classes_per_client=2)
        data = toy_data(6, partition=partition, batch_size=1000, dtype=torch.float64)
        return {"data": data, "local_epochs": 3}

    def test_it_is_the_papers_loss(self):
        expected, _ = run(Calibrated, **self.options())
        found, _ = run(Forward, correction=FedLC(tau=0.7), **self.options())
        torch.testing.assert_close(weights(found), weights(expected), rtol=1e-9, atol=1e-11)
        assert not found._forward_hooks  # the module is left as it was

    @pytest.mark.parametrize(
        "personal",
        [Personal(["net.4.*"], own_epochs=1), Ditto(), APFL()],
        ids=lambda p: type(p).__name__,
    )
    def test_what_is_a_clients_own_trains_on_the_same_loss(self, personal):
        shifted = SimpleQueue()  # which no client's state is

        class Noting(Forward):
            def training_step(self, batch, batch_idx):
                shifted.put(not torch.equal(self(batch[0]), self.net(batch[0])))
                return super().training_step(batch, batch_idx)

        work = {"local_epochs": None, "local_steps": 2, "trainer": {"max_epochs": 1}}
        run(Noting, correction=FedLC(), personal=personal, **work)
        assert shifted.qsize() > 2 * 3
        assert all(shifted.get() for _ in range(shifted.qsize()))

    def test_evaluation_is_as_it_was(self):
        fedlc, module = FedLC(tau=2.0), Forward()
        inputs, labels = torch.randn(2, 4), torch.tensor([0, 0, 2])
        plain = module(inputs)
        shift = fedlc.logit_shift(torch.tensor([2.0, 0.0, 1.0]))
        with fedlc.calibrated(module, lambda: labels):
            torch.testing.assert_close(module(inputs), plain + shift)
            assert torch.equal(module.eval()(inputs), plain)
        assert torch.equal(module.train()(inputs), plain)

    def test_refuses_what_has_no_logits(self):
        with pytest.raises(ConfigurationError, match=r"compute the logits by self\(inputs\)"):
            run(ToyModule, correction=FedLC())
        logits, flat = torch.zeros(2, 2), torch.nn.Identity()
        calibrated = FedLC().calibrated(flat, lambda: torch.tensor([2]))
        with pytest.raises(ConfigurationError, match=r"C ≥ 3, but Identity\.forward"), calibrated:
            flat(logits)


def dict_of(entries):
    return {(name, client): vector for name, client, vector in entries}


def run_start(module):
    seed_everything(0, verbose=False)
    return list(module().double().parameters())


class Adam(ToyModule):
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


class Climbing(ToyModule):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, maximize=True)


class WarmingUp(ToyModule):
    """Sets the rate in `optimizer_step`, as Lightning's documentation shows it."""

    def optimizer_step(self, epoch, batch_idx, optimizer, closure):
        for group in optimizer.param_groups:
            group["lr"] = self.lr * min(1, (batch_idx + 1) / 4)
        optimizer.step(closure=closure)


class ByHand(ToyModule):
    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()
        self.lr_schedulers().step()


class TestRefusals:
    @pytest.mark.parametrize(
        ("module", "block", "message"),
        [
            (
                Adam,
                {"correction": Scaffold()},
                "the steps of Adam are no weighted sum of gradients",
            ),
            (
                Adam,
                {"aggregator": NormalisedMean()},
                "the steps of Adam are no weighted sum of gradients",
            ),
            (
                Groups,
                {"aggregator": NormalisedMean(), "correction": FedProx(mu=1)},
                "groups of the clients' optimizer have different effective numbers of steps",
            ),
            (Climbing, {"correction": FedProx(mu=1)}, "maximize"),
            (ToyModule, {"correction": Moon()}, r"a method features\(batch\) of ToyModule"),
            (
                ToyModule,
                {"correction": FedDyn(), "server_optimizer": FedAdam},
                "which FedAdam would rescale",
            ),
        ],
    )
    def test_combinations_that_make_no_sense(self, module, block, message):
        with pytest.raises(ConfigurationError, match=message):
            run(module, **block)

    def test_groups_of_different_momenta_before_anything_trains(self):
        class Momenta(ToyModule):
            def training_step(self, batch, batch_idx):
                raise AssertionError("a client trains")

            def configure_optimizers(self):
                groups = [
                    {"params": p, "momentum": m}
                    for p, m in zip(self.parameters(), (0, 0.5, 0.9, 0.9), strict=True)
                ]
                return torch.optim.SGD(groups, lr=0.1)

        with pytest.raises(ConfigurationError, match="different effective numbers of steps"):
            run(Momenta, aggregator=NormalisedMean(), engine="sequential")

    @pytest.mark.parametrize("block", [{"correction": Scaffold()}, NOVA])
    def test_a_rate_that_the_module_changes_between_local_steps(self, block):
        says = "need one learning rate in all local steps"
        with pytest.raises(ConfigurationError, match=says):
            run(WarmingUp, **block)
        with pytest.raises(ConfigurationError, match=says):  # after the only step
            run(ByHand, **block, local_epochs=None, local_steps=1)

    def test_a_variate_that_is_a_gradient_needs_no_rate(self):
        run(WarmingUp, correction=Scaffold(option="I"))

    @pytest.mark.filterwarnings("ignore:engine. sequential, not slots:UserWarning")
    @pytest.mark.parametrize(("kind", "rule"), [(Forward, FedLC(tau=0.0)), (Seeing, Moon(mu=0.0))])
    def test_slots_are_declined_and_running_statistics_left_alone(self, kind, rule):
        make = functools.partial(kind, batch_norm=True)
        data = toy_data(batch_size=4, dtype=torch.float64, drop_last=True)
        plain, _ = run(make, data=data)
        module, federation = run(make, data=data, correction=rule, engine="slots")
        assert federation.rounds.clients.engine.slots is None
        torch.testing.assert_close(weights(plain), weights(module), rtol=1e-12, atol=1e-14)
