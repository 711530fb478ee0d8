"""What this package and a GPU do together: ``python -m benchmarks.gpu all --limit 300``.

Every part runs in a process of its own, at most as long as is left of the limit, and prints lines as it
goes; they are also written to ``gpu.jsonl`` in the folder that the variable OUT names (here if there is
none). What fails is printed as a line that begins with FAILED, and the rest goes on. Seconds are those
of the clock, with the device waited for: medians over rounds after the first one. Without a GPU
everything runs at a tiny scale, which tries the code and measures nothing.

* ``peaks``: rates of the device itself, to compare with.
* ``small``: rounds of small models in slots, against one client after the other and against bare loops.
  The honest one of those replays a CUDA graph of its step (``graphed``).
* ``vit``: a ViT-S/16 at 224 pixels in bfloat16: share of the rate of matrix products.
* ``memory``: slots that do not fit: what is said, and whether their memory is free again.
* ``streams``: two clients in two streams, against one after the other.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import logging
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import timm
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everyone writes it
from torch.utils.data import TensorDataset

from benchmarks.bare import PLAIN, VARIANTS, BareLoop, Data, own_plan, wait_for
from benchmarks.networks import tiny_vit
from benchmarks.ours import Classifier, InMemory, Shards
from benchmarks.workloads import SEED, WORKLOADS, Workload
from fl_lightning import FederatedDataModule, Federation, UniformCohort

IS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if IS_GPU else "cpu"
ROUNDS = 5
# Rounds of a run that repays a compiler, and of one that is too short for it.
LONG_RUN, SHORT_RUN = 100_000, 6
SMALL = ("W3", "U-lenet5", "W2", "U-mlp")
# A forward pass of ViT-S/16 on an image of 224 pixels; the backward pass takes twice as many.
MULTIPLY_ADDS_OF_VIT_S = 4.6e9


def note(what: str, **values: Any) -> None:
    """Print a line and keep it."""
    words = [f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in values.items()]
    print(f"  {what:42} {'  '.join(words)}", flush=True)
    folder = Path(os.environ.get("OUT", "."))
    with (folder / "gpu.jsonl").open("a") as lines:
        lines.write(json.dumps({"what": what, **values}) + "\n")


@contextlib.contextmanager
def failures_of(what: str) -> Iterator[None]:
    """Print what fails inside, and go on."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - whatever it is, it is told
        text = " ".join(str(error).split())
        note(f"FAILED {what}", error=f"{type(error).__name__}: {text}"[:300])
    if IS_GPU:
        torch.cuda.empty_cache()


def seconds_of(function: Callable[[], object], times: int = 5, warm: int = 2) -> float:
    """Median seconds of a call, the device waited for."""
    taken = []
    for number in range(warm + times):
        wait_for(DEVICE)
        began = time.perf_counter()
        function()
        wait_for(DEVICE)
        if number >= warm:
            taken.append(time.perf_counter() - began)
    return median(taken)


def matmul_rate() -> float:
    """Floating-point operations a second of bfloat16 matrix products."""
    size = 8192 if IS_GPU else 256
    a, b = (torch.randn(size, size, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 * 5 / seconds_of(lambda: [a @ b for _ in range(5)])


def _copy_rate(x: Tensor) -> float:
    """Terabytes a second that are read and written by a copy on or to the device."""
    y = torch.empty_like(x, device=DEVICE)
    moved = x.nbytes * (2 if x.device == y.device else 1)
    return moved / seconds_of(lambda: y.copy_(x, non_blocking=True)) / 1e12


def peaks() -> None:
    """Measure the device."""
    note("matmul bf16", TFLOPs=matmul_rate() / 1e12)
    note(
        "copy on the device", TBs=_copy_rate(torch.randn(2**30 if IS_GPU else 2**16, device=DEVICE))
    )
    pageable = torch.randn(20_000_000 if IS_GPU else 2000)
    rates = {"pageable_TBs": _copy_rate(pageable)}
    if IS_GPU:
        rates["pinned_TBs"] = _copy_rate(pageable.pin_memory())
    note("80 MB to the device", **rates)
    one = torch.ones(8, device=DEVICE)
    launch = seconds_of(lambda: [one.add_(1) for _ in range(1000)]) / 1000
    note("launch of an empty kernel", us=1e6 * launch)
    size = 22_000_000 if IS_GPU else 2000
    deltas = torch.randn(100, size, device=DEVICE)
    chunks = deltas.split(2_000_000, 1)
    note(
        "100 updates of ViT-S on the device",
        mean_s=seconds_of(lambda: deltas.mean(0)),
        median_s=seconds_of(lambda: [c.median(0).values for c in chunks], 3, 1),
        gram_s=seconds_of(lambda: deltas @ deltas.T, 3, 1),
    )


class Rounds(Callback):
    """Notes the seconds of each round and ends the run after some."""

    def __init__(self, num_rounds: int) -> None:
        self._num_rounds = num_rounds
        self.seconds: list[float] = []
        self._began = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock."""
        self._began = time.perf_counter()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note a round."""
        wait_for(DEVICE)
        self.seconds.append(time.perf_counter() - self._began)
        trainer.should_stop = len(self.seconds) == self._num_rounds
        self._began = time.perf_counter()


class EngineLines(logging.Handler):
    """Keeps what a run says about its engine."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a line."""
        if "engine:" in record.getMessage():
            self.lines.append(record.getMessage().removeprefix("engine: "))


@dataclass(frozen=True)
class Fitted:
    """Result of a run.

    Attributes:
        seconds: of a round, the median without the first.
        first: seconds of the first round, with the choice of an engine and compiling.
        peak_mb: of the device's memory, beyond what was taken before.
        said: the last line about the engine.
    """

    seconds: float
    first: float
    peak_mb: float
    said: str


def fit(
    work: Workload,
    data: Data,
    *,
    on_device: bool = True,
    precision: str = "32-true",
    max_epochs: int = LONG_RUN,
    **options: Any,
) -> Fitted:
    """Train some rounds of a federation.

    Args:
        work: what to train.
        data: its examples.
        on_device: whether they are on the device from the start.
        precision: the Trainer's.
        max_epochs: the Trainer's; a long run compiles.
        **options: of the federation.
    """
    rounds, lines = Rounds(1 + ROUNDS), EngineLines()
    logger = logging.getLogger("lightning.pytorch")
    logger.addHandler(lines)
    clients = FederatedDataModule(
        InMemory(TensorDataset(*(data if not on_device else to_device(data))), work.batch_size),
        num_clients=work.num_clients,
        partition=Shards(work),
        seed=SEED,
    )
    federation = Federation(
        cohort=UniformCohort(size=work.cohort),
        local_steps=work.local_steps,
        seed=SEED,
        pad_batches=True,
        **options,
    )
    before = torch.cuda.memory_allocated() if IS_GPU else 0
    if IS_GPU:
        torch.cuda.reset_peak_memory_stats()
    trainer = Trainer(
        max_epochs=max_epochs,
        accelerator="gpu" if IS_GPU else "cpu",
        devices=1,
        precision=precision,  # type: ignore[arg-type]
        callbacks=[federation, rounds],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    try:
        trainer.fit(Classifier(work.initial_network(), work), datamodule=clients)
    finally:
        logger.removeHandler(lines)
    peak = torch.cuda.max_memory_allocated() - before if IS_GPU else 0
    said = lines.lines[-1] if lines.lines else ""
    return Fitted(median(rounds.seconds[1:]), rounds.seconds[0], peak / 2**20, said)


def to_device(data: Data) -> Data:
    """Return examples on the device."""
    x, y = (part.to(DEVICE) for part in data)
    return x, y


def bare_seconds(work: Workload, data: Data) -> dict[str, float]:
    """Seconds of a round of bare loops, after comparing the graphed one with the plain one."""
    seconds, ends = {}, []
    for name in ("sgd", "by hand", "graphed"):
        loop = BareLoop(work, data, VARIANTS[name], device=DEVICE)
        torch.manual_seed(SEED)  # of the orders
        loop.train_round(own_plan(work, 0))
        ends.append(torch.cat([p.flatten() for p in loop.start]))
        taken = [loop.train_round(own_plan(work, 1 + number)) for number in range(ROUNDS)]
        seconds[name] = median(taken)
    plain, graphed = ends[0], ends[-1]
    gap = float((plain - graphed).norm() / plain.norm())
    if not gap < 2e-3:  # convolutions in TF32 have 10 bits, and roundings part in further rounds
        note("FAILED the graphed loop differs", gap=gap)
    return seconds


def small(names: tuple[str, ...] = SMALL) -> None:
    """Measure rounds of small models."""
    for name in names:
        with failures_of(name):
            work = WORKLOADS[name].scaled(1 if IS_GPU else 0.02)
            data = work.data()
            bare = bare_seconds(work, data)
            note(f"{name} bare", **{k.replace(" ", "_"): v for k, v in bare.items()})
            ways: dict[str, dict[str, Any]] = {
                "sequential": {"engine": "sequential"},
                "slots, not compiled": {"engine": "slots", "max_epochs": SHORT_RUN},
                "auto": {},
            }
            if name == "W3":
                ways["auto, data on the CPU"] = {"on_device": False}
                ways["100 slots"] = {"engine": "slots", "slots": 100}
            for way, options in ways.items():
                with failures_of(f"{name} {way}"):
                    got = fit(work, data, **options)
                    note(
                        f"{name} {way}",
                        s=got.seconds,
                        of_graphed=got.seconds / bare["graphed"],
                        of_eager=got.seconds / min(bare["sgd"], bare["by hand"]),
                        first=got.first,
                        MB=got.peak_mb,
                        said=got.said[:150],
                    )


def vit_s() -> nn.Module:
    """Return ViT-S/16 for 224 pixels and 100 classes; a tiny one without a GPU."""
    if IS_GPU:
        network: nn.Module = timm.create_model("vit_small_patch16_224", num_classes=100)
        return network
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 100))


def vit() -> None:
    """Measure steps of a ViT-S/16 against the rate of matrix products."""
    batch_size, steps, pixels, cohort = (128, 10, 224, 2) if IS_GPU else (4, 2, 8, 2)
    work = replace(
        WORKLOADS["W4"],
        network=vit_s,
        shape=(3, pixels, pixels),
        num_clients=4,
        cohort=cohort,
        examples=(batch_size * steps // 2,) * 2,
        batch_size=batch_size,
        local_steps=steps,
    )
    data, peak, images = work.data(), matmul_rate(), batch_size * steps * cohort
    operations = 3 * 2 * MULTIPLY_ADDS_OF_VIT_S * images

    def tell(way: str, seconds: float, **more: Any) -> None:
        share = operations / seconds / peak
        note(f"ViT-S {way}", s=seconds, images_per_s=images / seconds, of_matmul=share, **more)

    with failures_of("ViT-S bare"):
        loop = BareLoop(work, data, PLAIN, "bf16-mixed", device=DEVICE)
        tell("bare", median([loop.train_round(own_plan(work, number)) for number in range(4)][1:]))
    compiled = {"engine": "sequential", "speedups": ["fused_optimizer", "compiled"]}
    for way, options in {
        "sequential": {"engine": "sequential"},
        "compiled": compiled,
        "compiled, data on the CPU": {**compiled, "on_device": False},
        "auto": {},
    }.items():
        with failures_of(f"ViT-S {way}"):
            got = fit(work, data, precision="bf16-mixed", **options)  # type: ignore[arg-type]
            tell(way, got.seconds, first=got.first, MB=got.peak_mb, said=got.said[:150])


def memory() -> None:
    """Give slots too little memory."""
    work = WORKLOADS["W2"].scaled(1 if IS_GPU else 0.02)
    data = to_device(work.data())
    with failures_of("memory"):
        one = fit(work, data, engine="sequential")
        before = after = 0
        gc.collect()  # of the run before, whose parts hold each other
        if IS_GPU:  # hardly more than one client after the other needs
            before, taken = torch.cuda.memory_allocated(), torch.cuda.max_memory_reserved()
            torch.cuda.empty_cache()
            total = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(1.05 * taken / total)
        got = fit(work, data, max_epochs=20)  # too short to compile
        gc.collect()
        if IS_GPU:
            after = torch.cuda.memory_allocated()
        left = (after - before) / 2**20
        said = got.said[:200]
        note("W2 in little memory", s=got.seconds, sequential=one.seconds, left_MB=left, said=said)


def streams() -> None:
    """Train two clients in two streams, with and without graphs, against one after the other."""
    cases: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
        "LeNet-5, batches of 10": (WORKLOADS["U-lenet5"].network, (10, 1, 32, 32)),
        "CNN of McMahan et al., batches of 10": (WORKLOADS["W2"].network, (10, 1, 28, 28)),
    }
    if IS_GPU:
        cases["ViT of 32 pixels, batches of 32"] = partial(tiny_vit, depth=6), (32, 3, 32, 32)
    for name, (make, shape) in cases.items():
        with failures_of(name):
            two = [_Repeated(make().to(DEVICE), shape) for _ in range(2)]
            note(f"two streams, {name}", **_in_two_streams(two))


class _Repeated:
    """Steps of one network on one batch."""

    def __init__(self, network: nn.Module, shape: tuple[int, ...]) -> None:
        self._network = network
        self._leaves = list(network.parameters())
        self._x = torch.randn(shape, device=DEVICE)
        self._y = torch.randint(10, shape[:1], device=DEVICE)

    def step(self) -> None:
        """Take a step of SGD."""
        loss = F.cross_entropy(self._network(self._x), self._y)
        gradients = torch.autograd.grad(loss, self._leaves)
        params: list[Tensor] = [p.detach() for p in self._leaves]
        torch._foreach_add_(params, gradients, alpha=-1e-3)


def _in_two_streams(two: list[_Repeated], times: int = 50) -> dict[str, float]:
    """Seconds of a pair of steps, and how many times faster other ways are."""
    steps: list[Callable[[], object]] = [each.step for each in two]
    one = seconds_of(lambda: [step() for _ in range(times) for step in steps], 3, 1)
    found = {"ms_of_a_pair": 1e3 * one / times}
    if not IS_GPU:
        return found
    side = [torch.cuda.Stream() for _ in two]
    graphs = []
    for each, stream in zip(two, side, strict=True):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                each.step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            each.step()
        graphs.append(graph)

    def in_both(runs: list[Callable[[], object]]) -> None:
        for _ in range(times):
            for run, stream in zip(runs, side, strict=True):
                with torch.cuda.stream(stream):
                    run()

    replays: list[Callable[[], object]] = [graph.replay for graph in graphs]
    found["two_streams"] = one / seconds_of(partial(in_both, steps), 3, 1)
    found["graphs"] = one / seconds_of(lambda: [r() for _ in range(times) for r in replays], 3, 1)
    found["graphs_in_two_streams"] = one / seconds_of(partial(in_both, replays), 3, 1)
    return found


PARTS: dict[str, Callable[[], None]] = {
    "peaks": peaks,
    "small": small,
    "vit": vit,
    "memory": memory,
    "streams": streams,
}
# Of what is left of the limit, the share that a part may take
_SHARES = {"peaks": 0.2, "streams": 0.2, "memory": 0.2, "vit": 0.45, "small": 1.0}


def run_all(limit: float) -> None:
    """Run every part in a process of its own."""
    ends = time.monotonic() + limit
    for part, share in _SHARES.items():
        seconds = share * (ends - time.monotonic())
        print(f"{part}: at most {seconds:.0f} s", flush=True)
        began = time.monotonic()
        try:
            command = [sys.executable, "-m", "benchmarks.gpu", part]
            code = subprocess.run(command, check=False, timeout=seconds).returncode
        except subprocess.TimeoutExpired:
            note(f"FAILED {part}", error=f"not done after {seconds:.0f} s")
        else:
            if code:
                note(f"FAILED {part}", error=f"exit status {code}")
        print(f"{part}: {time.monotonic() - began:.0f} s", flush=True)


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=[*PARTS, "all"])
    parser.add_argument("--limit", type=float, default=300.0, help="seconds, for all")
    arguments = parser.parse_args()
    if arguments.part == "all":
        run_all(arguments.limit)
        return
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch.utilities.rank_zero", "lightning.fabric"):
        logging.getLogger(name).propagate = True
    handlers = logging.getLogger("lightning.pytorch").handlers
    for handler in handlers:  # what a Trainer says about itself
        handler.setLevel(logging.ERROR)
    name = torch.cuda.get_device_name(0) if IS_GPU else "no GPU: a tiny scale"
    note(f"{arguments.part} begins", torch=torch.__version__, device=name)
    PARTS[arguments.part]()


if __name__ == "__main__":
    main()
