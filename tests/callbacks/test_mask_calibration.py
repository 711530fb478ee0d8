"""Masks in a run: found from clients as from all examples at once, kept to, kept, and refused."""

import csv
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, seed_everything
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from sklearn.linear_model import Ridge
from torch import nn
from toys import (
    NeedsFile,
    SaveEverywhere,
    SaveOnException,
    ToyData,
    ToyModule,
    toy_data,
    validating_trainer,
    weights,
)

from fl_lightning import (
    ConfigurationError,
    Federation,
    MaskCalibration,
    RunReport,
    UniformCohort,
)
from fl_lightning.data.cohorts.cohort import AllClients
from fl_lightning.data.partitions.partition import IID
from fl_lightning.federation.logs import logged_once
from fl_lightning.reports.history import History
from fl_lightning.sparsity import (
    ExactFisher,
    LinearHead,
    Mask,
    RandomEntries,
    RidgeHead,
    SampledFisher,
    SparseAdamW,
    SparseSGDM,
    calibrate,
    jaccard_overlap,
    load_mask,
    save_mask,
    union,
)

HIDDEN = ["net.0.weight", "net.0.bias"]
HEAD = ["net.4.weight", "net.4.bias"]


class Network(ToyModule):
    """The toy with a forward and an optimizer that keeps to a mask."""

    def __init__(self, optimizer=None, **options):
        super().__init__(**options)
        self.make = optimizer or (lambda p: SparseSGDM(p, lr=0.1, momentum=0.9, weight_decay=0.1))

    def forward(self, x):
        return self.net(x)

    def configure_optimizers(self):
        return self.make(self.parameters())


def network(seed=0, **options):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Network(**options)


def calibration(**options):
    defaults = {"density": 0.3, "head_name": "net.4", "cohort": AllClients(), "seed": 7}
    return MaskCalibration(**{**defaults, **options})


def federation(**options):
    return Federation(**{"cohort": UniformCohort(size=3), "local_epochs": 2, "seed": 4, **options})


def fit(sparse, module=None, *callbacks, data=None, ckpt_path=None, federated=True, **options):
    module = module if module is not None else network()
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    first = [sparse] if sparse is not None else []
    second = [federation()] if federated else []
    trainer = validating_trainer(*first, *second, *callbacks, **options)
    data = data if data is not None else toy_data()
    trainer.fit(module, datamodule=data, ckpt_path=ckpt_path)
    return module, before, trainer


def examples_of_clients():
    data = toy_data()
    data.setup("fit")
    return data.clients.num_examples


def pooled(data=None):
    data = data or toy_data()
    indices = torch.cat(list(data.clients))
    return [data.evaluation_batch(part) for part in indices.split(16)]


def test_what_no_privacy_of_rounds_covers_is_named():
    scores, head = "the mask found from clients' scores", "the head fitted to clients' examples"
    given = {"mask_file": "mask.safetensors", "density": None}
    for options, shown in (
        ({}, scores),
        (given, ""),
        ({**given, "head": RidgeHead()}, head),
        ({"head": LinearHead()}, f"{scores} and {head}"),
    ):
        assert calibration(**options).unprotected == shown


def exact(**options):
    return calibration(sensitivity=ExactFisher(), rounds=3, **options)


class TestWhereScoresComeFrom:
    @pytest.mark.parametrize("progressive", [True, False])
    def test_clients_together_find_the_mask_of_all_examples(self, progressive):
        sparse = exact(progressive=progressive)
        fit(sparse, max_epochs=1)
        expected = calibrate(
            network(),
            pooled(),
            density=0.3,
            rounds=3,
            sensitivity=ExactFisher(),
            progressive=progressive,
            names=HIDDEN,
        )
        assert sparse.mask == expected
        assert 0 < expected.num_active < expected.num_entries

    def test_a_central_run_finds_it_too(self):
        in_a_federation, alone, unwrapped = exact(), exact(), exact()
        fit(in_a_federation, max_epochs=1)
        fit(alone, federated=False, max_epochs=1)
        fit(unwrapped, data=ToyData(), federated=False, max_epochs=1)
        assert in_a_federation.mask == alone.mask == unwrapped.mask

    def test_the_number_of_processes_does_not_matter(self, tmp_path):
        heads = []
        for devices in (1, 2):
            module, _, _ = fit(
                *(calibration(max_examples=20, head=RidgeHead()), None, AllHaveTheSameMask()),
                devices=devices,
                logger=CSVLogger(tmp_path, name=str(devices)),
                max_epochs=1,
            )
            heads.append(module.net[4].weight.detach())
        one, two = (tmp_path / n / "version_0/mask_v0.safetensors" for n in "12")
        assert load_mask(one) == load_mask(two)
        torch.testing.assert_close(*heads, rtol=0, atol=1e-5)

    def test_a_failure_in_one_process_ends_all(self):
        with pytest.raises(ConfigurationError, match="broken in process 1"):
            fit(calibration(sensitivity=BrokenInOneProcess()), devices=2)

    def test_draws_belong_to_seed_and_version(self):
        def mask(**options):
            sparse = calibration(max_examples=12, **options)
            fit(sparse, max_epochs=1)
            return sparse.mask

        assert mask() == mask()
        assert mask() != mask(seed=8)
        assert mask(rule=RandomEntries()) != mask(rule=RandomEntries(), seed=8)

    def test_max_examples_are_shared_out(self):
        seen = Seen()
        fit(calibration(max_examples=30, rounds=1, sensitivity=seen), max_epochs=1)
        sizes = np.array([n for n in toy_data().clients.num_examples if n])
        cohorts = Seen()  # by default those of the federation
        fit(calibration(cohort=None, rounds=2, sensitivity=cohorts), max_epochs=1)
        assert len(cohorts.sizes) == 2 * 3  # rounds, clients of a cohort
        assert set(cohorts.sizes) <= set(examples_of_clients().tolist())
        assert sum(seen.sizes) == 30
        np.testing.assert_allclose(seen.sizes, 30 * sizes / sizes.sum(), atol=1)

    def test_what_the_rest_of_the_run_draws_stays_the_same(self, tmp_path):
        file = tmp_path / "mask.safetensors"

        def trained(scored):
            sparse = calibration(mask_file=None if scored else str(file))
            module, _, _ = fit(sparse, network(dropout=0.5), max_epochs=2)
            if scored:
                save_mask(sparse.mask, file)
            return weights(module)

        assert torch.equal(trained(scored=True), trained(scored=False))


class TestMaskApplier:
    @pytest.mark.parametrize(
        ("precision", "optimizer"),
        [("32-true", None), ("bf16-mixed", lambda p: SparseAdamW(p, lr=0.1))],
    )
    def test_nothing_but_the_masks_entries_and_the_head(self, precision, optimizer):
        sparse = calibration()
        normed = precision == "32-true"
        data = toy_data(partition=IID())
        made = network(optimizer=optimizer, batch_norm=normed)
        module, before, _ = fit(sparse, made, data=data, precision=precision)
        after = dict(module.named_parameters())
        for name, mask in sparse.mask.items():
            assert torch.equal(after[name][~mask], before[name][~mask])
            assert (after[name][mask] != before[name][mask]).all()
        norm = ["net.1.weight", "net.1.bias"] if normed else []
        assert list(sparse.mask) == [*HIDDEN, *norm]
        for name in HEAD:
            assert (after[name] != before[name]).all()
        assert all(p.requires_grad for p in module.parameters())  # given back

    def test_a_frozen_head_and_what_is_outside_the_mask_stay(self):
        module, sparse = network(), calibration(exclude=["net.0.bias"], head="freeze", density=1.0)
        for _ in range(2):  # a module that is fitted again begins as before
            _, before, _ = fit(sparse, module, max_epochs=1)
            moved = {n for n, p in module.named_parameters() if not torch.equal(p, before[n])}
            assert moved == {"net.0.weight"}
            assert (list(sparse.mask), sparse.version) == (["net.0.weight"], 0)

    @pytest.mark.parametrize("federated", [True, False])
    def test_all_ones_is_the_plain_run(self, federated):
        def run(sparse, kind):
            def make(p):
                return kind(p, lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=True)

            seed_everything(0, verbose=False)
            module, _, _ = fit(sparse, network(optimizer=make), federated=federated)
            return weights(module)

        everything = calibration(density=1.0, include=["*"], head="train", head_name=None)
        assert torch.equal(run(everything, SparseSGDM), run(None, torch.optim.SGD))


class TestHead:
    def test_ridge_on_the_clients_features_is_scikit_learns(self):
        module = network()
        fit(calibration(head=RidgeHead(regularisation=0.5)), module, max_epochs=1)
        x, y = (torch.cat(parts) for parts in zip(*pooled(), strict=True))
        with torch.no_grad():
            features = network().net[:4](x).double()
        theirs = Ridge(alpha=0.5).fit(features, np.eye(3)[y])
        np.testing.assert_allclose(module.net[4].weight.detach(), theirs.coef_, atol=1e-5)
        np.testing.assert_allclose(module.net[4].bias.detach(), theirs.intercept_, atol=1e-5)

    @pytest.mark.parametrize("head", [RidgeHead(), LinearHead(regularisation=0.1)])
    def test_federated_is_central_and_the_head_stays_frozen(self, head):
        heads = []
        for federated in (True, False):
            module, _, _ = fit(calibration(head=head), federated=federated)
            heads.append(module.net[4].weight.detach())
        torch.testing.assert_close(*heads, rtol=0, atol=1e-5)
        x, y = (torch.cat(parts) for parts in zip(*pooled(), strict=True))
        assert (network()(x).argmax(1) == y).float().mean() < 0.6
        assert (module(x).argmax(1) == y).float().mean() > 0.7


class TestCheckpoints:
    @pytest.mark.parametrize("every", [None, 2])
    def test_a_resumed_run_is_the_uninterrupted_one(self, tmp_path, every):
        options = {"max_epochs": 4}
        sparse = calibration(every_n_rounds=every, head=RidgeHead())
        whole, _, _ = fit(sparse, None, SaveEverywhere(tmp_path), **options)
        moments = (
            ("1-end", "2-trained") if every is None else ("1-end", "2-trained", "2-validation")
        )
        saved = [tmp_path / f"{moment}.ckpt" for moment in moments]
        for path in saved:
            torch.load(path, weights_only=True)
            never = Seen() if every is None else None
            again = calibration(every_n_rounds=every, head=RidgeHead(), sensitivity=never)
            resumed, _, _ = fit(again, network(seed=1), ckpt_path=path, **options)
            assert torch.equal(weights(resumed), weights(whole)), path.name
            assert (again.mask, again.history) == (sparse.mask, sparse.history)
            if never is not None:
                assert never.sizes == []

    @pytest.mark.parametrize("moment", ["while", "right after"])
    def test_a_run_that_broke_while_it_calibrated_anew(self, moment, tmp_path):
        options, path = {"max_epochs": 4}, tmp_path / "broken.ckpt"
        scores = Seen()
        sparse = calibration(every_n_rounds=2, sensitivity=scores)
        whole, _, _ = fit(sparse, **options)
        in_the_second = Seen(breaks_at=len(scores.sizes) - 1 if moment == "while" else None)
        broken = calibration(every_n_rounds=2, sensitivity=in_the_second)
        later = [] if moment == "while" else [NeedsFile("a file", 2)]
        with pytest.raises(RuntimeError, match=r"broken|is missing"):
            fit(broken, None, *later, SaveOnException(path), **options)
        again = calibration(every_n_rounds=2)
        resumed, _, trainer = fit(again, network(seed=1), ckpt_path=path, **options)
        assert torch.equal(weights(resumed), weights(whole))
        assert (again.mask, again.history) == (sparse.mask, sparse.history)
        assert trainer.global_step == 4

    def test_versions(self, tmp_path):
        sparse = calibration(every_n_rounds=2)
        fit(sparse, max_epochs=5, logger=CSVLogger(tmp_path))
        files = sorted(tmp_path.rglob("mask_v*.safetensors"))
        assert [path.name for path in files] == [f"mask_v{v}.safetensors" for v in range(3)]
        hashes = [entry["hash"] for entry in sparse.history]
        assert [load_mask(path).hash() for path in files] == hashes
        assert [entry["round"] for entry in sparse.history] == [0, 2, 4]
        assert sparse.version == 2
        assert sparse.history[-1]["hash"] == sparse.mask.hash()
        assert len({entry["hash"] for entry in sparse.history}) == 3

    def test_a_mask_that_does_not_fit_is_refused_by_name(self, tmp_path):
        path = tmp_path / "mask.safetensors"
        save_mask(Mask({"net.0.weight": torch.ones(9, 4).bool()}), path)
        with pytest.raises(
            ConfigurationError, match=r"net\.0\.weight \(8, 4\) instead of \(9, 4\)"
        ):
            fit(calibration(mask_file=str(path)))


class TestMasksOfClients:
    def run(self, watch, *callbacks, **options):
        sparse = calibration(per_client=True, sensitivity=ExactFisher(), rounds=2)
        watch.sparse = sparse
        # the federation asks for the masks; here the callback that comes after it does
        return sparse, fit(sparse, None, watch, *callbacks, **options)[0]

    def test_each_is_found_on_the_clients_own_examples_and_kept(self, tmp_path):
        watch = AsksForMasks()
        sparse, _ = self.run(watch, SaveEverywhere(tmp_path), max_epochs=2)
        assert sparse.mask.density == 1  # what the clients' masks lie in
        data = toy_data()
        for client in (0, 3):
            own = [data.evaluation_batch(data.clients[client])]
            options = {"density": 0.3, "rounds": 2, "sensitivity": ExactFisher(), "names": HIDDEN}
            assert watch.found[0][client] == calibrate(network(), own, **options)
        assert watch.found[0] == watch.found[1]  # though the model has moved
        assert len(set(watch.found[0].values())) > 1
        torch.load(tmp_path / "0-end.ckpt", weights_only=True)
        again = AsksForMasks()
        self.run(again, max_epochs=2, ckpt_path=tmp_path / "0-end.ckpt")
        assert again.found == watch.found[1:]

    def test_processes_tell_each_other(self, tmp_path):
        hashes = []
        for devices in (1, 2):
            folder, watch = tmp_path / str(devices), AsksForMasks()
            save = SaveEverywhere(folder)
            watch.sparse = sparse = calibration(per_client=True)
            fit(sparse, None, watch, save, devices=devices, max_epochs=1)
            for moment in ("trained", "validation", "end"):
                state = torch.load(folder / f"0-{moment}.ckpt", weights_only=True)
                masks = state["callbacks"]["MaskCalibration"]["clients"]
                hashes.append({client: mask["hash"] for client, mask in masks.items()})
        assert all(found == hashes[0] for found in hashes)
        assert len(hashes[0]) == 6

    def test_it_is_told_what_they_are_together(self, tmp_path, caplog):
        caplog.set_level("INFO", "lightning.pytorch")
        sparse, logger = calibration(per_client=True), CSVLogger(tmp_path)
        fit(sparse, logger=logger)
        masks = list(sparse.client_masks().found().values())
        assert 3 <= len(masks) <= 6
        assert not any(tmp_path.rglob("*.safetensors"))  # nor is there a mask of all
        with open(logger.experiment.metrics_file_path) as file:
            rows = [row for row in csv.DictReader(file) if row["mask/clients"]]
        *_, last = rows
        assert float(last["mask/clients"]) == len(masks)
        assert float(last["mask/density"]) == pytest.approx(0.3)
        assert float(last["mask/union_density"]) == pytest.approx(union(masks).density)
        pairs = [jaccard_overlap(*pair) for pair in combinations(masks, 2)]
        assert min(pairs) <= float(last["mask/overlap"]) <= max(pairs)
        sent = sum(float(row["calibration/total_bytes_up"]) for row in rows)
        assert sent == len(masks) * (32 // 8 + 8 // 8)
        assert "40 of 40" not in caplog.text
        assert f"masks of clients: {len(masks)} of 6 calibrated; mean density" in caplog.text

    def test_nobody_to_keep_to_them_is_refused(self):
        with pytest.raises(ConfigurationError, match="clients apply their own masks"):
            fit(calibration(per_client=True), federated=False)


class TestReport:
    def test_numbers_figure_and_file(self, tmp_path, caplog):
        caplog.set_level("INFO", "lightning.pytorch")
        loggers = [TensorBoardLogger(tmp_path, name="a"), CSVLogger(tmp_path, name="b")]
        sparse = calibration(head=RidgeHead())
        fit(sparse, logger=loggers, max_epochs=1)
        assert load_mask(tmp_path / "a/version_0/mask_v0.safetensors") == sparse.mask
        table = (tmp_path / "b/version_0/metrics.csv").read_text()
        for name in ("mask/density", "mask/sparsity", "mask/version", "calibration/seconds"):
            assert name in table
        logged = {
            name: float(value)
            for name, value in zip(
                *(line.split(",") for line in table.splitlines()[:2]), strict=True
            )
            if value
        }
        num_clients = np.count_nonzero(examples_of_clients())
        assert logged["calibration/bytes_up"] == 4 * 40
        assert logged["calibration/total_bytes_up"] == 4 * 40 * 4 * num_clients  # 4 rounds
        assert logged["head/bytes_up"] == 8 * (9 * 10 // 2 + 9 * 3)
        assert logged["head/total_bytes_up"] == logged["head/bytes_up"] * num_clients
        assert logged["mask/density"] == 0.3
        said = "12 of 40 maskable parameters train (density 0.3); other parameters: 0 train, 27 are frozen"
        assert said in caplog.text
        assert sparse.mask.hash() in caplog.text
        events = b"".join(p.read_bytes() for p in (tmp_path / "a/version_0").glob("events*"))
        assert b"mask/density per layer" in events

    @pytest.mark.parametrize(
        ("options", "federated", "times"),
        [
            ({"cohort": UniformCohort(size=2), "rounds": 3}, True, 6),
            ({"cohort": None, "rounds": 1}, True, 3),  # the federation's
            ({"rule": RandomEntries()}, True, 0),
            ({}, False, None),  # in a central run nothing travels
        ],
    )
    def test_all_bytes_of_a_calibration(self, options, federated, times, tmp_path):
        logger = CSVLogger(tmp_path)
        run = {"logger": logger, "log_every_n_steps": 1, "max_epochs": 1}
        fit(calibration(**options), federated=federated, **run)
        with open(logger.experiment.metrics_file_path) as file:
            sent = next(csv.DictReader(file)).get("calibration/total_bytes_up")
        assert (sent and float(sent)) == (None if times is None else times * 4 * 40)

    @pytest.mark.parametrize("options", [{"every_n_rounds": 1}, {"per_client": True}])
    def test_the_report_has_all_bytes(self, options, tmp_path):
        logger = CSVLogger(tmp_path)
        run = {"logger": logger, "log_every_n_steps": 1, "max_epochs": 2, "num_sanity_val_steps": 2}
        sparse = calibration(head=RidgeHead(), **options)
        data = toy_data(client_val_fraction=0.3)
        fit(sparse, None, RunReport(page="per_client" not in options), data=data, **run)
        with open(logger.experiment.metrics_file_path) as file:
            rows = [
                {
                    name.removesuffix("/total_bytes_up"): value
                    for name, value in row.items()
                    if value
                }
                for row in csv.DictReader(file)
            ]
        purposes = {"updates": "round", "calibration": "calibration", "head": "head"}
        counted = {p: sum(float(row.get(n, 0)) for row in rows) for p, n in purposes.items()}
        assert all(counted.values())
        folder = Path(logger.log_dir)
        found = History.read(folder).bytes_by_purpose("up", logged_once(folder))
        assert {p: sum(curve.values()) for p, curve in found.items()} == counted
        if "per_client" in options:
            return
        total = f"{sum(counted.values()) / 1000:.4g} kB"
        tile = f"<span>bytes from clients</span><b>{total}</b>"
        assert tile in (folder / "report.html").read_text()


class Refused(LightningModule):
    """Has no head that anyone could name."""

    def __init__(self, make=lambda p: SparseSGDM(p, lr=0.1)):
        super().__init__()
        self.make, self.layer = make, nn.Linear(4, 3)

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.layer(batch[0]), batch[1])

    def configure_optimizers(self):
        return self.make(self.parameters())

    def validation_step(self, batch, batch_idx):
        pass


class Forward(Refused):
    def forward(self, x):
        return self.layer(x)


OPTIONS = {
    "give density": {"density": None},
    "contradict": {"sparsity": 0.5},
    "calibrates its mask once": {"per_client": True, "every_n_rounds": 1},
    "head must be one of 'train', 'freeze' or a HeadFit": {"head": "fit"},
    "give density, ": {"mask_file": "m", "every_n_rounds": 2, "density": None},
}


def test_options_are_refused_where_they_are_given():
    for says, options in OPTIONS.items():
        with pytest.raises(ConfigurationError, match=says):
            calibration(**options)


def last_layer_alone(parameters):
    return SparseSGDM([*parameters][-2:], lr=0.1)


RUNS = {
    "Refused has no forward": ({}, Refused()),
    "has no module 'body'.*layer": ({"head_name": "body"}, Forward()),
    "set head_name to one of layer": ({"head_name": None}, Forward()),
    "set head_name to": ({"head_name": None, "head": "freeze", "include": ["*"]}, Forward()),
    "only the head": ({"include": ["*"], "head_name": "layer", "head": "freeze"}, Forward()),
    "class_path: fl_lightning.sparsity.SparseAdamW": ({}, network(optimizer=torch.optim.Adam)),
    r"net\.0\.weight, net\.0\.bias, which the optimizer does not train": (
        {},
        network(optimizer=last_layer_alone),
    ),
    "head alone|Linear": ({"head_name": "net", "include": ["*"], "head": RidgeHead()}, network()),
    "no file 'nowhere'": ({"mask_file": "nowhere"}, network()),
}


@pytest.mark.parametrize("says", RUNS)
def test_runs_are_refused_with_the_way_out(says):
    options, module = RUNS[says]
    with pytest.raises(ConfigurationError, match=says):
        fit(calibration(**options), module)


def test_the_order_of_callbacks_and_processes_without_a_federation():
    with pytest.raises(ConfigurationError, match="must come before Federation"):
        validating_trainer(federation(), calibration()).fit(network(), datamodule=toy_data())
    sparse = calibration()
    trainer = validating_trainer(sparse, devices=2, strategy="ddp")  # not started: it would stay
    with pytest.raises(ConfigurationError, match=r"trainer\.devices to 1"):
        sparse.setup(trainer, network(), "fit")


class AllHaveTheSameMask(Callback):
    def on_train_start(self, trainer, module):
        from fl_lightning.federation.processes.ranks import Ranks

        sparse = next(c for c in trainer.callbacks if isinstance(c, MaskCalibration))
        assert len(set(Ranks(trainer).gather(sparse.mask.hash()))) == 1
        first, *others = Ranks(trainer).gather(weights(module))
        assert all(torch.equal(first, other) for other in others)


class AsksForMasks(Callback):
    """Asks at the start of each round for the masks of this process's share of the clients."""

    def __init__(self):
        self.found = []

    def on_fit_start(self, trainer, module):
        self.masks, self.trainer = self.sparse.client_masks(), trainer

    def on_train_epoch_start(self, trainer, module):
        mine = range(trainer.global_rank, 6, trainer.world_size)
        self.found.append({client: self.masks(client) for client in mine})


class Seen:
    """Sampled Fisher that notes how many examples it was given; may break when asked once more."""

    def __init__(self, breaks_at=None):
        self.sizes, self.breaks_at = [], breaks_at

    def __call__(self, module, batches, **options):
        if len(self.sizes) == self.breaks_at:
            raise RuntimeError("broken")
        scores = SampledFisher()(module, batches, **options)
        self.sizes.append(scores.num_examples)
        return scores


class BrokenInOneProcess:
    def __call__(self, *args, **options):
        if torch.distributed.get_rank() == 1:
            raise ConfigurationError("broken in process 1")
        return SampledFisher()(*args, **options)
