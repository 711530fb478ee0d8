"""AttentiveNAS's predictor in a run: when it begins, what it is fitted on, and that a run resumes with it."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from lightning import seed_everything
from test_one_shot import RESNET, SPACES, data, images, one_shot, step, weights
from toys import SaveEverywhere, toy_trainer

from fl_lightning import ConfigurationError, Federation, Mean
from fl_lightning.core.seeds import torch_generator
from fl_lightning.nas import AccuracyPredictor, Attentive, DeviceClasses, Sandwich
from fl_lightning.nas.sub_networks.accuracy import (
    ForestPredictor,
    SubNetworkScore,
    training_accuracies,
)
from fl_lightning.nas.sub_networks.capability import within
from fl_lightning.nas.sub_networks.rounds import SubNetworkRounds
from fl_lightning.sparsity import SparseSGDM

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no")
SMALL = {"num_candidates": 8, "num_drawn": 1, "num_bins": 3, "pool": 50}
PREDICTOR = AccuracyPredictor(start=0.5, num_scored=12, max_examples=None)
GUIDED = Attentive(predictor=PREDICTOR, **SMALL)
UNIFORM = Sandwich(1)


@pytest.fixture(autouse=True)
def _one_seed():
    seed_everything(0, verbose=False)  # of federations, which are made before modules


def run(
    method,
    *callbacks,
    rounds=2,
    space=RESNET,
    held=None,
    clients=3,
    ckpt_path=None,
    trainer=None,
    **options,
):
    fitting = toy_trainer(*callbacks, max_epochs=rounds, **(trainer or {}))
    module = one_shot(space, method, **options)
    fitting.fit(module, datamodule=data(clients, held=held), ckpt_path=ckpt_path)
    return module, fitting


def rounds_of(trainer):
    [callback] = [c for c in trainer.callbacks if isinstance(c, SubNetworkRounds)]
    return callback


@pytest.fixture(scope="module")
def guided():
    """A run of two rounds: the weights at its end, and its trainer."""
    seed_everything(0, verbose=False)
    module, trainer = run(GUIDED, Federation(local_steps=1))
    return weights(module), trainer


# The rule.


def test_until_it_is_fitted_draws_are_uniform():
    assert torch.equal(GUIDED.loss(step(RESNET)), UNIFORM.loss(step(RESNET)))


@pytest.mark.parametrize(("keep", "extreme"), [("best", max), ("worst", min)])
@pytest.mark.parametrize("limit", [None, RESNET.architecture([1, 1, 0, 1, 0, 0, 1, 0])])
def test_then_the_best_or_the_worst_prediction_is_kept_and_no_candidate_runs(keep, extreme, limit):
    ran, asked = [], []

    def predict(architectures):
        asked.append(architectures)
        return [hash(architecture.choices) % 101 for architecture in architectures]

    one = step(RESNET, limit=limit)
    logits = lambda network: (ran.append(network), step(RESNET).logits(network))[1]
    one = replace(one, predict=predict, logits=logits, whole=logits)
    replace(GUIDED, keep=keep).loss(one)
    [candidates] = asked
    assert len(candidates) == 8
    assert all(within(candidate, one.limit) == candidate for candidate in candidates)
    kept = candidates[predict(candidates).index(extreme(predict(candidates)))]
    assert set(ran) == {one.limit, RESNET.smallest, kept}


def test_it_begins_after_its_part_of_the_rounds(guided):
    assert [AccuracyPredictor(start=0.1).first_round(n) for n in (1, 10, 11, 100)] == [1, 1, 2, 10]
    module, trainer = run(GUIDED, Federation(local_steps=1), rounds=1)
    assert rounds_of(trainer).predict is None
    same, _ = run(UNIFORM, Federation(local_steps=1), rounds=1)
    assert torch.equal(weights(module), weights(same))
    found, trainer = guided
    assert rounds_of(trainer).predict is not None
    other, _ = run(UNIFORM, Federation(local_steps=1))
    assert not torch.equal(found, weights(other))


# What it is fitted on.


@pytest.mark.parametrize("federated", [False, True], ids=["central", "federated"])
@pytest.mark.parametrize("space", SPACES.values(), ids=SPACES)
def test_scores_are_the_share_of_training_examples_that_are_right(space, federated):
    """Clients' counts add up to what one who has all examples counts, with statistics of all."""
    module, trainer = run(UNIFORM, *[Federation(local_steps=2)] * federated, rounds=1, space=space)
    generator = torch_generator(3, "test")  # of a head that tells images apart
    head = module.network.get_classifier().weight.data
    head.copy_(torch.randn(head.shape, generator=generator))
    drawn = [space.smallest, space.largest, *(space.sample(generator) for _ in range(4))]
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    found = training_accuracies(trainer, module.network, drawn, max_examples=None, seed=0)
    assert all(torch.equal(own, before[name]) for name, own in module.state_dict().items())
    source, clients = trainer.datamodule, trainer.datamodule.clients
    owners = (
        [clients[i] for i in range(3)]
        if federated
        else [torch.cat([*map(clients.__getitem__, range(3))])]
    )
    batches = [source.evaluation_batch(indices) for indices in owners]
    score = SubNetworkScore(module.network, batches, batches)
    assert found.values == pytest.approx([score(architecture) for architecture in drawn])
    assert len(set(found.values)) > 1
    only_counts = 8 * len(owners) * (len(drawn) + 1)
    assert found.num_bytes == only_counts if space.name == "vit" else found.num_bytes > only_counts


def test_half_of_the_scored_fit_the_forest_and_half_check_it(guided):
    _, trainer = guided
    scored = rounds_of(trainer).state_dict()["scores"]
    generator = torch_generator(0, "scored sub-networks")
    drawn = list(dict.fromkeys(RESNET.sample(generator) for _ in range(12)))
    assert [text for text, _ in scored] == list(map(str, drawn))
    half = (len(drawn) + 1) // 2
    forest = ForestPredictor(drawn[:half], [score for _, score in scored[:half]], seed=0)
    assert rounds_of(trainer).predict(drawn) == forest(drawn)
    assert -1 <= trainer.callback_metrics["predictor/rank_correlation"] <= 1
    assert trainer.callback_metrics["predictor/bytes_up"] > 8 * 3 * len(drawn)


def test_evaluation_data_have_no_say():
    ends = [
        weights(run(GUIDED, Federation(local_steps=1), held=images(16, labels))[0])
        for labels in (torch.arange(16) % 4, (torch.arange(16) + 1) % 4)
    ]
    assert torch.equal(*ends)


# A run.


@pytest.mark.parametrize("federated", [False, True], ids=["central", "federated"])
def test_a_run_taken_up_anywhere_ends_in_the_same_bits(tmp_path, federated):
    """Ahead of the fit, and inside the round that begins with it."""
    callbacks = lambda: [Federation(local_steps=2, clients_per_group=1)] * federated
    whole, ended = run(GUIDED, *callbacks(), SaveEverywhere(tmp_path), rounds=3)
    for moment in ("1-end", "2-group1") if federated else ("0-end", "1-end"):
        again, trainer = run(GUIDED, *callbacks(), rounds=3, ckpt_path=tmp_path / f"{moment}.ckpt")
        assert torch.equal(weights(again), weights(whole)), moment
        assert rounds_of(trainer).state_dict() == rounds_of(ended).state_dict()


def test_two_processes_are_one():
    exact = {"local_steps": 2, "aggregator": Mean(exact=True)}
    one, _ = run(GUIDED, Federation(**exact))
    two, _ = run(GUIDED, Federation(**exact), trainer={"devices": 2, "strategy": "federated"})
    assert torch.equal(weights(two), weights(one))


def test_clients_of_all_capabilities_train_with_it():
    sparse = partial(SparseSGDM, lr=0.05, momentum=0.9)
    able = {"capability": DeviceClasses([0.6, 1.0], seed=0), "optimizer": sparse}
    module, _ = run(GUIDED, Federation(local_steps=1), clients=4, **able)
    assert weights(module).isfinite().all()


def test_counts_of_clients_are_named_to_privacy():
    named = {
        method: rounds_of(run(method, rounds=1)[1]).unprotected for method in (GUIDED, UNIFORM)
    }
    assert "how many of its examples" in named[GUIDED]
    assert "how many" not in named[UNIFORM]


# Refusals.


def test_values_out_of_range():
    with pytest.raises(ConfigurationError, match=r"start must be in \[0, 1\), got 1"):
        AccuracyPredictor(start=1, num_scored=2)
    with pytest.raises(ConfigurationError, match=r"set trainer\.max_epochs"):
        toy_trainer(max_epochs=-1, max_steps=2).fit(one_shot(RESNET, GUIDED), datamodule=data(1))
