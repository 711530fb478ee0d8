"""Empirical lower bounds of ε by canaries, beside the accounted ones.

Of mechanisms, by thousands of worlds with a canary and without; and of whole trainings on digits,
by one run with two thousand canaries, each in it by a coin. Without noise the bound must exceed
what the same run claims with it: an audit that finds nothing there is none.

Usage: python -m benchmarks.audit [mechanisms | trainings] [--worlds 4000] [--rounds 5]
"""

from __future__ import annotations

import argparse
import logging
import warnings

from benchmarks.audits.canaries import canary_scores, epsilon_lower_bound
from benchmarks.canaries import Audit
from fl_lightning.data.cohorts.cohort import AllClients, PoissonCohort
from fl_lightning.privacy.central import CentralDP
from fl_lightning.privacy.example import ExampleDP
from fl_lightning.privacy.mechanism import AccountedRun, Privacy

CLIENTS = 4
# what the audited trainings claim
CLAIM, DELTA = 4.0, 1e-5


def main() -> None:
    """Print a line for each mechanism, and for each training."""
    parser = argparse.ArgumentParser(description=__doc__)
    kinds = ("mechanisms", "trainings")
    parser.add_argument("kind", nargs="?", choices=kinds, help="both if left out")
    parser.add_argument("--worlds", type=int, default=4000, help="with a canary, and without")
    parser.add_argument("--rounds", type=int, default=5, help="of a mechanism")
    parser.add_argument("--canaries", type=int, default=2000, help="of a training")
    options = parser.parse_args()
    if options.kind != "trainings":
        audit_mechanisms(options.worlds, options.rounds)
    if options.kind != "mechanisms":
        audit_trainings(options.canaries)


def audit_mechanisms(worlds: int, rounds: int) -> None:
    """Print what is accounted of mechanisms, and what is seen of them."""
    settings: dict[str, tuple[Privacy, AllClients | PoissonCohort]] = {
        "central, all": (CentralDP(clip_norm=0.5, noise_multiplier=2.0), AllClients()),
        "central, Poisson": (
            CentralDP(clip_norm=0.5, noise_multiplier=1.0),
            PoissonCohort(fraction=0.3),
        ),
    }
    print(f"{'mechanism':26}{'accounted ε':>12}{'at least':>10}   (δ = 1e-5, 95 % confidence)")
    for name, (privacy, cohort) in settings.items():
        run = AccountedRun(cohort, CLIENTS, rounds, seed=0)
        accounted = privacy.mechanism(run).epsilon(rounds)
        present, absent = (
            canary_scores(privacy, run, has_canary=has, num_worlds=worlds) for has in (True, False)
        )
        least = epsilon_lower_bound(present, absent, privacy.delta)
        print(f"{name:26}{accounted:>12.3f}{least:>10.3f}")


def trainings(canaries: int) -> dict[str, Audit]:
    """Return the trainings that are audited, by name: with the noise of a claim, and without."""
    half = PoissonCohort(fraction=0.5)
    central = {"clip_norm": 1.0, "delta": DELTA, "secure_noise": False}
    noisy, bare = {"epsilon": CLAIM}, {"noise_multiplier": 0.0}
    audits: dict[str, Audit] = {}
    for word, noise in (("", noisy), (", no noise", bare)):
        of_clients = CentralDP(**central, **noise)  # type: ignore[arg-type]
        of_examples = ExampleDP(**central, **noise)  # type: ignore[arg-type]
        audits |= {
            f"CentralDP, all{word}": Audit(privacy=of_clients, num_canaries=canaries),
            f"CentralDP, Poisson{word}": Audit(
                privacy=of_clients, num_canaries=canaries, cohort=half
            ),
            f"ExampleDP{word}": Audit(
                privacy=of_examples, num_canaries=canaries, num_clients=10, batch_size=175
            ),
        }
    return audits


def audit_trainings(canaries: int) -> None:
    """Print what is accounted of trainings, and what is seen in their last models."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    print(
        f"{'training on digits':26}{'accounted ε':>12}{'at least':>10}{'right':>12}{'accuracy':>10}"
        f"   (δ = {DELTA:g}, 95 % confidence)"
    )
    for name, audit in trainings(canaries).items():
        guesses, accounted, accuracy = audit()
        said = "∞" if accounted is None else f"{accounted:.3f}"
        right = f"{guesses.right} of {guesses.guesses}"
        print(f"{name:26}{said:>12}{guesses.epsilon(DELTA):>10.3f}{right:>12}{accuracy:>10.3f}")


if __name__ == "__main__":
    main()
