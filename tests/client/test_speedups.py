"""Speedups change the order of sums and nothing else."""

import copy
from contextlib import nullcontext
from functools import partial
from itertools import chain, combinations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, RMSprop
from torch.utils._python_dispatch import TorchDispatchMode

from fl_lightning.engines.compiler.speedups import SPEEDUPS, FasterStep, reason_against

ALL = ("channels_last", "fused_optimizer")
SUBSETS = list(chain.from_iterable(combinations(ALL, n) for n in range(3)))
WITH_DIRECT = [("direct_layers", *subset) for subset in SUBSETS]  # for single precision


def conv_net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(8 * 49, 300),
        nn.ReLU(),
        nn.Linear(300, 5),
    )


def batches(dtype, count=4):
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        x = torch.randn(6, 3, 16, 16, generator=generator, dtype=dtype)
        yield x, torch.randint(5, (6,), generator=generator)


def trained(speedups, make_optimizer, dtype=torch.float64, net=None, loss_of=None):
    net = (net or conv_net()).to(dtype)
    loss_of = loss_of or (lambda net, x, y: F.cross_entropy(net(x), y))
    optimizer = make_optimizer(net)
    faster = FasterStep(net, optimizer, speedups)
    for x, y in batches(dtype):
        optimizer.zero_grad()
        with faster.forwards():
            loss = loss_of(net, *faster.batch((x, y)))
        loss.backward()
        faster.step()
    faster.close()
    return net


def sgd(**options):
    return lambda net: SGD(net.parameters(), **{"lr": 0.05} | options)


def two_groups(net):
    groups = [
        {"params": net[:6].parameters(), "lr": 0.1, "momentum": 0.5},
        {"params": net[6:].parameters(), "weight_decay": 0.1},
    ]
    return SGD(groups, lr=0.01)


def assert_same(one, other, tolerance):
    for p, q in zip(one.state_dict().values(), other.state_dict().values(), strict=True):
        torch.testing.assert_close(p, q, rtol=tolerance, atol=tolerance)
        assert p.is_contiguous()


@pytest.mark.parametrize("speedups", SUBSETS, ids="+".join)
@pytest.mark.parametrize(
    ("make_optimizer", "tolerance"),
    [
        (sgd(), 1e-13),
        (sgd(momentum=0.9, weight_decay=0.1), 1e-13),
        (two_groups, 1e-13),
        # batch norm leaves the bias before it a gradient of rounding alone, which Adam enlarges
        (lambda net: Adam(net.parameters()), 1e-9),
    ],
)
def test_the_same_training(speedups, make_optimizer, tolerance):
    assert_same(trained(speedups, make_optimizer), trained((), make_optimizer), tolerance)


@pytest.mark.parametrize("speedups", WITH_DIRECT, ids="+".join)
def test_the_same_training_in_single_precision(speedups):
    for options in ({}, {"momentum": 0.9, "weight_decay": 0.1}):
        one, other = (trained(s, sgd(**options), torch.float32) for s in (speedups, ()))
        assert_same(one, other, 2e-6)


@pytest.mark.parametrize("fails", [False, True])
def test_options_of_the_optimizer_are_those_before_a_fused_step(fails):
    net, seen = conv_net(), []
    optimizer = two_groups(net)
    before = [dict(group) for group in optimizer.param_groups]

    def note(stepped, *_):
        seen.append([group["fused"] for group in stepped.param_groups])
        if fails:
            raise ArithmeticError

    optimizer.register_step_pre_hook(note)
    with pytest.raises(ArithmeticError) if fails else nullcontext():
        FasterStep(net, optimizer, ("fused_optimizer",)).step()
    assert seen == [[True, True]]
    assert optimizer.param_groups == before


@pytest.mark.parametrize("kind", ["few inputs", "turned"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_large_layers_that_are_no_direct_ones(kind, momentum):
    """Rows shorter than a vector, or weights that do not lie row by row."""
    few = nn.Linear(4, 30_000) if kind == "few inputs" else nn.Linear(500, 300)
    if kind == "turned":
        few.weight = nn.Parameter(few.weight.detach().t().contiguous().t())
    net = nn.Sequential(nn.Linear(16, few.in_features), few, nn.ReLU())
    x = torch.randn(1, 16, generator=torch.Generator().manual_seed(0))
    ends = []
    for speedups in (("direct_layers",), ()):
        own = copy.deepcopy(net)
        optimizer = SGD(own.parameters(), lr=0.01, momentum=momentum, weight_decay=0.1)
        faster = FasterStep(own, optimizer, speedups)
        for _ in range(3):
            optimizer.zero_grad()
            with faster.forwards():
                loss = own(x).square().mean()
            loss.backward()
            faster.step()
        ends.append(own)
    for p, q in zip(*(end.parameters() for end in ends), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-5)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.head = nn.Linear(16, 48), nn.Linear(16, 2)

    def forward(self, x):
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 8).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v)
        return self.head(out.transpose(1, 2).flatten(2))


class Products(TorchDispatchMode):
    """Notes in which precision batches of matrices are multiplied."""

    def __init__(self):
        super().__init__()
        self.dtypes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.bmm.default:
            self.dtypes.append(args[0].dtype)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_math_attention_multiplies_in_the_precision_of_its_inputs(dtype):
    net = Attention()
    x = torch.randn(4, 5, 16, generator=torch.Generator().manual_seed(0))
    faster = FasterStep(net, SGD(net.parameters(), lr=0.1), ("math_attention",))
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        plain = net(x)
        with Products() as products, faster.forwards():
            found = net(x)
    found.sum().backward()
    assert products.dtypes == [dtype, dtype]
    tolerance = 0.02 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(found, plain, rtol=tolerance, atol=tolerance)
    with pytest.raises(KeyError), faster.forwards():
        raise KeyError
    assert not torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()


def test_everything_is_put_back():
    net = conv_net()
    faster = FasterStep(net, SGD(net.parameters(), lr=0.1), SPEEDUPS)
    assert net[0].weight.is_contiguous(memory_format=torch.channels_last)
    with pytest.raises(RuntimeError), faster.forwards():
        net(torch.zeros(1, 5))
    faster.close()
    assert net[0].weight.is_contiguous()
    assert not any("forward" in vars(layer) for layer in net.modules())


@pytest.mark.parametrize(("channels", "side", "kernel"), [(1, 8, 3), (4, 8, 1), (3, 8, 3)])
def test_one_channel_or_one_pixel_is_in_no_other_layout(channels, side, kernel):
    """With the usual strides of an axis of length one, a convolution would go back to the other."""
    net = nn.Conv2d(channels, 8, kernel)
    before = net.weight.detach().clone(), net.weight.stride()
    faster = FasterStep(net, SGD(net.parameters()), ("channels_last",))
    out = net(faster.batch(torch.randn(2, channels, side, side)))
    assert out.stride(1) == 1
    faster.close()
    assert torch.equal(net.weight, before[0])
    assert net.weight.stride() == before[1]


@pytest.mark.parametrize(
    ("speedup", "net", "make_optimizer", "reason"),
    [
        ("fused_optimizer", nn.Conv2d(3, 8, 3), RMSprop, "RMSprop has no fused step"),
        ("fused_optimizer", nn.Conv2d(3, 8, 3), partial(SGD, fused=True), "given"),
        ("channels_last", nn.Linear(4, 4), SGD, "no convolution"),
    ],
)
def test_what_does_not_apply(speedup, net, make_optimizer, reason):
    assert reason in reason_against(speedup, net, make_optimizer(net.parameters()))
