"""Measured latencies: the sum over blocks, its calibration, and the file that names what it is of."""

import json

import pytest
import torch

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.seeds import torch_generator
from fl_lightning.nas import DARTS, BudgetTable, DeviceClasses, Supernet
from fl_lightning.nas.cost.blocks import blocks_of
from fl_lightning.nas.cost.latency import Accuracy, LatencyTable, Where
from fl_lightning.nas.cost.latency_measurement import TimingPlan, measure_latency
from fl_lightning.nas.spaces.mobilenet import small_mobilenet
from fl_lightning.nas.spaces.named import NAMES
from fl_lightning.nas.spaces.nas_bench_201 import NASBench201
from fl_lightning.nas.spaces.resnet import small_resnet
from fl_lightning.nas.spaces.space import Networks
from fl_lightning.nas.sub_networks.capability import limits

OPTIONS = {"in_channels": 3, "num_classes": 10}
SMALL = [name for name in NAMES if name not in ("resnet", "mobilenet", "vit")]
WHERE = Where("a laptop", "cpu", 2, "2.8", 1)


def table(space, options, **settings):
    networks = Networks(space, 32, options)
    kinds = blocks_of(networks).kinds()
    blocks = {kind: 0.25 * (1 + number) for number, kind in enumerate(kinds)}
    chosen = {"rest": 3.0, "scale": 2.0, "shift": 0.5, "accuracy": Accuracy(20, 0.061, 0.93)}
    return LatencyTable(networks, WHERE, blocks, **{**chosen, **settings})


@pytest.mark.parametrize("name", SMALL)
def test_few_networks_hold_all_kinds_of_blocks(name):
    space, generator = NAMES[name](), torch_generator(0, "test")
    blocks = blocks_of(Networks(space, 32, OPTIONS))
    kinds = blocks.kinds()
    assert len(set(kinds)) == len(kinds)
    for _ in range(20):
        assert set(blocks.of(space.sample(generator))) <= set(kinds)
    networks = list(blocks.networks())
    assert {kind for _, marked in networks for kind in marked.values()} == set(kinds)
    assert all(
        module in set(network.modules()) for network, marked in networks for module in marked
    )


def test_a_latency_is_the_calibrated_sum():
    space = NASBench201()
    made = table(space, {**OPTIONS, "cells": 2})
    nothing = space.architecture([0] * 6)
    assert made.milliseconds(nothing) == 2.0 * 3.0 + 0.5
    cell = space.architecture([3, 0, 0, 0, 0, 2])
    kinds = [f"cell nor_conv_{k}x{k} {c}→{c} stride 1" for k in (3, 1) for c in (16, 32, 64)]
    by_hand = 6.5 + 2.0 * 2 * sum(made.blocks[kind] for kind in kinds)
    assert made.milliseconds(cell) == pytest.approx(by_hand)
    with pytest.raises(ConfigurationError, match=r"of other settings \(mobilenet\)"):
        made.milliseconds(small_mobilenet().smallest)


@pytest.mark.parametrize("name", ["nas_bench_201", "mobilenet_layers", "darts"])
def test_the_expectation_of_one_network_is_its_latency(name):
    space = NAMES[name]()
    made, cell = table(space, OPTIONS), space.sample(torch_generator(1, "test"))
    chosen = torch.tensor(space.operations_of(cell))
    sure = torch.nn.functional.one_hot(chosen, len(space.operations)).double().requires_grad_()
    expected = made.rows.expected(sure)
    assert expected.item() == pytest.approx(made.milliseconds(cell))
    (gradient,) = torch.autograd.grad(expected, sure)
    assert torch.equal(gradient, made.rows.of_rows)


def test_a_file_reads_back(tmp_path):
    made = table(small_mobilenet(), OPTIONS)
    made.write(tmp_path / "laptop.json")
    read = LatencyTable.read(tmp_path / "laptop.json")
    one = made.networks.space.sample(torch_generator(0, "test"))
    assert read.milliseconds(one) == made.milliseconds(one)
    read.check(Networks(small_mobilenet(), 32, OPTIONS))
    assert "a laptop (cpu, 2 threads)" in str(read)
    assert "error 6.1%, rank correlation 0.93" in str(read)


@pytest.mark.parametrize(
    ("space", "side", "options", "says"),
    [
        (NASBench201(), 32, OPTIONS, r"MobileNet there, .*NASBench201 here"),
        (NAMES["mobilenet"](), 32, OPTIONS, "space.init_args"),
        (small_mobilenet(), 64, OPTIONS, r"networks.side \(32 there, 64 here"),
        (
            small_mobilenet(),
            32,
            {**OPTIONS, "num_classes": 100},
            r"networks.num_classes \(10 there, 100",
        ),
    ],
)
def test_a_table_of_other_networks_is_refused(space, side, options, says):
    with pytest.raises(ConfigurationError, match=says):
        table(small_mobilenet(), OPTIONS).check(Networks(space, side, options))


def test_a_damaged_file_is_refused(tmp_path):
    path = tmp_path / "laptop.json"
    table(NASBench201(), OPTIONS).write(path)
    whole = json.loads(path.read_text())
    del whole["milliseconds"]["blocks"]["cell nor_conv_3x3 16→16 stride 1"]
    contents = {"damaged": json.dumps(whole), "version 7": json.dumps({**whole, "version": 7})}
    contents |= {"no latency file": "{}", "not JSON": "no"}
    # a space of sizes was described otherwise: the file is old, not damaged
    before = {
        **whole,
        "version": 1,
        "space": {"class_path": "fl_lightning.nas.MobileNet", "init_args": {"w": 1}},
    }
    contents["has version 1, .* measure again with fl-lightning latency --out"] = json.dumps(before)
    for says, content in contents.items():
        path.write_text(content)
        with pytest.raises(ConfigurationError, match=says):
            LatencyTable.read(path)
    with pytest.raises(ConfigurationError, match="cannot be read"):
        LatencyTable.read(tmp_path / "nothing.json")


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -1.0])
@pytest.mark.parametrize("place", [("milliseconds", "blocks"), ("calibration",)], ids="/".join)
def test_a_number_that_is_no_time_is_refused(place, number, tmp_path):
    path = tmp_path / "laptop.json"
    table(NASBench201(), OPTIONS).write(path)
    whole = json.loads(path.read_text())
    numbers = whole[place[0]] if len(place) == 1 else whole[place[0]][place[1]]
    name = next(iter(numbers))
    numbers[name] = number
    path.write_text(json.dumps(whole))
    with pytest.raises(ConfigurationError, match=f"damaged: {name} is {number}. Numbers must be"):
        LatencyTable.read(path)


def test_measuring_times_every_block_and_larger_networks_longer():
    space = NASBench201()
    networks = Networks(space, 32, {**OPTIONS, "cells": 1})
    pace = TimingPlan(warmup=1, rounds=3, passes=2)
    made = measure_latency(networks, calibration=6, held_out=4, pace=pace)
    assert set(made.blocks) == set(blocks_of(networks).kinds())
    assert min(made.blocks.values()) > 0
    assert made.accuracy.networks == 4
    assert made.where.device
    assert made.milliseconds(space.architecture([3] * 6)) > made.milliseconds(
        space.architecture([1] * 6)
    )
    with pytest.raises(ConfigurationError, match="held_out must be at least 2"):
        measure_latency(networks, held_out=1)


SHAPE = {**OPTIONS, "channels": 4, "cells": 1}


def test_a_search_expects_the_latency_of_a_file(tmp_path):
    made = table(NASBench201(), SHAPE)
    made.write(tmp_path / "laptop.json")
    options = {"channels": 4, "cells": 1, "num_classes": 10, "seed": 0}
    net = Supernet(NASBench201(), measure=str(tmp_path / "laptop.json"), **options)
    cost = net.expected_cost(net.alphas)
    assert cost.item() == pytest.approx(made.rows.expected(net.alpha.softmax(1)).item())
    # time is what α is pulled away from: the step with the penalty prefers what takes less
    (pull,) = torch.autograd.grad(cost, net.alpha)
    rows = made.rows.of_rows
    centred = rows - rows.mean(1, keepdim=True)
    assert torch.allclose(pull.double(), 0.2 * centred, atol=1e-2)
    for space, shape, says in [
        (NASBench201(), {"channels": 8, "cells": 1}, r"networks.channels \(4 there, 8 here"),
        (DARTS(), {"channels": 4, "cells": 1}, r"NASBench201 there, .*DARTS here"),
    ]:
        with pytest.raises(ConfigurationError, match=says):
            Supernet(space, measure=str(tmp_path / "laptop.json"), num_classes=10, **shape)
    with pytest.raises(
        ConfigurationError, match="measure must be one of flops, params, activations, or"
    ):
        Supernet(NASBench201(), measure="flop", **options)


def test_the_budget_of_a_client_is_in_milliseconds_of_its_own_device(tmp_path):
    space = small_resnet()
    fast, slow = table(space, OPTIONS), table(space, OPTIONS, scale=8.0)
    fast.write(tmp_path / "fast.json")
    slow.write(tmp_path / "slow.json")
    most = (slow.milliseconds(space.smallest) + slow.milliseconds(space.largest)) / 2
    path = tmp_path / "budgets.csv"
    lines = [f"0,{most},{tmp_path}/fast.json", f"1,{most},{tmp_path}/slow.json", "2,1e7,"]
    path.write_text("\n".join(["client,budget,latency", *lines]))
    networks = Networks(space, 32, OPTIONS)
    strong, weak, counted = limits(BudgetTable(str(path)), networks, 3)
    assert strong == space.largest
    assert fast.milliseconds(strong) <= most
    assert weak != space.largest
    assert slow.milliseconds(weak) <= most
    assert networks.cost(counted).flops <= 1e7
    files = [str(tmp_path / "fast.json"), str(tmp_path / "slow.json")]
    classes = DeviceClasses([most, most], latency_files=files, seed=0)
    assert sorted(map(str, limits(classes, networks, 2))) == sorted(map(str, [strong, weak]))
    share = most / slow.milliseconds(space.largest)
    relative = DeviceClasses([share], relative=True, latency_files=files[1:])
    assert limits(relative, networks, 1) == [weak]
    with pytest.raises(ConfigurationError, match=r"side \(32 there, 8 here"):
        limits(classes, Networks(space, 8, OPTIONS), 2)
    with pytest.raises(ConfigurationError, match="latency_files must be 2 paths, one per class"):
        DeviceClasses([1.0, 2.0], latency_files=files[:1])


@pytest.mark.slow
def test_the_error_on_held_out_networks_is_small():
    accuracy = measure_latency(Networks(small_mobilenet(), 32, OPTIONS)).accuracy
    assert accuracy.mape <= 0.15
    assert accuracy.spearman >= 0.7  # 0.9 and more on a quiet device
