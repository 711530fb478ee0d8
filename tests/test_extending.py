"""Every example of docs/extending.md: short, found by the command line, trained, and right."""

import importlib
import re
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch import seed_everything
from readme import ROOT
from torch import nn
from torch.nn import functional
from toys import SaveEverywhere, ToyData, ToyModule, toy_data, toy_trainer, weights

from fl_lightning import (
    CentralDP,
    ConfigurationError,
    FederatedDataModule,
    Federation,
    FedProx,
    MaskCalibration,
    Mean,
    PoissonCohort,
    UniformCohort,
)
from fl_lightning.cli import main
from fl_lightning.core.update import ClientUpdate
from fl_lightning.data import Cohort, Population
from fl_lightning.federation import Learning, Stage
from fl_lightning.federation.stages.corrector import Corrector
from fl_lightning.server import WeightedMean
from fl_lightning.sparsity import EmpiricalFisher, SparseSGDM
from fl_lightning.updates import Dense

PAGE = (ROOT / "docs" / "extending.md").read_text()
MOST_LINES = 30
CODE = {
    re.search(r"^class (\w+)", block, re.MULTILINE)[1]: block
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
}
YAML = {
    re.search(r"my_federation\.(\w+)", block)[1]: block
    for block in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
}
# what asks for a class's own options
HELP = {
    "ByNorm": ["--federation.aggregator.help"],
    "Shortest": ["--federation.aggregator.help"],
    "KeptMomentum": ["--federation.correction.help"],
    "Threshold": ["--federation.updates.help"],
    "Shifts": ["--federation.cohort.help"],
    "SlowStart": ["--federation.stages.help"],
    "HomeClass": ["--data", "fl_lightning.FederatedDataModule", "--data.partition.help"],
    "OwnAnswer": [
        *("--trainer.callbacks", "fl_lightning.MaskCalibration"),
        "--trainer.callbacks.sensitivity.help",
    ],
}


@pytest.fixture(autouse=True, scope="module")
def _my_federation(tmp_path_factory):
    """All examples in a file that Python finds."""
    with pytest.MonkeyPatch.context() as patch:
        written_to(tmp_path_factory.mktemp("mine"), patch, *CODE)
        yield


def written_to(folder, monkeypatch, *names):
    (folder / "my_federation.py").write_text("\n\n".join(CODE[name] for name in names))
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setitem(sys.modules, "my_federation", None)  # put back in the end
    monkeypatch.delitem(sys.modules, "my_federation")


def part(name):
    return getattr(importlib.import_module("my_federation"), name)


def run(*callbacks, engine="sequential", devices=1, rounds=2, data=None, module=ToyModule, **block):
    """Return a module after two rounds of three of six clients; another option replaces ours."""
    seed_everything(0, verbose=False)
    module = module()
    ckpt_path = block.pop("ckpt_path", None)
    defaults = {"cohort": UniformCohort(size=3), "local_steps": 2, "seed": 4, "engine": engine}
    federation = Federation(**defaults | block)
    trainer = toy_trainer(*callbacks, federation, max_epochs=rounds, devices=devices)
    trainer.fit(module, datamodule=data or toy_data(batch_size=4), ckpt_path=ckpt_path)
    if engine == "slots":
        assert federation.rounds.clients.engine.slots is not None
    return module


def same(one, other):
    return torch.equal(weights(one), weights(other))


def updates(*deltas):
    for client, delta in enumerate(deltas):
        yield ClientUpdate(client, torch.tensor(delta), torch.empty(0), 10, 1)


def opened(aggregator, *deltas):
    aggregator.open(torch.empty(len(deltas[0])))
    for update in updates(*deltas):
        aggregator.add(update)
    return aggregator.close()


class TestThePage:
    def test_there_is_an_example_of_every_part_with_its_yaml(self):
        assert CODE.keys() == YAML.keys() == HELP.keys()

    @pytest.mark.parametrize("name", CODE)
    def test_an_example_is_short(self, name):
        lines = [line for line in CODE[name].splitlines() if line.strip()]
        assert len(lines) <= MOST_LINES

    @pytest.mark.parametrize("name", HELP)
    def test_by_itself_it_shows_its_options(self, name, tmp_path, monkeypatch, capsys):
        written_to(tmp_path, monkeypatch, name)
        self.ends(monkeypatch, [*HELP[name], f"my_federation.{name}"])
        shown = " ".join(capsys.readouterr().out.split())
        assert f"my_federation.{name}" in shown
        explained = re.search(r"Args:\n(.*?)\n    \"\"\"", CODE[name], re.DOTALL)[1]
        options = dict(re.findall(r"^ {8}(\w+): (.*)", explained, re.MULTILINE))
        assert options.keys() <= part(name).__dataclass_fields__.keys()
        for option, text in options.items():
            assert f".{option}" in shown
            assert text[:30] in shown

    @pytest.mark.parametrize("left_out", ["ByNorm", "Shortest"])  # there is one aggregator
    def test_the_yaml_is_accepted(self, left_out, tmp_path, monkeypatch, capsys):
        layers = ["--config", str(ROOT / "configs" / "quickstart.yaml")]
        names = [name for name in YAML if name != left_out]
        for name in names:
            (tmp_path / f"{name}.yaml").write_text(YAML[name])
            layers += ["--config", str(tmp_path / f"{name}.yaml")]
        self.ends(monkeypatch, [*layers, "--print_config"])
        config = yaml.safe_dump(yaml.safe_load(capsys.readouterr().out))
        for name in names:
            assert f"class_path: my_federation.{name}\n" in config

    def ends(self, monkeypatch, words):
        monkeypatch.setattr(sys, "argv", ["fl-lightning"])
        with pytest.raises(SystemExit) as end:
            main(["fit", *words])
        assert end.value.code == 0


ALIKE = Mean(weight_by_examples=False)
# a part that is switched off, and what else the run without it asks for
OFF = {
    "ByNorm": (lambda: {"aggregator": part("ByNorm")(power=0.0)}, {"aggregator": ALIKE}),
    "Shortest": (lambda: {"aggregator": part("Shortest")(share=1.0)}, {"aggregator": ALIKE}),
    "KeptMomentum": (lambda: {"correction": part("KeptMomentum")(momentum=0.0)}, {}),
    "Threshold": (lambda: {"updates": [part("Threshold")(share=0.0)]}, {}),
    "Shifts": (lambda: {"cohort": part("Shifts")(size=3, num_shifts=1)}, {}),
    "SlowStart": (lambda: {"stages": [part("SlowStart")(rounds=0)]}, {}),
}


@pytest.fixture(scope="module")
def without():
    """A function that returns where a run of an engine ends without any of the parts."""
    return cache(lambda engine, aggregator=None: run(engine=engine, aggregator=aggregator))


@pytest.mark.parametrize("engine", ["sequential", "slots"])
@pytest.mark.parametrize("name", OFF)
def test_a_part_that_is_off_changes_nothing(name, engine, without):
    part_off, others = OFF[name]
    own, plain = run(engine=engine, **part_off()), without(engine, **others)
    if name == "Shortest":  # adds in another order
        torch.testing.assert_close(weights(own), weights(plain), rtol=1e-5, atol=1e-6)
    else:
        assert same(own, plain)


def together(**others):
    """Return a run of one part of each kind."""
    return {
        "rounds": 3,
        "aggregator": part("ByNorm")(power=0.0, exact=True),
        "cohort": part("Shifts")(fraction=0.5),
        "correction": part("KeptMomentum")(),
        "stages": [part("SlowStart")(rounds=4)],
        **others,
    }


def test_two_processes_give_the_bits_of_one(without):
    one, two = (run(**together(), devices=n) for n in (1, 2))
    assert same(one, two)
    one, two = (run(aggregator=part("Shortest")(), devices=n) for n in (1, 2))
    assert same(one, two)
    assert not same(one, without("sequential"))


def test_a_resumed_run_remembers_and_its_stage_is_logged(tmp_path):
    whole = run(SaveEverywhere(tmp_path), **together())
    for moment in ("1-trained", "1-end"):
        assert same(whole, run(**together(), ckpt_path=tmp_path / f"{moment}.ckpt"))
    assert not same(whole, run(**together(correction=None)))
    logged = torch.load(tmp_path / "2-end.ckpt", weights_only=False)["callbacks"]["Federation"]
    assert logged["record"]["more"] == {"round/share_of_step": 3 / 5}


def test_an_aggregator_with_power_minus_1_counts_updates_as_if_of_one_length():
    found = opened(part("ByNorm")(power=-1.0), [30.0, 40.0], [0.0, -2.0], [0.0, 0.0])
    # the directions are (0.6, 0.8) and (0, -1), the weights 1/50 and 1/2
    torch.testing.assert_close(found, torch.tensor([0.6, -0.2]) / (1 / 50 + 1 / 2))


def test_a_robust_rule_is_the_mean_of_the_shortest():
    rows = np.random.default_rng(0).normal(size=(7, 5)).astype(np.float32)
    rows *= 10.0 ** np.arange(7)[::-1, None]  # the last ones are the shortest
    found = opened(part("Shortest")(share=3 / 7), *rows.tolist())
    torch.testing.assert_close(found, torch.from_numpy(rows[-3:].mean(0)))
    with pytest.raises(ConfigurationError, match="share must be in"):
        part("Shortest")(share=0.0)


def plain():
    return ToyModule(momentum=0.0, scheduler=False).double()


def test_a_correction_of_one_client_with_a_step_a_round_is_sgd_with_momentum():
    source = ToyData(batch_size=60, dtype=torch.float64)
    own = run(
        correction=part("KeptMomentum")(momentum=0.5),
        data=FederatedDataModule(source, num_clients=1),
        cohort=None,
        local_steps=1,
        engine="slots",
        rounds=4,
        module=plain,
    )
    seed_everything(0, verbose=False)
    expected = plain()
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1, momentum=0.5)
    x, y = source.train.tensors
    for _ in range(4):
        optimizer.zero_grad()
        functional.cross_entropy(expected.net(x), y).backward()
        optimizer.step()
    torch.testing.assert_close(weights(own), weights(expected), rtol=1e-10, atol=1e-12)


def test_what_is_large_arrives_as_it_is_and_less_travels():
    step = part("Threshold")(share=0.5)
    sent = torch.tensor([3.0, -0.1, 0.2, -4.0])  # of norm 5.005
    arrived = step.on_server(step.on_client(Dense(sent), seed=0), seed=0, size=4)
    assert arrived.to_dense().tolist() == [3.0, 0.0, 0.0, -4.0]
    facts = {}
    for share in (0.0, 0.2):
        federation = Federation(local_steps=1, updates=[part("Threshold")(share=share)])
        toy_trainer(federation, max_epochs=1).fit(ToyModule(), datamodule=toy_data())
        facts[share] = federation.rounds.record.facts()
    assert facts[0.0]["round/compression_error"] == 0.0
    assert 0.0 < facts[0.2]["round/compression_error"] < 1.0
    # most of a message of 67 numbers is its header
    assert facts[0.2]["round/bytes_up"] < 0.75 * facts[0.0]["round/bytes_up"]


def test_a_cohort_is_a_pure_function_of_seed_and_round_and_draws_who_is_there():
    population, make = Population(np.full(100, 10)), part("Shifts")
    for index in range(4):
        first, again = (make(size=9).sample(index, population, seed=3) for _ in range(2))
        assert first.tolist() == again.tolist()
        assert len(first) == 9
        assert (np.diff(first) > 0).all()
        assert set(first % 2) == {index % 2}
        assert first.tolist() != make(size=9).sample(index, population, seed=4).tolist()
    population = Population(np.full(10, 10), is_available=np.arange(10) < 5)
    assert make(size=4).sample(0, population, seed=0).tolist() == [0, 2, 4]


labels = st.lists(st.integers(0, 4), min_size=8, max_size=60).map(np.array)


@given(labels, st.integers(1, 8), st.floats(0, 1), st.integers(0, 9))
def test_a_partition_gives_every_example_to_one_client(labels, num_clients, share, seed):
    shards = part("HomeClass")(share).assign(labels, num_clients, seed)
    assert len(shards) == num_clients
    assert sorted(np.concatenate(list(shards)).tolist()) == list(range(len(labels)))
    at_home = part("HomeClass")(1.0).assign(labels, num_clients, seed)
    for name in np.unique(labels):
        assert sum(name in labels[np.asarray(shard)] for shard in at_home) == 1
    rule = part("HomeClass")(0.0)  # where classes do not matter
    assert all(map(np.array_equal, rule.assign(labels, 3, 0), rule.assign(labels[::-1], 3, 0)))


def test_a_federation_trains_on_a_partition(without):
    data = toy_data(num_clients=3, partition=part("HomeClass")(share=0.8), batch_size=4)
    assert not same(run(data=data), without("sequential"))
    classes = data.source.train.tensors[1]
    assert [int(classes[shard].mode().values) for shard in data.clients] == [0, 1, 2]


class Masked(ToyModule):
    def forward(self, x):
        return self.net(x)

    def configure_optimizers(self):
        return SparseSGDM(self.parameters(), lr=0.1, momentum=0.9)


def test_a_sensitivity_is_the_square_of_single_gradients():
    seed_everything(0, verbose=False)
    module, x = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3)), torch.randn(9, 4)
    scores = part("OwnAnswer")()(module, [x[:4], x[4:]])
    expected = torch.zeros(5, 4)
    for example in x:
        answer = module(example).log_softmax(0).max()
        expected += torch.autograd.grad(answer, module[0].weight)[0].square()
    assert scores.num_examples == 9
    torch.testing.assert_close(scores.sums["0.weight"], expected)
    answers = EmpiricalFisher(labels=lambda batch: module(batch).argmax(1))(module, [x])
    torch.testing.assert_close(scores.sums, answers.sums)


def test_a_mask_by_a_sensitivity_is_found_and_kept():
    seed_everything(0, verbose=False)
    before = Masked()
    sparse = MaskCalibration(density=0.3, head_name="net.4", sensitivity=part("OwnAnswer")())
    after = run(sparse, engine="slots", module=Masked)
    moved = (before.net[0].weight != after.net[0].weight).detach()
    assert 0 < moved.sum() <= 0.4 * moved.numel()
    assert not (moved & ~sparse.mask["net.0.weight"]).any()


def test_a_stage_halves_the_first_of_two_steps():
    start, half = weights(run(rounds=0)).double(), part("SlowStart")(rounds=1)
    whole, own = (
        weights(run(rounds=1, module=plain, stages=some, data=toy_data(dtype=torch.float64)))
        for some in ([], [half])
    )
    torch.testing.assert_close(own, (start + whole) / 2, rtol=1e-12, atol=1e-12)


class Odd(WeightedMean):
    def __init__(self, weight):
        self.odd = weight

    def weight(self, update):
        return self.odd


@dataclass(frozen=True)
class OfOnes(Cohort):
    """Draws whatever it is told."""

    ids: tuple

    def expected_size(self, num_clients):
        return 2

    def sample(self, round_index, population, seed):
        return np.array(self.ids)


class Halves:
    def assign(self, labels, num_clients, seed):
        return np.array_split(np.arange(len(labels)), 2)


class TestAStage:
    def test_its_problems_are_told_with_those_of_others(self):
        class Picky(Stage):
            def enter(self, run):
                raise ConfigurationError(
                    f"{type(self).__name__} does not like {run.num_rounds:g} rounds"
                )

        with pytest.raises(ConfigurationError, match=r"(?s)likes?.* 2 rounds.*likes?.* 2 rounds"):
            run(stages=[Picky(), type("More", (Picky,), {})()])

    @pytest.mark.filterwarnings("ignore:engine. sequential, not slots:UserWarning")
    @pytest.mark.parametrize("engine", ["sequential", "slots"])
    def test_what_acts_in_the_module_is_called_for_every_client(self, engine):
        called = []

        class Acts(Learning):
            @contextmanager
            def steps(self, training):
                called.append(training.work.client_id)
                yield

            def learn(self, update, work, start):
                return lambda: called.append(-work.client_id)

        federation = Federation(engine=engine, stages=[Acts()], local_steps=1, seed=0)
        toy_trainer(federation, max_epochs=1).fit(ToyModule(), datamodule=toy_data())
        assert federation.rounds.clients.engine.slots is None
        assert called == [sign * client for client in range(6) for sign in (1, -1)]

    def test_a_term_of_its_own_is_refused(self):
        class Pulls(Corrector):
            pass

        with pytest.raises(
            ConfigurationError, match="Pulls derives from Corrector or Personaliser, which"
        ):
            run(stages=[Pulls(FedProx(mu=1.0))])

    @pytest.mark.parametrize("key", ["server", "updates", "mine"])
    def test_a_key_that_is_taken_is_refused(self, key):
        kind = type("Keeps", (Stage,), {"key": key})
        with pytest.raises(ConfigurationError, match=f"the key '{key}' of Keeps is already used"):
            run(stages=[kind(), kind()])

    def test_privacy_is_refused_unless_the_stage_says_why_not(self):
        private = CentralDP(clip_norm=1.0, noise_multiplier=1.0, delta=1e-3)
        block = {"privacy": private, "cohort": PoissonCohort(fraction=0.5)}
        with pytest.raises(ConfigurationError, match="stages Stage does not say what it shows"):
            Federation(**block, stages=[Stage()])
        Federation(**block, stages=[part("SlowStart")()])


class TestWhatIsRefused:
    @pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
    def test_a_weight_that_is_none(self, weight):
        with pytest.raises(
            ConfigurationError, match=rf"Odd\.weight returned {weight} for client 0"
        ):
            run(aggregator=Odd(weight), cohort=None)

    @pytest.mark.parametrize(
        ("ids", "says"),
        [
            ((1, 1), "distinct"),
            ((0.0, 1.0), "whole numbers"),
            ((-1, 2), "ids from 0 to 5, got -1 to 2"),
            ((2, 6), "ids from 0 to 5, got 2 to 6"),
        ],
    )
    def test_a_cohort_that_is_none(self, ids, says):
        with pytest.raises(ConfigurationError, match=says):
            run(cohort=OfOnes(ids))

    def test_shards_of_other_clients(self):
        with pytest.raises(ConfigurationError, match="a shard for each of 3 clients, got 2"):
            run(data=toy_data(num_clients=3, partition=Halves()))
