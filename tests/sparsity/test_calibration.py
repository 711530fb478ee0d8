"""Calibration: what each round scores and keeps, the five rules, and what is refused."""

import pytest
import torch
from networks import examples, tiny_vit, two_layers
from torch.utils.data import DataLoader, TensorDataset

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.sparsity import (
    Calibration,
    CalibrationPlan,
    ExactFisher,
    HighestMagnitude,
    LeastSensitive,
    LowestMagnitude,
    MostSensitive,
    RandomEntries,
    SampledFisher,
    Scores,
    calibrate,
    maskable_names,
    union,
)

RULES = [LeastSensitive, MostSensitive, LowestMagnitude, HighestMagnitude, RandomEntries]


def flat(tensors):
    return torch.cat([tensor.flatten() for tensor in tensors.values()])


def lowest(values, k):
    kept = torch.zeros(len(values), dtype=torch.bool)
    kept[torch.argsort(values, stable=True)[:k]] = True
    return kept


def test_one_shot_is_a_sort_of_the_scores():
    module, batch = two_layers(), examples(6, 3)
    scores = flat(ExactFisher()(module, [batch]).mean())
    options = {"density": 0.25, "sensitivity": ExactFisher(), "rounds": 1}
    assert torch.equal(flat(calibrate(module, [batch], **options)), lowest(scores, 11))
    most = calibrate(module, [batch], rule=MostSensitive(), **options)
    assert torch.equal(flat(most), lowest(-scores, 11))


def test_progressive_rounds_by_hand():
    """Each round scores the network with what was dropped at a hundredth."""
    module, batch = two_layers(), examples(6, 3)
    start = {name: p.detach().clone() for name, p in module.named_parameters()}
    kept = torch.ones(44, dtype=torch.bool)
    for k in (25, 14, 8, 4):  # 44 · 0.1^(r/4) = 24.7, 13.9, 7.8, 4.4
        soft = torch.where(kept, flat(start), flat(start) * 0.01)
        torch.nn.utils.vector_to_parameters(soft, module.parameters())
        scores = flat(ExactFisher()(module, [batch]).mean())
        kept &= lowest(torch.where(kept, scores, torch.inf), k)
    torch.nn.utils.vector_to_parameters(flat(start), module.parameters())
    mask = calibrate(module, [batch], density=0.1, sensitivity=ExactFisher())
    assert torch.equal(flat(mask), kept)
    one_shot = calibrate(module, [batch], density=0.1, sensitivity=ExactFisher(), rounds=1)
    no_soft_mask = calibrate(module, [batch], density=0.1, sensitivity=ExactFisher(), soft_mask=1.0)
    assert one_shot != mask
    assert no_soft_mask == one_shot  # the same scores every round
    assert all(torch.equal(start[n], p) for n, p in module.named_parameters())


def test_clients_scores_give_the_mask_of_all_their_examples():
    """The server's part: scores summed over clients, once a round; examples never leave."""
    module, (x, y) = two_layers(), examples(12, 3)
    shards = [(x[:2], y[:2]), (x[2:7], y[2:7]), (x[7:], y[7:])]
    plan = CalibrationPlan(density=0.2, rounds=3)
    server = Calibration(plan, dict(module.named_parameters()))
    while not server.is_done:
        values = server.soft_parameters()
        first, *others = [ExactFisher()(module, [shard], parameters=values) for shard in shards]
        for other in others:
            first += other
        server.step(first)
    assert server.round == 3
    central = calibrate(module, [(x, y)], density=0.2, rounds=3, sensitivity=ExactFisher())
    assert server.mask == central


def test_averaging_adds_up_and_drops_once():
    parameters = {"a": torch.ones(4)}
    plan = CalibrationPlan(density=0.25, rounds=2, progressive=False)
    calibration = Calibration(plan, parameters)
    calibration.step(Scores({"a": torch.tensor([9.0, 1, 6, 9])}, 1))
    assert calibration.mask.density == 1
    calibration.step(Scores({"a": torch.tensor([9.0, 7, 1, 9])}, 1))
    assert calibration.mask["a"].tolist() == [False, False, True, False]


@pytest.mark.parametrize("rule", RULES)
def test_five_rules_on_a_vision_transformer(rule):
    module, batch = tiny_vit(), examples(4, 1, 16, 16)
    names = maskable_names(module)
    mask = calibrate(module, [batch], sparsity=0.9, rule=rule(), rounds=2, seed=1)
    assert list(mask) == names
    assert mask.num_active == round(0.1 * mask.num_entries)
    mask.check_fits(module)
    assert mask == calibrate(module, [batch], sparsity=0.9, rule=rule(), rounds=2, seed=1)
    weights = flat({n: p for n, p in module.named_parameters() if n in set(names)}).detach().abs()
    kept = flat(mask)
    if rule is LowestMagnitude:
        assert weights[kept].max() <= weights[~kept].min()
    if rule is HighestMagnitude:
        assert weights[kept].min() >= weights[~kept].max()
    if rule is RandomEntries:
        other = calibrate(module, [], sparsity=0.9, rule=rule(), seed=2)
        assert other.num_active == mask.num_active
        assert 0.17 < union([mask, other]).density < 0.21  # 0.19 of independent ones


def test_a_threshold_for_each_tensor():
    module, batch = tiny_vit(), examples(4, 1, 16, 16)
    mask = calibrate(module, [batch], density=0.3, per_tensor=True)
    assert mask.num_active == round(0.3 * mask.num_entries)
    for name, active in mask.active_per_tensor.items():
        assert abs(active - 0.3 * mask[name].numel()) <= 3  # rounded in four rounds
    plain = calibrate(module, [batch], density=0.3)
    densities = [active / plain[name].numel() for name, active in plain.active_per_tensor.items()]
    assert max(densities) - min(densities) > 0.5


def test_a_shuffling_loader_is_shuffled_by_the_seed_alone():
    module, (x, y) = two_layers(), examples(12, 3)
    loader = DataLoader(TensorDataset(x, y), batch_size=5, shuffle=True)
    options = {"density": 0.2, "sensitivity": SampledFisher(), "seed": 4}
    state = torch.get_rng_state()
    first = calibrate(module, loader, **options)
    assert torch.equal(state, torch.get_rng_state())
    torch.manual_seed(123)
    assert calibrate(module, loader, **options) == first


def test_what_is_refused():
    module, batch = two_layers(), examples(4, 3)
    with pytest.raises(ConfigurationError, match="an iterator can be read only once"):
        calibrate(module, iter([batch]), density=0.1)
    assert calibrate(module, iter([batch]), density=0.25, rounds=1).num_active == 11
    with pytest.raises(ConfigurationError, match=r"no parameters 0\.wait"):
        calibrate(module, [batch], density=0.1, names=["0.wait"])
    with pytest.raises(ConfigurationError, match="names is empty"):
        calibrate(module, [batch], density=0.1, names=[])
    calibration = Calibration(CalibrationPlan(density=0.5), {"a": torch.ones(2)})
    for scores, message in [
        (None, "LeastSensitive needs scores"),
        (Scores({"a": torch.ones(3)}, 1), "differ in a"),
        (Scores({"b": torch.ones(2)}, 1), "differ in a, b"),
        (Scores({"a": torch.tensor([-1.0, 1])}, 1), "negative numbers or NaN in a"),
        (Scores({"a": torch.tensor([torch.nan, 1])}, 1), "NaN in a"),
        (Scores({"a": torch.ones(2)}, 0), "got 0 examples"),
    ]:
        with pytest.raises(ConfigurationError, match=message):
            calibration.step(scores)
