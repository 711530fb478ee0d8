"""How much privacy is lost at least, seen from outside: a canary, and two kinds of worlds.

    ε ≥ log((TPR - δ) / FPR)  and  ε ≥ log((TNR - δ) / FNR)

In half of the worlds a client, the canary, exists; whoever sees what is released scores each world
and guesses by a threshold. Rates are bounded by Clopper and Pearson's intervals, so that the bound
holds with the stated confidence: an accounted ε below it is wrong, and one above it proves nothing.
Source: Jagielski, Ullman and Oprea 2020 (2006.07709), Section 4; canaries of clip norm in a random
direction are those of Andrew et al. 2023 (2302.03098), Section 3.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from scipy.stats import beta

from fl_lightning.core.seeds import derive_seed, torch_generator
from fl_lightning.core.update import ClientUpdate
from fl_lightning.data.cohorts.population import Population
from fl_lightning.privacy.mechanism import AccountedRun, Privacy
from fl_lightning.privacy.noise.noise_source import NoiseSource, coins
from fl_lightning.privacy.private_mean import PrivateMean


def epsilon_lower_bound(
    with_it: Sequence[float], without: Sequence[float], delta: float, confidence: float = 0.95
) -> float:
    """Return an ε that the truth is not below, with so much confidence.

    The threshold is chosen on the first half of the scores, and judged on the second.

    Args:
        with_it: scores of worlds with the canary, expected to be higher.
        without: scores of worlds without it, as many.
        delta: in [0, 1).
        confidence: in (0, 1).

    Example:
        >>> apart = epsilon_lower_bound([5.0] * 400, [0.0] * 400, delta=0.0)
        >>> alike = epsilon_lower_bound([0.0] * 400, [0.0] * 400, delta=0.0)
        >>> round(apart, 2), alike
        (3.81, 0.0)
    """
    present, absent = np.asarray(with_it, float), np.asarray(without, float)
    half = len(present) // 2
    chosen = max(
        np.quantile(np.concatenate([present[:half], absent[:half]]), np.linspace(0, 1, 41)),
        key=lambda at: _bound(present[:half], absent[:half], at, delta, confidence),
    )
    return max(0.0, _bound(present[half:], absent[half:], chosen, delta, confidence))


def _bound(
    present: np.ndarray[tuple[int], np.dtype[np.float64]],
    absent: np.ndarray[tuple[int], np.dtype[np.float64]],
    threshold: float,
    delta: float,
    confidence: float,
) -> float:
    found, false = int((present >= threshold).sum()), int((absent >= threshold).sum())
    trials = len(present)
    risk = (1 - confidence) / 4  # four intervals
    return max(
        _log_ratio(_low(found, trials, risk) - delta, _high(false, trials, risk)),
        _log_ratio(_low(trials - false, trials, risk) - delta, _high(trials - found, trials, risk)),
    )


def _low(successes: int, trials: int, risk: float) -> float:
    return float(beta.ppf(risk, successes, trials - successes + 1)) if successes else 0.0


def _high(successes: int, trials: int, risk: float) -> float:
    if successes == trials:
        return 1.0
    return float(beta.ppf(1 - risk, successes + 1, trials - successes))


def _log_ratio(chance: float, other: float) -> float:
    return math.log(chance / other) if chance > 0 else 0.0


def canary_scores(
    privacy: Privacy,
    run: AccountedRun,
    *,
    has_canary: bool,
    num_worlds: int,
    size: int = 32,
    seed: int = 0,
) -> list[float]:
    """Return how much of a canary is in what is released, one number for each world.

    The canary is the last client. Its update is a thousand clip norms long, in a direction that the
    observer knows; the other clients' are drawn at random. Everything goes through the aggregator
    and the noise that runs use.

    Args:
        privacy: with a known noise.
        run: who takes part when.
        has_canary: whether the last client sends anything.
        num_worlds: how often everything is drawn anew.
        size: numbers in an update.
        seed: of the worlds.
    """
    everybody = Population(np.ones(run.num_clients, np.int64))
    canary = torch.randn(size, generator=torch_generator(seed, "canary"))
    canary /= canary.norm()
    others = torch.randn(run.num_clients, size, generator=torch_generator(seed, "others"))
    long = 1000 * privacy.clip_norm
    scores = []
    for world in range(num_worlds):
        root = derive_seed(seed, "audit", world, int(has_canary))
        source, score = NoiseSource(root), 0.0
        mechanism = privacy.mechanism(run, source)
        mean = PrivateMean(mechanism.expected)
        mean.clip_norm = privacy.clip_norm
        for index in range(run.planned_rounds):
            mean.release = mechanism.client_release(index, privacy.clip_norm)
            if not privacy.clients_add_noise and mechanism.noise_multiplier:
                mean.coins = partial(coins(root).stream, index)
            mean.open(canary)
            for client in run.cohort.sample(index, everybody, root).tolist():
                is_canary = client == run.num_clients - 1
                delta = canary * long * has_canary if is_canary else others[client]
                mean.add(ClientUpdate(client, delta, canary[:0], 1, 1))
            released = mean.close()
            if mean.grid is not None:
                drawn = mechanism.server_noise(mean.grid, size, source.stream(index))
                steps = mechanism.released(mean.total, torch.from_numpy(drawn))
                mechanism.commit()
                released = (mean.grid.value(steps) / mechanism.expected).float()
            score += float(released @ canary)
        scores.append(score)
    return scores
