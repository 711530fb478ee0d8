"""Which sub-networks are trained: pure draws, sandwich, distillation, shrinking, budgets."""

from collections import Counter
from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_one_shot import step

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.seeds import torch_generator
from fl_lightning.nas import OneShot
from fl_lightning.nas.spaces.mobilenet import MobileNet, small_mobilenet
from fl_lightning.nas.spaces.resnet import ResNet, small_resnet
from fl_lightning.nas.spaces.vit import small_vit
from fl_lightning.nas.sub_networks.attentive import Attentive, CostBins
from fl_lightning.nas.sub_networks.capability import largest_within
from fl_lightning.nas.sub_networks.methods import (
    Shrinking,
    distillation_loss,
)

SPACES = [small_mobilenet(), small_resnet(), small_vit()]
MOBILENET = small_mobilenet()


def flops(architecture):
    return architecture.space.cost(architecture).flops


def test_a_step_draws_the_same_whenever_it_is_run():
    def drawn(client, step, seed=7, **options):
        generator = OneShot(MOBILENET, num_classes=4, seed=seed, **options)._generator(client, step)
        return [MOBILENET.sample(generator) for _ in range(3)]

    assert drawn(4, 9) == drawn(4, 9)
    others = [drawn(5, 9), drawn(4, 8), drawn(4, 9, seed=8), drawn(None, 9)]
    assert all(other != drawn(4, 9) for other in others)
    assert drawn(0, 0) != drawn(None, 0)
    assert drawn(4, 9, same_draws=True) == drawn(5, 9, same_draws=True) == drawn(None, 9)


def test_distillation():
    teacher = torch.tensor([[2.0, 0.0, -1.0]], dtype=torch.float64, requires_grad=True)
    student = torch.tensor([[1.0, 1.0, 0.0]], dtype=torch.float64, requires_grad=True)
    loss = distillation_loss(student, teacher)
    loss.backward()
    assert loss.item() == pytest.approx(0.904005, abs=1e-6)
    entropy = torch.distributions.Categorical(logits=teacher).entropy()
    assert (loss - entropy).item() == pytest.approx(0.379738, abs=1e-6)
    assert student.grad[0].tolist() == pytest.approx([-0.421476, 0.308124, 0.113352], abs=1e-6)
    torch.testing.assert_close(student.grad, student.softmax(-1) - teacher.softmax(-1))
    assert teacher.grad is None
    student, teacher = torch.randn(4, 3), torch.randn(4, 3)  # a mean over examples
    each = [distillation_loss(student[i : i + 1], teacher[i : i + 1]) for i in range(4)]
    torch.testing.assert_close(distillation_loss(student, teacher), torch.stack(each).mean())


@pytest.mark.parametrize("space", SPACES, ids=lambda space: space.name)
def test_shrinking_starts_at_the_largest_and_ends_with_all_of_the_space(space):
    phases = len(Shrinking().starts(space))
    method = Shrinking((2,) * phases)
    generator = torch.Generator().manual_seed(0)
    first = [method.kept(space, round_) for round_ in (0, 1)]
    assert [method.sample(space, kept, generator) for kept in first] == [space.largest] * 2
    told = [method.phase(space, round_) for round_ in range(3 * phases)]
    assert told == [min(round_ // 2, phases - 1) for round_ in range(3 * phases)]
    kept = method.kept(space, 1000)
    last = [method.sample(space, kept, generator) for _ in range(300)]
    for index in range(len(space.stages[0].own) + 1):
        options = range(len(space.decisions[index].options))
        assert {architecture.choices[index] for architecture in last} == set(options)


def test_options_join_in_the_published_order():
    space, method = MobileNet(), Shrinking((1,) * 7, ("kernel", "depth", "expansion"))
    rows = [method.kept(space, round_) for round_ in range(8)]
    told = [dict(zip(space.kinds, row, strict=True)) for row in rows]
    assert [tuple(kept[name] for name in method.order) for kept in told] == [
        *((1, 1, 1), (2, 1, 1), (3, 1, 1), (3, 2, 1), (3, 3, 1), (3, 3, 2), (3, 3, 3), (3, 3, 3)),
    ]
    generator = torch.Generator().manual_seed(0)
    for round_ in range(8):
        drawn = method.sample(space, rows[round_], generator)
        for stage in space.pieces_of(drawn)["stages"]:
            assert stage.depth == len(stage.blocks) in (2, 3, 4)[-told[round_]["depth"] :]
            for _, block in stage.blocks:
                assert block.kernel in (3, 5, 7)[-told[round_]["kernel"] :]
                assert block.expansion in (3, 4, 6)[-told[round_]["expansion"] :]


def shrinking(rounds, *order):
    return lambda: Shrinking(rounds, order).check(MOBILENET)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            shrinking((1, 1, 1), "kernel", "width"),
            "some of depth, kernel, expansion for mobilenet, each once; got kernel, width",
        ),
        (shrinking((1, 1), "kernel"), "rounds must have 3 numbers"),
        (shrinking((1, -1, 1), "kernel"), "rounds must have 3 numbers"),
        (shrinking((1,) * 5, "kernel", "kernel"), "each once"),
        (lambda: Attentive(keep="better"), "keep must be one of 'best', 'worst', got"),
        (lambda: Attentive(num_candidates=0), "num_candidates must be at least 1, got 0"),
        (
            lambda: largest_within(small_resnet(), flops, 1000),
            "within 1,000: the smallest, w0.5:.* costs 2,983,178",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(make, message):
    with pytest.raises(ConfigurationError, match=message):
        make()


@settings(max_examples=30)
@given(st.sampled_from(SPACES), st.floats(0, 1.1))
def test_nothing_can_be_added_to_the_largest_within_a_budget(space, share):
    low, high = flops(space.smallest), flops(space.largest)
    budget = low + share * (high - low)
    best = largest_within(space, flops, budget)
    assert flops(best) <= budget
    active = space.active(best.choices)
    for index, (choice, decision) in enumerate(zip(best.choices, space.decisions, strict=True)):
        if active[index] and choice + 1 < len(decision.options):
            raised = [*best.choices[:index], choice + 1, *best.choices[index + 1 :]]
            assert flops(space.architecture(raised)) > budget
    if share >= 1:
        assert best == space.largest


def test_bins_count_what_uniform_draws_have():
    """Every size of every draw, those without effect as well; by hand."""
    space = small_resnet()
    bins = CostBins(space, flops, seed=0, num_drawn=300, num_bins=4)
    generator = torch_generator(0, "attentive bins")
    columns = [torch.randint(len(d.options), (300,), generator=generator) for d in space.decisions]
    rows = list(zip(*(column.tolist() for column in columns), strict=True))
    costs = [flops(space.architecture(row)) for row in rows]
    width = (max(costs) - min(costs)) / 4
    number_of = [min(3, int((cost - min(costs)) // width)) for cost in costs]
    assert number_of == [bins.of(cost) for cost in costs]
    assert [bins.of(0), bins.of(1e12)] == [0, 3]
    for number in range(4):
        members = [row for row, own in zip(rows, number_of, strict=True) if own == number]
        assert float(bins.shares[number]) == pytest.approx(len(members) / 300)
        for size, decision in enumerate(space.decisions):
            for option in range(len(decision.options)):
                share = sum(row[size] == option for row in members) / len(members)
                assert float(bins.options[number, size, option]) == pytest.approx(share)


def test_draws_of_a_bin_follow_its_options_and_keep_to_its_cost():
    """The product of the options' frequencies, given that the cost falls into the bin."""
    space = ResNet(
        stem=8, channels=(16,), strides=(1,), stem_strides=(1, 1), widths=(0.5, 1.0),
        depths=((1, 2),), expansions=(0.5, 1.0),
    )  # fmt: skip
    bins = CostBins(space, flops, seed=0, num_drawn=200, num_bins=3)
    raw = list(product(*(range(len(decision.options)) for decision in space.decisions)))
    generator = torch.Generator().manual_seed(1)
    for number in range(3):
        expected = Counter()
        for row in raw:
            architecture = space.architecture(row)
            if bins.of(flops(architecture)) == number:
                chances = (bins.options[number, size, o] for size, o in enumerate(row))
                expected[architecture] += float(torch.stack(list(chances)).prod())
        found = Counter(bins.draw(number, generator) for _ in range(3000))
        assert {bins.of(flops(one)) for one in found} == {number}
        for architecture, chance in expected.items():
            share = chance / sum(expected.values())
            assert found[architecture] / 3000 == pytest.approx(share, abs=0.04)


def test_after_a_hundred_more_draws_a_candidate_of_another_bin_is_taken():
    asked = []

    def never(architecture):
        asked.append(architecture)
        return 0.0

    bins = CostBins(small_resnet(), flops, seed=0, num_bins=2)
    bins.cost, bins.edges = never, torch.tensor([0.0, 1.0, 2.0])
    drawn = bins.draw(1, torch.Generator().manual_seed(0))
    assert len(asked) == 101
    assert drawn is asked[-1]


@pytest.mark.parametrize("keep", ["best", "worst"])
def test_attentive_draws_are_the_extremes_of_one_bin(keep):
    """The loss of the toy step falls as sizes rise."""
    space = small_resnet()
    bins = CostBins(space, flops, seed=0, num_drawn=200, num_bins=4)
    numbers = set()
    for number in range(20):
        seen, one = [], step(space, seed=number)

        def logits(architecture, seen=seen, one=one):
            seen.append(architecture)
            return one.frozen(architecture) / 2

        drawn = Attentive(keep, num_candidates=20)._kept(bins, replace(one, logits=logits))
        assert len(seen) == 20
        assert len({bins.of(flops(candidate)) for candidate in seen}) == 1
        extreme = (max if keep == "best" else min)(sum(other.choices) for other in seen)
        assert sum(drawn.choices) == extreme
        numbers.add(bins.of(flops(seen[0])))
    assert len(numbers) > 1


def test_bins_are_drawn_as_often_as_their_share():
    space = small_resnet()
    bins = CostBins(space, flops, seed=0, num_drawn=500, num_bins=3)
    one, method = step(space), Attentive(num_candidates=1)
    found = Counter(bins.of(flops(method._kept(bins, one))) for _ in range(2000))
    for number, share in enumerate(bins.shares.tolist()):
        assert found[number] / 2000 == pytest.approx(share, abs=0.04)
