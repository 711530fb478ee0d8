"""What an eavesdropper makes of one client's message: ``python -m benchmarks.eavesdropper``.

Twenty clients take one local step on digits, with a small perceptron as the server has just made
it. Whoever reads a client's message tries to get the images back:

- one example each, by the first layer: weight by bias ("divided", with the peak signal-to-noise
  ratio in dB), or the weight's first singular vector ("direction"), and the label by the last layer;
- four examples each: by a search for images with such a gradient, their labels known.

Numbers are correlations of pixels with the true image, means over clients. Digits look alike, so
that a guess from the label alone has a correlation of 0.8: what the label's mean digit explains, and
grey as a whole, is taken off both images before (partial correlation). 1 is the image itself, and 0
is nothing of what tells it from others of its label.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import mean

import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.audits.inversion import (
    GradientSearch,
    first_layer_direction,
    first_layer_input,
    label_of,
)
from benchmarks.likeness import Attacked
from benchmarks.wiretap import Compressed, Encrypted, Masked, Noisy, Summed, Tap
from fl_lightning.core.seeds import preserve_global_generators
from fl_lightning.core.space import Space
from fl_lightning.updates import QSGD, PowerSGD, Sign, TopK

CLIENTS = 20
BATCH = 4
SHOWN = 6  # clients with one example, in the picture
RATE = 0.1
IMAGE = (1, 8, 8)
HEADER = f"{'':26}{'divided':>9}{'dB':>7}{'direction':>11}{'labels':>8}{'four':>7}"


@dataclass(frozen=True)
class Read:
    """What came out for all clients.

    Attributes:
        divided: images of single examples, weight by bias.
        direction: the same by the weight alone.
        labels: share of right ones.
        several: images of several examples at once.
    """

    divided: list[Attacked]
    direction: list[Attacked]
    labels: float
    several: list[Attacked]


class Victims:
    """The clients and their model.

    Args:
        num_clients: of them, with ``batch`` examples each.
        batch: examples of a client's one step; of different labels if it is more than one.
    """

    def __init__(self, num_clients: int, batch: int) -> None:
        digits = load_digits()
        self.pixels = torch.from_numpy(digits.images).float()[:, None] / 16
        self.labels = torch.from_numpy(digits.target)
        by_label = [self.pixels[self.labels == label] for label in range(10)]
        self.typical = torch.stack([images.mean(0) for images in by_label])
        with preserve_global_generators():
            torch.manual_seed(0)
            self.network = nn.Sequential(
                nn.Flatten(), nn.Linear(64, 64), nn.Sigmoid(), nn.Linear(64, 10)
            )
        self.space = Space.of_parameters(self.network)
        # scikit-learn's digits come in turns of 0 to 9
        self.examples = [
            torch.arange(batch) + 10 * client + client % 7 for client in range(num_clients)
        ]
        self.deltas = [self._delta(rows) for rows in self.examples]

    def _delta(self, rows: Tensor) -> Tensor:
        loss = functional.cross_entropy(self.network(self.pixels[rows]), self.labels[rows])
        gradients = torch.autograd.grad(loss, list(self.network.parameters()))
        return RATE * torch.cat([gradient.flatten() for gradient in gradients])

    def read_one(self, seen: Tensor, client: int) -> tuple[Attacked, Attacked, bool]:
        """Return the image that an update of one example gives away, twice, and its label."""
        parts, rows = self.space.named_views(seen), self.examples[client]
        weight, bias = parts["1.weight"], parts["1.bias"]
        direction = first_layer_direction(weight)
        found = first_layer_input(weight, bias), direction / direction.max()
        one, other = (self._attacked(image.view(1, *IMAGE), client) for image in found)
        return one, other, label_of(parts["3.bias"]) == int(self.labels[rows])

    def search(self, seen: Tensor, client: int, steps: int) -> Attacked:
        """Return the images that a search finds for an update of several examples."""
        labels = self.labels[self.examples[client]]
        attack = GradientSearch(steps=steps)
        found = attack(self.network, self.space.views(seen), labels, IMAGE, seed=client)
        return self._attacked(found, client)

    def _attacked(self, found: Tensor, client: int) -> Attacked:
        rows = self.examples[client]
        return Attacked(self.pixels[rows], found, self.typical[self.labels[rows]])


def taps(space: Space) -> dict[str, Tap]:
    """Return what is measured, by name."""
    shapes = space.shapes
    noisy = (Noisy(noise_multiplier=0.01), Noisy(noise_multiplier=1.0))
    known: dict[str, Tap] = {
        "unprotected": Compressed((), shapes),
        "CentralDP": Compressed((), shapes),  # the noise comes later, on the server
        "top 10 % in 8 bits": Compressed((TopK(0.1), QSGD(8)), shapes),
        "rank 2 in 8 bits": Compressed((PowerSGD(2), QSGD(8, block=256)), shapes),
        "signs": Compressed((Sign(),), shapes),
        **{f"LocalDP, ε = {each.epsilon:.3g}": each for each in noisy},
        f"sum of {CLIENTS} clients": Summed(),
        "secure sum, a message": Masked(),
    }
    if find_spec("tenseal") is not None:
        known["CKKS, a message"] = Encrypted()
    return known


def read(alone: Victims, together: Victims, tap: Tap, num_searches: int, steps: int) -> Read:
    """Return what comes of every client with one example, and of some with four."""
    divided, direction, labels = zip(
        *(alone.read_one(tap(alone.deltas, c), c) for c in range(CLIENTS)), strict=True
    )
    several = [together.search(tap(together.deltas, c), c, steps) for c in range(num_searches)]
    return Read(list(divided), list(direction), sum(labels) / CLIENTS, several)


def row(name: str, found: Read) -> str:
    """Return a line of the table."""
    divided, direction, four = (
        mean(each.correlation for each in attacked) if attacked else math.nan
        for attacked in (found.divided, found.direction, found.several)
    )
    decibels = mean(each.decibels for each in found.divided)
    return (
        f"  {name:24}{divided:9.3f}{decibels:7.1f}{direction:11.3f}{found.labels:8.0%}{four:7.3f}"
    )


def draw(found: Mapping[str, Read], out: Path) -> None:
    """Write a picture: a row for each protection, single images and then four together."""
    first = next(iter(found.values()))
    true = (
        [Attacked(e.true, e.true, e.typical) for e in part]
        for part in (first.divided, first.several)
    )
    singles, several = true
    rows = {"the truth": Read(singles, singles, 1.0, several), **found}
    figure = Figure(figsize=(8.5, 0.62 * len(rows)), layout="constrained")
    panels = figure.subplots(len(rows), SHOWN + BATCH, squeeze=False)
    for line, (name, each) in zip(panels, rows.items(), strict=True):
        images = [*(single.found[0] for single in each.direction[:SHOWN]), *each.several[0].found]
        for panel, image in zip(line, images, strict=True):
            panel.imshow(image[0].numpy(), cmap="gray_r")
            panel.set(xticks=[], yticks=[])
        line[0].set_ylabel(name, rotation=0, ha="right", va="center", fontsize=8)
    panels[0][0].set_title("one example", fontsize=8, loc="left")
    panels[0][SHOWN].set_title("four together", fontsize=8, loc="left")
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=110)


def main() -> None:
    """Print the table and write the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--searches", type=int, default=4, help="clients with four examples")
    parser.add_argument("--steps", type=int, default=400, help="of a search")
    parser.add_argument("--out", type=Path, help="a PNG to write")
    options = parser.parse_args()
    torch.set_num_threads(1)
    alone, together = Victims(CLIENTS, 1), Victims(CLIENTS, BATCH)
    found = {}
    print(HEADER)
    for name, tap in taps(alone.space).items():
        found[name] = read(alone, together, tap, options.searches, options.steps)
        print(row(name, found[name]), flush=True)
    if options.out is not None:
        draw(found, options.out)


if __name__ == "__main__":
    main()
