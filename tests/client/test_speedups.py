"""Speedups change the order of sums and nothing else."""

import copy
from itertools import chain, combinations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, RMSprop
from torch.utils._python_dispatch import TorchDispatchMode

from fl_lightning.engines.compiler.compiled_gradients import CompiledGradients
from fl_lightning.engines.compiler.speedups import SPEEDUPS, FasterStep, reason_against
from fl_lightning.engines.compiler.thin_gradients import ThinGradients
from fl_lightning.engines.functional.other_forwards import other_forwards
from fl_lightning.kernels.layers import reason_against_direct_layers
from fl_lightning.kernels.linear import FEW

ALL = ("channels_last", "thin_gradients", "fused_optimizer")
SUBSETS = list(chain.from_iterable(combinations(ALL, n) for n in range(4)))
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
    "make_optimizer",
    [sgd(), sgd(weight_decay=0.1), sgd(momentum=0.9, weight_decay=0.1), two_groups],
)
def test_the_same_training(speedups, make_optimizer):
    assert_same(trained(speedups, make_optimizer), trained((), make_optimizer), 1e-13)


@pytest.mark.parametrize(
    "options", [{}, {"momentum": 0.9, "weight_decay": 0.1}], ids=["plain", "all"]
)
@pytest.mark.parametrize("speedups", SUBSETS + WITH_DIRECT, ids="+".join)
def test_the_same_training_in_single_precision(speedups, options):
    one, other = (trained(s, sgd(**options), torch.float32) for s in (speedups, ()))
    assert_same(one, other, 2e-6)


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
    for speedups in (("direct_layers", "thin_gradients"), ()):
        own = copy.deepcopy(net)
        optimizer = SGD(own.parameters(), lr=0.01, momentum=momentum, weight_decay=0.1)
        faster = FasterStep(own, optimizer, speedups)
        for _ in range(3):
            optimizer.zero_grad()
            with faster.forwards():
                loss = own(x).square().mean()
            loss.backward()
            assert not speedups or own[1].weight.grad is None
            faster.step()
        ends.append(own)
    for p, q in zip(*(end.parameters() for end in ends), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-5)


def test_adam_can_be_fused():
    speedups = ("channels_last", "fused_optimizer")
    one, other = (trained(s, lambda net: Adam(net.parameters())) for s in (speedups, ()))
    # batch norm leaves the bias before it a gradient of rounding alone, which Adam enlarges
    assert_same(one, other, 1e-9)


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


@pytest.mark.parametrize("compiled", [False, True])
def test_thin_gradients_under_autocast(compiled):
    """The factors are rounded, their product is not; the layer before gets what it gets otherwise."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(700, 600), nn.Tanh(), nn.Linear(600, 200))
    batch = torch.randn(8, 700)

    def run(batch, index):
        with torch.autocast("cpu", torch.bfloat16):
            return net(batch).square().sum()

    run(batch, 0).backward()
    plain = [p.grad for p in net.parameters()]
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        value = net[1](net[0](batch))
        error = 2 * net[2](value)
    assert value.dtype == error.dtype == torch.bfloat16
    net.zero_grad()
    weight = net[2].weight
    thin = ThinGradients(net, SGD([weight], lr=1.0))
    before = weight.detach().clone()
    if compiled:
        with torch.compiler.set_stance("force_eager"):
            assert CompiledGradients(net, run)(batch, 0, thin) is not None
    else:
        with other_forwards(thin.forwards):
            run(batch, 0).backward()
    assert weight.grad is None
    for param, gradient in zip(net.parameters(), plain, strict=True):
        assert param is weight or apart(param.grad, gradient) < 5e-3
    thin.step()
    moved = before - weight.detach()
    assert apart(moved, error.double().T @ value.double()) < 1e-6
    assert 1e-4 < apart(moved, plain[2]) < 1e-2  # whose product is rounded


@pytest.mark.skipif(
    reason_against_direct_layers(nn.Linear(16, 1)) is not None, reason="no compiler"
)
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("num_rows", [8, FEW + 1])
def test_direct_thin_gradients_under_autocast_are_those_without(compiled, num_rows):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(700, 600), nn.Tanh(), nn.Linear(600, 300))
    batch, ends = torch.randn(num_rows, 700), []
    for is_half in (False, True):

        def run(batch, index, is_half=is_half):
            with torch.autocast("cpu", torch.bfloat16, enabled=is_half):
                return net(batch).square().sum()

        own = copy.deepcopy(net.state_dict())
        optimizer = SGD(net.parameters(), lr=0.001)
        graph = CompiledGradients(net, run) if compiled else None
        faster = FasterStep(net, optimizer, ("direct_layers", "thin_gradients"), graph)
        with torch.compiler.set_stance("force_eager"):
            if not compiled or faster.gradients(batch, 0) is None:
                with faster.forwards():
                    run(batch, 0).backward()
        assert not any(layer.weight.grad is not None for layer in (net[0], net[2]))
        faster.step()
        ends.append([p.detach() - own[name] for name, p in net.named_parameters()])
        net.load_state_dict(own)
        net.zero_grad()
    for one, other in zip(*ends, strict=True):
        if num_rows <= FEW:
            assert torch.equal(one, other)
        else:  # more rows are for PyTorch's layers
            assert 1e-4 < apart(one, other) < 2e-2


def apart(one, other):
    return float((one - other).detach().norm() / other.norm())


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("use", ["twice", "penalty", "not always", "in another place", "frozen"])
def test_thin_gradients_of_weights_used_in_other_ways(use, momentum):
    """The loss reads a weight by another layer, by itself, or not in every step."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(768, 200), nn.Linear(200, 5))
    steps = []

    def loss_of(net, x, y):
        hidden, steps_before = net[1](net[0](x)), len(steps)
        steps.append(1)
        if use == "twice":
            hidden = hidden + net[1](net[0](x).square())
        loss = F.cross_entropy(net[2](hidden), y)
        if use == "penalty":
            return loss + net[1].weight.square().sum()
        if use == "not always" and steps_before % 2:
            return net[2].weight.square().sum()
        if use == "in another place":
            doubled = {"weight": 2 * net[1].weight, "bias": net[1].bias}
            return loss + torch.func.functional_call(net[1], doubled, (net[0](x),)).mean()
        return loss

    net[1].weight.requires_grad_(use != "frozen")
    make = sgd(momentum=momentum, weight_decay=0.01)
    one = trained(("thin_gradients",), make, net=copy.deepcopy(net), loss_of=loss_of)
    steps.clear()
    assert_same(one, trained((), make, net=net, loss_of=loss_of), 1e-12)


def test_a_gradient_that_stays_thin_is_never_written():
    net = nn.Linear(1000, 100)
    thin = ThinGradients(net, SGD(net.parameters(), lr=0.1))
    few, many = torch.randn(2, 1000), torch.randn(90, 1000)
    thin.forwards[net](few).sum().backward()
    assert net.weight.grad is None
    thin.forget()
    thin.forwards[net](many).sum().backward()
    assert net.weight.grad is not None


def test_a_step_that_failed_leaves_nothing_behind():
    net = nn.Linear(1000, 100, bias=False)
    faster = FasterStep(net, SGD(net.parameters(), lr=0.1), ("thin_gradients",))
    with faster.forwards():
        net(torch.randn(2, 1000)).sum().backward()  # and no step
    before = net.weight.detach().clone()
    with faster.forwards():
        net(torch.zeros(2, 1000)).sum().backward()
    faster.step()
    assert torch.equal(net.weight, before)


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


def test_images_change_their_layout_and_nothing_else():
    net = conv_net()
    faster = FasterStep(net, SGD(net.parameters()), ("channels_last",))
    image, label = torch.randn(2, 3, 4, 4), torch.tensor([0, 1])
    first, rest = faster.batch([image, {"label": label, "name": "x"}])
    assert torch.equal(first, image)
    assert first.is_contiguous(memory_format=torch.channels_last)
    assert rest["label"] is label


@pytest.mark.parametrize(
    ("speedup", "make_optimizer", "reason"),
    [
        ("thin_gradients", lambda net: Adam(net.parameters()), "it is for SGD"),
        ("thin_gradients", sgd(momentum=0.9, nesterov=True), "nesterov"),
        ("thin_gradients", sgd(lr=torch.tensor(0.1)), "a tensor"),
        ("fused_optimizer", lambda net: RMSprop(net.parameters()), "RMSprop has no fused step"),
        ("fused_optimizer", sgd(fused=True), "given"),
    ],
)
def test_what_does_not_apply(speedup, make_optimizer, reason):
    net = conv_net()
    assert reason in reason_against(speedup, net, make_optimizer(net))


def test_models_that_gain_nothing():
    net = nn.Linear(4, 4)
    optimizer = SGD(net.parameters(), lr=0.1)
    assert "no convolution" in reason_against("channels_last", net, optimizer)
    assert "no dense layer" in reason_against("thin_gradients", net, optimizer)
    net = nn.Linear(1000, 1000)
    net.weight.register_hook(lambda gradient: 2 * gradient)
    assert "no dense layer" in reason_against("thin_gradients", net, SGD(net.parameters(), lr=0.1))
