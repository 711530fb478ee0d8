"""Empirical lower bounds of ε by canaries, beside the accounted ones.

Usage: python -m benchmarks.audit [--worlds 4000] [--rounds 5]
"""

from __future__ import annotations

import argparse

from fl_lightning.data.cohort import AllClients, PoissonCohort
from fl_lightning.server.privacy.audit import canary_scores, epsilon_lower_bound
from fl_lightning.server.privacy.central import CentralDP
from fl_lightning.server.privacy.mechanism import Privacy
from fl_lightning.server.privacy.noise_source import SeededNoise
from fl_lightning.server.privacy.run import Run

CLIENTS = 4


def main() -> None:
    """Print a line for each mechanism."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worlds", type=int, default=4000, help="with a canary, and without")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    settings: dict[str, tuple[Privacy, AllClients | PoissonCohort]] = {
        "central, all": (CentralDP(clip_norm=0.5, noise_multiplier=2.0), AllClients()),
        "central, Poisson": (
            CentralDP(clip_norm=0.5, noise_multiplier=1.0),
            PoissonCohort(fraction=0.3),
        ),
    }
    print(f"{'':18}{'accounted ε':>12}{'at least':>10}   (δ = 1e-5, 95 % confidence)")
    for name, (privacy, cohort) in settings.items():
        run = Run(cohort, CLIENTS, options.rounds, seed=0)
        accounted = privacy.mechanism(run, SeededNoise(0)).epsilon(options.rounds)
        present, absent = (
            canary_scores(privacy, run, has_canary=has, num_worlds=options.worlds)
            for has in (True, False)
        )
        least = epsilon_lower_bound(present, absent, privacy.delta)
        print(f"{name:18}{accounted:>12.3f}{least:>10.3f}")


if __name__ == "__main__":
    main()
