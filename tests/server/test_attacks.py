"""Attacks by their formulas, on the rows of small rounds."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_update_rows import rows_of

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.seeds import numpy_generator
from fl_lightning.core.update import ClientUpdate
from fl_lightning.data.client_examples import LabelFlip, Trigger, changed_reader, poisoned_examples
from fl_lightning.data.shards import FlatShards
from fl_lightning.federation.stages.attackers import Attackers
from fl_lightning.server.attacks import (
    ALIE,
    Forged,
    GaussianNoise,
    InnerProductManipulation,
    MinMax,
    Scaling,
    SignFlip,
    hidden_deviations,
)
from fl_lightning.server.means.mean import Mean
from fl_lightning.server.robust.reweighted import CentredClipping, FLTrust
from fl_lightning.server.robust.rule import Median

ATTACKERS = [1, 4]
HONEST = [0, 2, 3, 5, 6]
matrices = st.lists(
    st.lists(st.floats(-10, 10, width=32), min_size=3, max_size=3), min_size=7, max_size=7
)


def forged(forgery, matrix):
    rows = rows_of(np.array(matrix, np.float32))
    vectors = forgery.forge(rows, ATTACKERS, lambda client: numpy_generator(0, "attack", 0, client))
    return np.array(list(vectors))


@given(matrix=matrices)
@settings(max_examples=30)
def test_each_by_its_formula(matrix):
    x = np.array(matrix)
    mean, spread = x[HONEST].mean(0), x[HONEST].std(0)
    expected = [
        (Scaling(3.0), 3 * x[ATTACKERS]),
        (SignFlip(), -x[ATTACKERS]),
        (SignFlip(2.0), -2 * x[ATTACKERS]),
        (ALIE(z=1.5), np.tile(mean - 1.5 * spread, (2, 1))),
        (ALIE(), np.tile(mean - hidden_deviations(7, 2) * spread, (2, 1))),
        (InnerProductManipulation(0.1), np.tile(-0.1 * mean, (2, 1))),
    ]
    for forgery, vectors in expected:
        np.testing.assert_allclose(forged(forgery, matrix), vectors, rtol=1e-4, atol=1e-4)


@given(matrix=matrices, direction=st.sampled_from(["std", "unit", "sign"]))
@settings(max_examples=50)
def test_min_max_goes_as_far_as_honest_updates_are_apart(matrix, direction):
    honest = np.array(matrix)[HONEST]
    vectors = forged(MinMax(direction), matrix).astype(float)
    assert (vectors[0] == vectors[1]).all()
    widest = max(np.linalg.norm(a - b) for a in honest for b in honest)
    reach = np.linalg.norm(honest - vectors[0], axis=1).max()
    assert reach <= widest * (1 + 1e-3) + 1e-3
    moves = {"std": honest.std(0), "unit": honest.mean(0), "sign": honest.mean(0)}[direction]
    if np.abs(moves).max() > 0.1:  # else there is no way to go
        assert reach >= widest * (1 - 1e-2) - 1e-2


def test_noise_is_each_attackers_own_and_the_same_again():
    matrix = np.zeros((7, 4000))
    noise = forged(GaussianNoise(2.0), matrix)
    assert noise.std(1) == pytest.approx([2.0, 2.0], rel=0.1)
    assert abs(np.corrcoef(noise)[0, 1]) < 0.1
    assert (forged(GaussianNoise(2.0), matrix) == noise).all()


def test_hidden_deviations_with_too_many_or_too_few():
    assert hidden_deviations(50, 12) == pytest.approx(0.33604, abs=1e-5)
    assert hidden_deviations(4, 3) == 0.0
    assert hidden_deviations(3, 0) >= 0.0


def play(aggregator, values, round_index=0):
    if hasattr(aggregator, "start_round"):
        aggregator.start_round(round_index)
    aggregator.open(torch.empty(1))
    for client, value in enumerate(values):
        metrics = {"train/loss": torch.tensor(1.0)}
        aggregator.add(
            ClientUpdate(client, torch.tensor([value]), torch.empty(0), client + 1, 1, metrics)
        )
    return float(aggregator.close())


class TestForged:
    def test_without_attackers_in_the_round_nothing_changes(self):
        plain, attacked = Mean(), Forged(Mean(), SignFlip(9.0), [7], seed=0)
        assert play(attacked, [1.0, 2.5, 4.0]) == play(plain, [1.0, 2.5, 4.0])

    def test_all_may_attack(self):
        ipm = Forged(Mean(), InnerProductManipulation(1.0), [0, 1], 0)
        assert play(ipm, [2.0, 4.0]) == pytest.approx(-3.0)

    def test_noise_differs_between_rounds(self):
        aggregator = Forged(Median(), GaussianNoise(1.0), [0], 0)
        assert len({play(aggregator, [0.0], index) for index in (0, 1, 2)}) == 3
        assert play(aggregator, [0.0], 1) == play(aggregator, [0.0], 1)

    def test_what_the_rule_remembers_is_the_aggregators(self):
        aggregator = Forged(CentredClipping(1.0), SignFlip(), [], 0)
        aggregator.memory = {}
        assert [play(aggregator, [4.0]), play(aggregator, [4.0])] == [1.0, 2.0]
        assert aggregator.memory["centre"].tolist() == [2.0]


class TestAttackers:
    def test_they_are_a_fraction_and_always_the_same(self):
        chosen = Attackers(fraction=0.3, seed=1).choose(20)
        assert len(set(chosen)) == 6
        assert chosen == Attackers(fraction=0.3, seed=1).choose(20)
        assert chosen != Attackers(fraction=0.3, seed=2).choose(20)

    def test_a_fraction_of_no_client_is_refused(self):
        assert Attackers(fraction=0.0).choose(20) == []
        with pytest.raises(ConfigurationError, match="of 20 clients is less than one attacker"):
            Attackers(fraction=0.02).choose(20)

    def test_some_are_spared(self):
        assert Attackers(fraction=0.5, spared=[0, 1], seed=0).choose(4) == [2, 3]
        with pytest.raises(ConfigurationError, match="3 of 4 clients are to attack, but only 2"):
            Attackers(fraction=0.75, spared=[0, 1], seed=0).choose(4)

    def test_who_is_trusted_must_be_honest(self):
        with pytest.raises(ConfigurationError, match=r"spared to \[0\]"):
            Attackers(fraction=1.0, forge=SignFlip()).wrap(FLTrust(0), 4)

    @pytest.mark.parametrize("fraction", [-0.1, 1.5])
    def test_the_fraction_has_a_range(self, fraction):
        with pytest.raises(ConfigurationError, match="fraction must be in"):
            Attackers(fraction=fraction)


class TestPoison:
    shards = FlatShards.of([np.array([0, 2, 4, 6]), np.array([1, 3]), np.array([5, 7])])

    def read(self, indices):
        return indices[:, None, None, None].float().expand(-1, 1, 3, 3), indices % 10

    def reader(self, read, attackers, poison):
        def change(inputs, labels, *_):
            return poison.change(inputs, labels)

        return changed_reader(read, attackers, change, "attackers.poison")

    def test_only_attackers_examples_change(self):
        chosen = poisoned_examples(self.shards, [1], 1.0, 8, seed=0)
        assert chosen.tolist() == [-1, 1, -1, 1, -1, -1, -1, -1]
        images, labels = self.reader(self.read, chosen, LabelFlip(10))(torch.tensor([3, 0, 7]))
        assert labels.tolist() == [6, 0, 7]
        assert torch.equal(images, self.read(torch.tensor([3, 0, 7]))[0])

    def test_a_share_of_them_may_change(self):
        chosen = poisoned_examples(self.shards, [0, 2], 0.5, 8, seed=0)
        assert (chosen[[0, 2, 4, 6]] == 0).sum() == 2
        assert (chosen[[5, 7]] == 2).sum() == 1
        assert (chosen[[1, 3]] == -1).all()

    def test_attackers_may_share_examples_among_themselves(self):
        shards = FlatShards.of([np.array([0, 1]), np.array([1, 2]), np.array([2, 3])])
        chosen = poisoned_examples(shards, [0, 1, 2], 1.0, 4, seed=0)
        assert (chosen >= 0).all()
        with pytest.raises(ConfigurationError, match="example 2 is in shards of attackers and of"):
            poisoned_examples(shards, [0, 1], 1.0, 4, seed=0)

    def test_a_trigger_is_a_patch_and_a_class(self):
        attackers = torch.where(torch.arange(8) == 3, 1, -1)
        reader = self.reader(self.read, attackers, Trigger(9, size=2, value=-1.0))
        images, labels = reader(torch.tensor([2, 3]))
        assert labels.tolist() == [2, 9]
        assert (images[0] == 2).all()
        assert images[1, 0].tolist() == [[3.0, 3.0, 3.0], [3.0, -1.0, -1.0], [3.0, -1.0, -1.0]]

    def test_batches_that_are_no_pairs_are_refused(self):
        reader = self.reader(lambda i: {"x": i}, torch.zeros(8, dtype=torch.long), LabelFlip(2))
        with pytest.raises(ConfigurationError, match="pairs of tensors"):
            reader(torch.tensor([0]))
