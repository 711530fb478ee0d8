"""Whether what was found on some classes helps with others: its weights against fresh ones.

    python -m benchmarks.transfer --root cifar10

On CIFAR-10 as a folder of images, over 10 clients, for each seed: one network of all sizes (BigNAS over the
ResNet space) trains on classes 0 to 4; the best part within a budget of multiply-adds is sought;
it goes to classes 5 to 9 with a new classifier, and beside it the same network from fresh weights, for equal
rounds. All by the commands of docs/architecture_search.md. Images are halved to 16 pixels, so that a seed takes
minutes on two cores. Options after these are options of all three fits.
Source: Yosinski et al. 2014, section 4, on two halves of the classes of one data set.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import yaml

_CONFIGS = Path(__file__).parents[1] / "configs" / "nas"
_SUPERNET = [_CONFIGS / "space" / "resnet.yaml", _CONFIGS / "bignas.yaml"]
_TRANSFER = _CONFIGS / "transfer.yaml"
_SOURCE = "--data.init_args.source.init_args."
_OLD, _NEW = f"{_SOURCE}classes=[0, 1, 2, 3, 4]", f"{_SOURCE}classes=[5, 6, 7, 8, 9]"
_SMALL = [
    *("--num_threads=1", "--report=false", "--trainer.enable_progress_bar=false"),
    *("--federation.local_epochs=null", "--federation.local_steps=4"),
    *(f"{_SOURCE}image_size=16", f"{_SOURCE}batch_size=32", "--model.init_args.image_size=16"),
]


class Result(NamedTuple):
    """Of one seed; accuracies are fractions of the test images of the new classes.

    Attributes:
        architecture: that was found on the old classes.
        kept: its accuracy with the weights that it had and a new classifier, after each number of rounds.
        fresh: the same from fresh weights.
    """

    architecture: str
    kept: list[float]
    fresh: list[float]


def typed(folder: Path, *words: str) -> str:
    """Run a command of `fl-lightning` in a folder; return what it prints."""
    command = [sys.executable, "-m", "fl_lightning", *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"fl-lightning {' '.join(words)}\n{done.stderr[-3000:]}")
    return done.stdout


def fitted(folder: Path, name: str, rounds: int, *words: str) -> float:
    """Fit under a name; return the test accuracy that the run ends with."""
    said = typed(
        folder,
        *("fit", *words, f"--trainer.max_epochs={rounds}"),
        *(f"--trainer.check_val_every_n_epoch={rounds}", f"--trainer.logger.init_args.name={name}"),
    )
    [accuracy] = [
        line.split()[1] for line in said.splitlines() if line.startswith("test/accuracy ")
    ]
    return float(accuracy)


def layers(*paths: Path) -> list[str]:
    """Return the words that name configurations."""
    return [word for path in paths for word in ("--config", str(path))]


def results(
    seeds: list[int],
    folder: Path,
    *,
    rounds: int,
    after: list[int],
    constraint: str,
    options: list[str],
) -> Iterator[Result]:
    """Yield what each seed gives; runs are left in the folder.

    Args:
        seeds: of whole stories.
        folder: to run in, absolute.
        rounds: of the network of all sizes.
        after: numbers of rounds on the new classes, each a fit of its own.
        constraint: on the part that is sought.
        options: of all three fits.
    """
    for seed in seeds:
        here = folder / f"seed_{seed}"
        here.mkdir()
        own = [*options, f"--seed_everything={seed}"]
        fitted(here, "supernet", rounds, *layers(*_SUPERNET), *_SMALL, *own, _OLD)
        checkpoint = "runs/supernet/version_0/checkpoints/last.ckpt"
        wanted = ["--constraint", constraint, "--budget", "30", "--export", "best.yaml"]
        typed(here, "search", "--ckpt_path", checkpoint, *wanted)
        best = yaml.safe_load((here / "best.yaml").read_text())
        network = best["model"]["init_args"]["network"]["init_args"]
        del network["weights"]
        (here / "fresh.yaml").write_text(yaml.safe_dump(best))
        kept, fresh = (
            [*layers(Path("best.yaml"), _TRANSFER), *own],
            ["--config=fresh.yaml", *own, _NEW],
        )
        accuracies = [
            [fitted(here, f"{name}_{number}", number, *words) for number in after]
            for name, words in (("kept", kept), ("fresh", fresh))
        ]
        yield Result(network["architecture"], *accuracies)


def main() -> None:
    """Print a row a seed, and the means."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", required=True, help="folder of images, <root>/{train,test}")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rounds", type=int, default=60, help="on the old classes, 4 steps each")
    parser.add_argument("--after", type=int, nargs="+", default=[5, 20], help="rounds on the new")
    parser.add_argument("--constraint", default="flops<=4e6", help="on the part that is sought")
    args, options = parser.parse_known_args()
    options.append(f"{_SOURCE}root={Path(args.root).resolve()}")
    print("seed" + "".join(f" {f'kept/{n}':>8} {f'fresh/{n}':>8}" for n in args.after))
    rows: list[list[float]] = []
    with tempfile.TemporaryDirectory() as folder:
        settings = {"rounds": args.rounds, "after": args.after, "constraint": args.constraint}
        for result in results(args.seeds, Path(folder), **settings, options=options):
            row = [value for pair in zip(result.kept, result.fresh, strict=True) for value in pair]
            print(f"{args.seeds[len(rows)]:>4}" + shown(row), result.architecture, flush=True)
            rows.append(row)
    print("mean" + shown([sum(column) / len(rows) for column in zip(*rows, strict=True)]))


def shown(row: list[float]) -> str:
    """Return a row of accuracies as text."""
    return "".join(f" {value:>8.1%}" for value in row)


if __name__ == "__main__":
    main()
