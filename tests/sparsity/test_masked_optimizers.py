"""Masked optimizers: torch's arithmetic on active entries, and frozen ones that nothing reaches."""

import copy
import io
import math
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fl_lightning.sparsity.masks.maskable import freeze_masked
from fl_lightning.sparsity.optimizers.sparse_optimizers import SparseAdamW, SparseSGDM

SGD, ADAMW = torch.optim.SGD, torch.optim.AdamW
DENSE = {SparseSGDM: SGD, SparseAdamW: ADAMW}
SHAPES = [(5,), (7, 3), (2, 3, 4), (), (40, 9)]
KERNELS = [{}, {"foreach": True}, {"foreach": False}, {"fused": True}]
# between one step of a number in a vector register and of one outside, which rounds more often
CLOSE = {
    torch.float64: {"rtol": 1e-13, "atol": 1e-13},
    torch.float32: {"rtol": 1e-5, "atol": 1e-6},
    torch.bfloat16: {"rtol": 2e-2, "atol": 2e-2},
}

sgd_options = st.fixed_dictionaries(
    {
        "momentum": st.sampled_from([0, 0.9]),
        "dampening": st.sampled_from([0, 0.5]),
        "weight_decay": st.sampled_from([0, 0.1]),
        "nesterov": st.booleans(),
        "maximize": st.booleans(),
    }
).filter(lambda o: not o["nesterov"] or (o["momentum"] and not o["dampening"]))
adamw_options = st.fixed_dictionaries(
    {
        "betas": st.sampled_from([(0.9, 0.999), (0.5, 0.9), (0.0, 0.9)]),
        "weight_decay": st.sampled_from([0, 0.1]),
        "amsgrad": st.booleans(),
        "maximize": st.booleans(),
    }
)
optimizers = st.one_of(
    st.tuples(st.just(SparseSGDM), sgd_options), st.tuples(st.just(SparseAdamW), adamw_options)
)


def random(shapes, seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def masks_of(shapes, density, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(shape, generator=generator) < density for shape in shapes]


def parameters(shapes=SHAPES, seed=1, dtype=torch.float32):
    return [nn.Parameter(value) for value in random(shapes, seed, dtype)]


def step(optimizer, params, seed):
    for param, grad in zip(params, random([p.shape for p in params], seed), strict=True):
        param.grad = grad.to(param.dtype)
    optimizer.step()


def bits(tensor):
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def same_bits(params, others):
    return all(torch.equal(bits(a), bits(b)) for a, b in zip(params, others, strict=True))


@given(
    optimizers,
    st.sampled_from(KERNELS),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    st.sampled_from([None, 1.0]),
)
def test_without_frozen_entries_it_is_the_dense_optimizer(which, kernel, dtype, density):
    make, options = which
    ours, dense = parameters(dtype=dtype), parameters(dtype=dtype)
    masks = None if density is None else [torch.ones(s, dtype=torch.bool) for s in SHAPES]
    optimizer = make(ours, lr=0.1, masks=masks, **options, **kernel)
    other = DENSE[make](dense, lr=0.1, **options, **kernel)
    for seed in range(4):
        step(optimizer, ours, seed)
        step(other, dense, seed)
    assert same_bits(ours, dense)
    states = [o.state_dict()["state"] for o in (optimizer, other)]
    torch.testing.assert_close(*states, rtol=0, atol=0)


@given(
    optimizers,
    st.sampled_from(KERNELS),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    st.lists(st.lists(st.integers(1, 6), max_size=3).map(tuple), min_size=1, max_size=4),
    st.floats(0, 1),
    st.integers(0, 1000),
)
def test_active_entries_move_as_in_a_dense_run_and_frozen_ones_never(
    which, kernel, dtype, shapes, density, seed
):
    make, options = which
    start, masks = parameters(shapes, seed, dtype), masks_of(shapes, density, seed)
    ours, dense = copy.deepcopy(start), copy.deepcopy(start)
    optimizer = make(ours, lr=0.1, masks=masks, **options, **kernel)
    other = DENSE[make](dense, lr=0.1, **options, **kernel)
    for number in range(4):
        step(optimizer, ours, number)
        step(other, dense, number)
    for param, reference, before, mask in zip(ours, dense, start, masks, strict=True):
        assert torch.equal(bits(param[~mask]), bits(before[~mask]))
        torch.testing.assert_close(param[mask], reference[mask], **CLOSE[dtype])


@pytest.mark.parametrize("make", [SparseSGDM, SparseAdamW])
@pytest.mark.parametrize("kernel", KERNELS)
def test_active_entries_have_the_bits_of_the_dense_optimizer_on_them_alone(make, kernel):
    shapes = [(300,), (33, 17)]
    ours, masks = parameters(shapes), masks_of(shapes, 0.3)
    alone = [nn.Parameter(p.detach()[mask].clone()) for p, mask in zip(ours, masks, strict=True)]
    optimizer = make(ours, lr=0.1, weight_decay=0.1, masks=masks, **kernel)
    other = DENSE[make](alone, lr=0.1, weight_decay=0.1, **kernel)
    for seed in range(4):
        step(optimizer, ours, seed)
        for param, owner, mask in zip(alone, ours, masks, strict=True):
            param.grad = owner.grad[mask]
        other.step()
    assert same_bits([p[mask] for p, mask in zip(ours, masks, strict=True)], alone)


@pytest.mark.parametrize("density", [0.0, 0.3, 0.9])
@pytest.mark.parametrize("make", [SparseSGDM, SparseAdamW])
def test_gradients_that_are_not_finite_and_signed_zeros_do_not_reach_frozen_entries(make, density):
    param = nn.Parameter(torch.tensor([-0.0, 0.0, 1.0, float("nan")] * 50))
    mask = masks_of([(200,)], density)[0]
    before = param.detach().clone()
    optimizer = make([param], lr=0.1, weight_decay=0.1, masks=[mask])
    for bad in (float("inf"), float("nan"), -1.0):
        param.grad = torch.full((200,), bad)
        optimizer.step()
    assert torch.equal(bits(param[~mask]), bits(before[~mask]))
    assert mask.sum() == 0 or not torch.equal(bits(param[mask]), bits(before[mask]))


def run(make, options, first, second, interrupt):
    """Step with one mask, then with another, and do something in between."""
    params = parameters()
    optimizer = make(params, lr=0.1, masks=masks_of(SHAPES, *first), **options)
    for seed in range(2):
        step(optimizer, params, seed)
    optimizer, params = interrupt(optimizer, params)
    if second is not None:
        optimizer.set_masks(masks_of(SHAPES, *second))
    for seed in range(2, 5):
        step(optimizer, params, seed)
    return params


def nothing(optimizer, params):
    return optimizer, params


def pickled(optimizer, params):
    optimizer = pickle.loads(pickle.dumps(optimizer))
    return optimizer, optimizer.param_groups[0]["params"]


def copied(optimizer, params):
    return copy.deepcopy([optimizer, params])


def reloaded(optimizer, params, masks=None):
    """From a file, which loads without pickle."""
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    optimizer.set_masks(masks_of(SHAPES, 0.5, 9))  # none of this may remain
    fresh = type(optimizer)(params, lr=7.0, masks=masks)
    fresh.load_state_dict(state)
    return fresh, params


def reloaded_over_other_masks(optimizer, params):
    return reloaded(optimizer, params, masks_of(SHAPES, 0.6, 8))


@pytest.mark.parametrize("interrupt", [pickled, copied, reloaded, reloaded_over_other_masks])
@pytest.mark.parametrize(
    ("make", "options", "density", "second"),
    [
        (SparseSGDM, {"momentum": 0.9}, 0.3, None),
        (SparseSGDM, {"momentum": 0.9}, 0.9, (0.4, 5)),
        (SparseAdamW, {"amsgrad": True}, 0.9, None),
        (SparseAdamW, {"amsgrad": True}, 0.3, (0.4, 5)),
    ],
)
def test_masks_and_state_survive(make, options, density, second, interrupt):
    expected = run(make, options, (density, 0), second, nothing)
    assert same_bits(run(make, options, (density, 0), second, interrupt), expected)


@pytest.mark.parametrize("density", [0.3, 0.9])
@pytest.mark.parametrize("make", [SparseSGDM, SparseAdamW])
def test_state_of_a_dense_optimizer_is_cut_to_the_masks(make, density):
    params, masks = parameters(), masks_of(SHAPES, density)
    options = {"momentum": 0.9} if make is SparseSGDM else {}
    dense = DENSE[make](params, lr=0.1, **options)
    step(dense, params, 0)
    optimizer = make(params, lr=0.1, masks=masks)
    optimizer.load_state_dict(dense.state_dict())
    before, mirror = copy.deepcopy(params), copy.deepcopy([dense, params])
    for seed in (1, 2):
        step(optimizer, params, seed)
        step(mirror[0], mirror[1], seed)
    for param, reference, start, mask in zip(params, mirror[1], before, masks, strict=True):
        assert torch.equal(param[~mask], start[~mask])
        torch.testing.assert_close(param[mask], reference[mask])


@given(st.floats(0, 1), st.floats(0, 1), st.integers(0, 99))
@settings(max_examples=50)
def test_a_new_mask_keeps_the_momentum_of_entries_that_stay(first, second, seed):
    param = nn.Parameter(torch.zeros(60))
    old, new = masks_of([(60,)] * 2, 1, seed)
    old, new = (masks_of([(60,)], d, seed + i)[0] for i, d in enumerate((first, second)))
    optimizer = SparseSGDM([param], lr=1.0, momentum=0.5, masks=[old])
    param.grad = torch.arange(1.0, 61)
    optimizer.step()
    optimizer.set_masks([new])
    before = param.detach().clone()
    param.grad = torch.zeros(60)
    optimizer.step()
    moved = before - param.detach()
    assert torch.equal(moved, torch.where(old & new, torch.arange(1.0, 61) / 2, 0.0))


def test_entries_that_join_adam_are_not_thrown_far():
    param = nn.Parameter(torch.zeros(4))
    optimizer = SparseAdamW(
        [param], lr=0.1, weight_decay=0.0, masks=[torch.tensor([True, True, False, False])]
    )
    for _ in range(100):
        param.grad = torch.ones(4)
        optimizer.step()
    optimizer.set_masks([torch.tensor([True, False, True, False])])
    for _ in range(20):
        before = param.detach().clone()
        param.grad = torch.ones(4)
        optimizer.step()
        moved = (before - param.detach()).tolist()
        assert moved[0] == pytest.approx(0.1, rel=1e-3)
        assert 0 < moved[2] <= 0.1 * 1.001
        assert moved[1] == moved[3] == 0


def test_masks_by_name_by_parameter_and_of_a_group_that_is_added_later():
    module, mask = nn.Linear(2, 2), torch.tensor([[True, False], [False, False]])
    optimizer = SparseSGDM(module.named_parameters(), lr=0.1, masks={"weight": mask})
    assert list(optimizer.masks) == [module.weight]
    optimizer.set_masks({module.bias: torch.tensor([True, False])})
    assert list(optimizer.masks) == [module.bias]
    [added] = parameters([(4,)])
    optimizer.add_param_group({"params": [("added", added)]})  # it moves as a whole until masked
    assert list(optimizer.masks) == [module.bias]
    optimizer.set_masks([None, None, torch.tensor([True, False] * 2)])
    assert list(optimizer.masks) == [added]
    optimizer.set_masks(None)
    assert optimizer.masks == {}


@pytest.mark.parametrize(
    ("masks", "message"),
    [
        ({"wieght": torch.ones(2, 2, dtype=torch.bool)}, "no parameter wieght; .* weight, bias"),
        ([None], "1 are given for 2 parameters"),
        ({"weight": torch.ones(2, 2)}, "parameter weight must be bool .* got torch.float32"),
        ([torch.ones(2, dtype=torch.bool), None], r"shape \(2, 2\), got torch.bool of shape \(2,"),
        ({torch.zeros(3): None}, r"no parameter a tensor \(3,\)"),
    ],
)
def test_masks_that_do_not_fit(masks, message):
    with pytest.raises(ValueError, match=message):
        SparseSGDM(nn.Linear(2, 2).named_parameters(), masks=masks)


def test_groups_closures_schedules_and_parameters_without_gradient():
    first, second, third = parameters([(6,), (6,), (6,)])
    mask = torch.tensor([True, False] * 3)
    groups = [{"params": [first, third]}, {"params": [second], "lr": 0.5, "momentum": 0.0}]
    optimizer = SparseSGDM(groups, lr=0.1, momentum=0.9, masks=[mask, mask, None])
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.1)
    starts = [p.detach().clone() for p in (first, second, third)]

    def closure():
        optimizer.zero_grad()
        loss = first.sum() + second.sum()
        loss.backward()
        return loss

    loss = closure().item()
    assert optimizer.step(closure).item() == loss
    scheduler.step()
    optimizer.step(closure)
    # 0.1 · 1, then 0.01 · (0.9 + 1); the second group 0.5, then 0.05; the third has no gradient
    torch.testing.assert_close(starts[0] - first.detach(), mask * (0.1 + 0.019))
    torch.testing.assert_close(starts[1] - second.detach(), torch.full((6,), 0.55))
    assert torch.equal(starts[2], third)


@pytest.mark.parametrize(
    ("make", "kernel"), [(SparseSGDM, {}), (SparseSGDM, {"fused": True}), (SparseAdamW, {})]
)
def test_gradient_scaler_unscales_and_skips_steps(make, kernel):
    results = []
    for scale in (None, 1024.0):
        (param,) = parameters([(50,)])
        optimizer = make([param], lr=0.1, masks=masks_of([(50,)], 0.5), **kernel)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None)
        for factor in (1.0, 2.0, float("inf")):
            if scale is None and factor == float("inf"):
                continue
            optimizer.zero_grad()
            scaler.scale((param.square() * factor).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        results.append(param)
    assert same_bits([results[0]], [results[1]])
    assert scaler.get_scale() == 512


def test_parameters_that_are_not_contiguous():
    start = torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(0))
    mask = masks_of([start.shape], 0.3)[0]
    params = [
        nn.Parameter(start.clone()),
        nn.Parameter(start.clone().to(memory_format=torch.channels_last)),
    ]
    for param in params:
        optimizer = SparseSGDM([param], lr=0.1, momentum=0.9, weight_decay=0.1, masks=[mask])
        for seed in range(3):
            step(optimizer, [param], seed)
    assert torch.equal(*params)
    assert torch.equal(params[0][~mask], start[~mask])


def test_gradients_of_sparse_layout():
    embedding = nn.Embedding(5, 2, sparse=True)
    optimizer = SparseSGDM([embedding.weight], lr=0.1)
    embedding(torch.tensor([1])).sum().backward()
    optimizer.step()
    optimizer.set_masks([torch.arange(10).view(5, 2) < 2])
    with pytest.raises(ValueError, match="sparse=False"):
        optimizer.step()


def test_options_are_checked():
    with pytest.raises(ValueError, match="learning rate"):
        SparseSGDM(parameters(), lr=-1)
    with pytest.raises(ValueError, match="named_parameters"):
        SparseSGDM(nn.Linear(2, 2).parameters(), masks={"weight": None})
    longer = SparseSGDM([nn.Parameter(torch.zeros(9))], masks=[torch.arange(9) == 8])
    with pytest.raises(ValueError, match="another model"):
        SparseSGDM([nn.Parameter(torch.zeros(8))]).load_state_dict(longer.state_dict())
    with pytest.raises(ValueError, match="Nesterov"):
        SparseSGDM(parameters(), nesterov=True)
    with pytest.raises(ValueError, match="beta"):
        SparseAdamW(parameters(), betas=(1.0, 0.9))
    for option in ("lr", "momentum", "weight_decay"):
        for value in (math.inf, math.nan):
            with pytest.raises(ValueError, match=f"{option} must be finite, got {value}"):
                SparseSGDM(parameters(), **{"lr": 0.1, option: value})


def test_no_gradient_where_nothing_may_move():
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    masks = {n: torch.full(p.shape, n.startswith("1.")) for n, p in module.named_parameters()}
    optimizer = SparseSGDM(module.named_parameters(), lr=0.1, masks=masks)
    before = copy.deepcopy(module.state_dict())
    assert freeze_masked(module, masks) == ["0.weight", "0.bias"]
    module(torch.ones(1, 3)).sum().backward()
    assert module[0].weight.grad is None
    optimizer.step()
    changed = [n for n, value in module.state_dict().items() if not torch.equal(value, before[n])]
    assert changed == ["1.weight", "1.bias"]
    with pytest.raises(ValueError, match=r"no parameter 2\.weight"):
        freeze_masked(module, {"2.weight": torch.zeros(1, dtype=torch.bool)})


@pytest.mark.parametrize("make", [SparseSGDM, SparseAdamW])
def test_a_tensor_of_which_nothing_moves_has_no_state(make):
    params = parameters([(3,), (4, 2)])
    masks = [torch.zeros(3, dtype=torch.bool), masks_of([(4, 2)], 0.5)[0]]
    options = {"momentum": 0.9} if make is SparseSGDM else {}
    for kernel in KERNELS:
        optimizer = make(params, lr=0.1, masks=masks, **options, **kernel)
        for seed in range(2):
            step(optimizer, params, seed)
        assert list(optimizer.state) == params[1:]
