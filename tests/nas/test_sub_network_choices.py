"""Which sub-networks are trained: pure draws, sandwich, distillation, shrinking, budgets, predictors."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.nas.elastic.attentive import AttentiveDraw, ForestPredictor, Pool, pool_by_cost
from fl_lightning.nas.elastic.budget import fit, largest_within
from fl_lightning.nas.elastic.sandwich import distillation_loss, sandwich, step_generator
from fl_lightning.nas.elastic.shrinking import ProgressiveShrinking, published_order
from fl_lightning.nas.spaces.mobilenet import MobileNet, small_mobilenet
from fl_lightning.nas.spaces.resnet import small_resnet
from fl_lightning.nas.spaces.vit import small_vit

SPACES = [small_mobilenet(), small_resnet(), small_vit()]
MOBILENET = small_mobilenet()


def flops(architecture):
    return architecture.space.cost(architecture).flops


def test_a_step_draws_the_same_whenever_it_is_run():
    def drawn(client, step, round_=2, seed=7):
        return sandwich(
            MOBILENET, step_generator(seed, round_=round_, client=client, step=step), num_drawn=3
        )

    assert drawn(4, 9) == drawn(4, 9)
    others = [drawn(5, 9), drawn(4, 8), drawn(4, 9, round_=3), drawn(4, 9, seed=8), drawn(None, 9)]
    assert all(other != drawn(4, 9) for other in others)
    assert drawn(0, 0) != drawn(None, 0)


def test_the_sandwich_is_the_largest_the_smallest_and_drawn_ones():
    generator = step_generator(0, round_=0, client=None, step=0)
    largest, smallest, *drawn = sandwich(MOBILENET, generator)
    assert (largest, smallest, len(drawn)) == (MOBILENET.largest, MOBILENET.smallest, 2)
    assert sandwich(MOBILENET, generator, num_drawn=0) == [largest, smallest]
    with pytest.raises(ConfigurationError, match="num_drawn must be at least 0, got -1"):
        sandwich(MOBILENET, generator, num_drawn=-1)


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


def test_distillation_is_a_mean_over_examples():
    student, teacher = torch.randn(4, 3), torch.randn(4, 3)
    each = [distillation_loss(student[i : i + 1], teacher[i : i + 1]) for i in range(4)]
    torch.testing.assert_close(distillation_loss(student, teacher), torch.stack(each).mean())


@pytest.mark.parametrize("space", SPACES, ids=lambda space: space.name)
def test_shrinking_starts_at_the_largest_and_ends_with_all_of_the_space(space):
    order = published_order(space)
    phases = 1 + sum(
        max(len(s.options) for _, s in space.named_sizes if s.name == name) - 1 for name in order
    )
    schedule = ProgressiveShrinking(space, order, (2,) * phases)
    generator = torch.Generator().manual_seed(0)
    assert [schedule.sample(round_, generator) for round_ in (0, 1)] == [space.largest] * 2
    begun = [round_ for round_ in range(3 * phases) if schedule.begins_phase(round_)]
    assert begun == list(range(2, 2 * phases, 2))
    last = [schedule.sample(1000, generator) for _ in range(300)]
    for index in range(len(space.parts[0].own) + 1):
        options = range(len(space.decisions[index].options))
        assert {architecture.choices[index] for architecture in last} == set(options)


def test_options_join_in_the_published_order():
    schedule = ProgressiveShrinking(MobileNet(), ("kernel", "depth", "expansion"), (1,) * 7)
    told = [schedule.options(round_) for round_ in range(8)]
    numbers = [tuple(len(options[name]) for name in schedule.order) for options in told]
    assert numbers == [
        *((1, 1, 1), (2, 1, 1), (3, 1, 1), (3, 2, 1), (3, 3, 1), (3, 3, 2), (3, 3, 3), (3, 3, 3)),
    ]
    assert told[5]["expansion"] == (4, 6)
    generator = torch.Generator().manual_seed(0)
    for round_ in range(8):
        for part in MobileNet().sizes(schedule.sample(round_, generator)):
            assert len(part.blocks) in told[round_]["depth"]
            for kernel, expansion in part.blocks:
                assert kernel in told[round_]["kernel"]
                assert expansion in told[round_]["expansion"]


@pytest.mark.parametrize(
    ("order", "rounds", "message"),
    [
        (("kernel", "width"), (1, 1, 1), "of depth, kernel, expansion; got kernel, width"),
        (("kernel",), (1, 1), "rounds must have 3 numbers"),
        (("kernel",), (1, -1, 1), "rounds must have 3 numbers"),
        (("kernel", "kernel"), (1,) * 5, "at most once"),
    ],
)
def test_schedules_that_make_no_sense(order, rounds, message):
    with pytest.raises(ConfigurationError, match=message):
        ProgressiveShrinking(MOBILENET, order, rounds)


@settings(max_examples=30, deadline=None)
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


def test_a_budget_that_nothing_meets_names_the_smallest():
    with pytest.raises(
        ConfigurationError, match=r"within 1,000: the smallest, w0.5:.* costs 2,983,178"
    ):
        largest_within(small_resnet(), flops, 1000)
    with pytest.raises(ConfigurationError, match="no network of resnet is within"):
        fit(small_resnet().largest, flops, 1000, torch.Generator())


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(SPACES), st.integers(0, 1000), st.floats(0, 1))
def test_drawn_sub_networks_are_made_to_fit(space, seed, share):
    generator = torch.Generator().manual_seed(seed)
    drawn = space.sample(generator)
    low, high = flops(space.smallest), flops(space.largest)
    budget = low + share * (high - low)
    fitted = fit(drawn, flops, budget, generator)
    assert flops(fitted) <= budget
    assert all(a <= b for a, b in zip(fitted.choices, drawn.choices, strict=True))
    if flops(drawn) <= budget:
        assert fitted == drawn


@pytest.mark.parametrize("keep", ["best", "worst"])
def test_attentive_draws_are_the_extremes_of_one_bin(keep):
    space = small_resnet()
    pool = pool_by_cost(space, flops, seed=0, num_drawn=200, num_bins=4)
    assert sum(len(members) for members in pool.bins) == 200
    assert float(pool.shares.sum()) == pytest.approx(1)
    for number, members in enumerate(pool.bins):
        costs = [flops(member) for member in members]
        assert pool.edges[number] <= min(costs)
        assert max(costs) <= pool.edges[number + 1]
    seen = []

    def predict(architectures):
        seen.append(architectures)
        return [sum(architecture.choices) for architecture in architectures]

    draw = AttentiveDraw(pool, predict, keep, num_candidates=20)
    for step in range(20):
        drawn = draw(step_generator(0, round_=0, client=1, step=step))
        assert any(set(seen[-1]) <= set(members) for members in pool.bins)
        extreme = (max if keep == "best" else min)(sum(other.choices) for other in seen[-1])
        assert sum(drawn.choices) == extreme
    again = draw(step_generator(0, round_=0, client=1, step=19))
    assert again == drawn


def test_bins_are_drawn_as_often_as_their_share():
    space = small_resnet()
    pool = Pool(((space.smallest,) * 30, (space.largest,) * 10), (0.0, 1.0, 2.0))
    draw = AttentiveDraw(pool, lambda architectures: [0.0] * len(architectures), num_candidates=1)
    generator = torch.Generator().manual_seed(0)
    share = sum(draw(generator) == space.largest for _ in range(2000)) / 2000
    assert share == pytest.approx(0.25, abs=0.04)


def test_a_forest_ranks_what_it_has_not_seen():
    space = small_resnet()
    generator = torch.Generator().manual_seed(0)
    seen, unseen = ([space.sample(generator) for _ in range(n)] for n in (200, 50))

    def scores(architectures):
        return torch.tensor([float(flops(a)) for a in architectures])

    predict = ForestPredictor(seen, scores(seen).tolist(), seed=0)
    found = torch.tensor(predict(unseen))
    assert torch.corrcoef(torch.stack([found.argsort().argsort(), scores(unseen).argsort().argsort()])
                          .double())[0, 1] > 0.8  # fmt: skip
    assert predict(unseen) == ForestPredictor(seen, scores(seen).tolist(), seed=0)(unseen)


def test_options_of_attentive_draws_that_make_no_sense():
    pool = Pool(((MOBILENET.smallest,),), (0.0, 1.0))
    with pytest.raises(ConfigurationError, match="keep must be best or worst, got 'better'"):
        AttentiveDraw(pool, lambda architectures: [], "better")
    with pytest.raises(ConfigurationError, match="num_candidates must be at least 1, got 0"):
        AttentiveDraw(pool, lambda architectures: [], num_candidates=0)
    with pytest.raises(ConfigurationError, match="num_drawn and num_bins must be at least 1"):
        pool_by_cost(MOBILENET, flops, seed=0, num_bins=0)
    with pytest.raises(ConfigurationError, match="a score for each architecture"):
        ForestPredictor([MOBILENET.smallest], [], seed=0)
