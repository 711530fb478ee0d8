"""DP-FTRL: noise that is correlated over rounds, for cohorts without random sampling.

    aggregate_t = (Σ_k clip_S(Δ_k) + z S (C⁻¹ Z)_t) / m

The next rounds subtract much of a round's noise, so that the model, which is a sum over rounds, has
less of it. There is no random sampling; a client must only wait at least as many rounds between two of
its rounds as C has bands, as with `RoundRobinCohort`. The whole run is one release of a Gaussian
mechanism of sensitivity S √P for clients that are in P rounds.
Source: Choquette-Choo et al. 2023 (2306.08153); Kairouz et al. 2021 (2103.00039) for DP-FTRL.

Correlated noise for running sums is the matrix mechanism with a banded, column-normalised matrix:

    A = lower triangle of ones,  A G = (A C⁻¹) C G,  released: A C⁻¹ (C G + Z) = A (G + C⁻¹ Z)
    minimise  ‖A C⁻¹‖²_F / n   over lower-triangular C with b bands and ‖C e_j‖₂ = 1

G has one row of sums per round. A client that is in at most P rounds, at least b rounds apart, changes
C G by at most S √P: the columns of C at its rounds have no common row, and each has norm 1.
Source: Choquette-Choo et al. 2023 (2306.08153), Theorem 2 and Section 4. Differs: columns are scaled
to norm 1 while C is optimised, and checked afterwards, so that the sensitivity is exact.
For more than 512 rounds C is the banded square root of A (Kalinin and Lampert 2024, 2405.13763) with
its columns scaled to norm 1, which is close to the optimum.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, final

import numpy as np
import numpy.typing as npt
import torch
from scipy.optimize import minimize
from torch import Tensor
from typing_extensions import override

from fl_lightning.core.errors import ConfigurationError, check_range
from fl_lightning.core.seeds import Draw, Integers
from fl_lightning.privacy.accounting.gaussian import ReleaseCost
from fl_lightning.privacy.mechanism import Mechanism, Privacy
from fl_lightning.privacy.noise.grid import GRID_COST, Grid, noise_of, wide

# Each band costs a vector of the model's size.
_MOST_BANDS = 32


class BandedGaussian(Mechanism["BandedMatrixDP"]):
    """DP-FTRL mechanism: Gaussian noise on every round's sum, correlated over rounds by a banded matrix."""

    @override
    def check(self) -> None:
        separation = self.run.separation
        if self.bands > separation:
            raise ConfigurationError(
                f"federation.privacy: {self.bands} bands need {self.bands} rounds from one turn of a client "
                f"to its next, and here some wait only {separation}: lower bands, or set "
                "federation.cohort to RoundRobinCohort with a smaller size"
            )
        _ = self._sums  # too much noise is refused

    @property
    def bands(self) -> int:
        """Number of bands of the matrix C that correlates the noise over rounds."""
        return self.privacy.bands or min(self.run.separation, _MOST_BANDS)

    @cached_property
    def columns(self) -> Matrix:
        """Columns of the matrix C that correlates the noise over rounds, see `banded_factor`."""
        return banded_factor(self.run.planned_rounds, self.bands)

    @cached_property
    def _sums(self) -> CorrelatedSums:
        radius = 1.0
        if self.noise_multiplier:
            # for updates without a mask: a mask makes them shorter, and the radius no larger
            radius = Grid.of(self.privacy.clip_norm, self.run.num_coordinates).radius
        return CorrelatedSums(self.columns, self.noise_multiplier * radius, self.expected * radius)

    @cached_property
    @override
    def noise_per_round(self) -> float:
        return self.noise_multiplier * noise_of_rounds(self.columns)

    def __str__(self) -> str:
        rounds = self.run.planned_rounds
        return (
            f"unit: client, one client added or removed; turns of {self.run.most_turns(rounds)} in {rounds} "
            f"rounds at least {self.run.separation} apart, {self.bands} bands"
        )

    @property
    @override
    def release_cost(self) -> ReleaseCost:
        return ReleaseCost(GRID_COST, self.noise_multiplier**2)

    def server_noise(self, grid: Grid, size: int, draw: Draw) -> Integers:
        """Draw one round's noise before it is correlated over rounds, as integers, ``scale`` per grid step."""
        return noise_of(self.noise_multiplier * grid.radius * self._sums.scale, size, draw)

    def released(self, total: Tensor, noise: Tensor) -> Tensor:
        """Return a round's sum of updates plus the noise of this round, correlated with earlier rounds' noise."""
        return self._sums.next(total, noise)

    @override
    def commit(self) -> None:
        self._sums.advance()

    def state_dict(self) -> dict[str, Any]:
        """Return for a checkpoint the last rounds' sums, with and without noise, which later noise depends on."""
        return self._sums.state_dict()

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._sums.load_state_dict(state)


@final
@dataclass(frozen=True, kw_only=True)
class BandedMatrixDP(Privacy):
    """DP-FTRL: client-level privacy by noise correlated over rounds, which needs no random sampling.

    Neighbours are data sets with and without one client, whose rounds are public. The number of rounds
    must be known, ``trainer.max_epochs``. Checkpoints contain the sums of the last rounds without
    noise, because later rounds use them: keep checkpoints as secret as updates.

    Args:
        clip_norm: see `CentralDP`.
        noise_multiplier: z, see `CentralDP`.
        epsilon: see `CentralDP`.
        delta: see `CentralDP`.
        bands: number of bands of the matrix, and of rounds that a client must wait. If None, as many
            as the cohorts allow, at most 32.
        secure_noise: see `CentralDP`.
        log_unprotected: see `CentralDP`.

    Raises:
        ConfigurationError: for values out of range.

    Example:
        >>> from fl_lightning.data.cohorts.weighted_cohorts import RoundRobinCohort
        >>> from fl_lightning.privacy.mechanism import AccountedRun
        >>> privacy = BandedMatrixDP(clip_norm=1.0, noise_multiplier=4.0)
        >>> run = AccountedRun(RoundRobinCohort(size=10), num_clients=100, num_rounds=20, seed=0)
        >>> print(privacy.mechanism(run))
        unit: client, one client added or removed; turns of 2 in 20 rounds at least 10 apart, 10 bands
    """

    kind = BandedGaussian

    bands: int | None = None
    log_unprotected: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("federation.privacy: bands", self.bands, "at least 1")


Matrix = npt.NDArray[np.float64]
MOST_OPTIMISED = 512
# Fractional bits of C's entries, as many as 64-bit integers allow.
_FINEST_BITS, _COARSEST_BITS = 20, 8
# Bits of the noise's standard deviation, see `rounded_gaussian`.
_MOST_BITS = 51


def banded_factor(num_rounds: int, bands: int) -> Matrix:
    """Return the banded matrix C of DP-FTRL by columns, shape (num_rounds, bands): C[j + i, j] at (j, i).

    Args:
        num_rounds: n ≥ 1.
        bands: b in [1, n]; with 1 the noise is independent.

    Example:
        >>> banded_factor(4, bands=4).round(4).tolist()[0]
        [0.8247, 0.4495, 0.3011, 0.1647]
    """
    if not 1 <= bands <= num_rounds:
        raise ConfigurationError(
            f"federation.privacy: bands must be in [1, {num_rounds}], the number of rounds, got "
            f"{bands}"
        )
    start = _square_root(num_rounds, bands)
    columns = start if num_rounds > MOST_OPTIMISED or bands == 1 else _optimised(start)
    # the sensitivity counts on it
    assert np.allclose(np.linalg.norm(columns, axis=1), 1, rtol=0, atol=1e-12)
    return columns


def dense(columns: Matrix) -> Matrix:
    """Convert the columns from `banded_factor` into the whole matrix C, shape (n, n)."""
    matrix = np.zeros((len(columns), len(columns)))
    for band in range(columns.shape[1]):
        rows = np.arange(band, len(columns))
        matrix[rows, rows - band] = columns[: len(columns) - band, band]
    return matrix


def noise_of_rounds(columns: Matrix) -> float:
    """Return the noise's standard deviation on a round's sum (root mean square) at noise multiplier 1."""
    return float(np.sqrt((np.linalg.inv(dense(columns)) ** 2).sum() / len(columns)))


def _square_root(num_rounds: int, bands: int) -> Matrix:
    """Return the bands of √A, columns scaled to norm 1, where A is the lower triangle of ones."""
    steps = np.arange(1, bands)
    coefficients = np.concatenate([[1.0], np.cumprod(1 - 0.5 / steps)])
    inside = np.arange(num_rounds)[:, None] + np.arange(bands) < num_rounds
    columns: Matrix = coefficients * inside
    columns /= np.linalg.norm(columns, axis=1, keepdims=True)
    return columns


def _optimised(start: Matrix) -> Matrix:
    """Return the columns of C, of norm 1, with the least noise in running sums (L-BFGS from ``start``)."""
    num_rounds, bands = start.shape
    inside = torch.from_numpy(start != 0)
    rows = torch.arange(num_rounds)[:, None] + torch.arange(bands)
    places = (rows * num_rounds + torch.arange(num_rounds)[:, None])[inside]
    sums = torch.ones(num_rounds, num_rounds, dtype=torch.float64).tril()

    def unit(values: Tensor) -> Tensor:
        columns = torch.zeros(num_rounds, bands, dtype=torch.float64)
        columns[inside] = values
        return torch.nn.functional.normalize(columns, dim=1)

    def error(values: Matrix) -> tuple[float, Matrix]:
        wanted = torch.from_numpy(values).requires_grad_()
        matrix = torch.zeros(num_rounds * num_rounds, dtype=torch.float64)
        matrix = matrix.index_put((places,), unit(wanted)[inside]).view(num_rounds, num_rounds)
        noise = torch.linalg.solve_triangular(matrix, sums, upper=False, left=False)
        loss = noise.square().sum() / num_rounds
        loss.backward()
        assert wanted.grad is not None
        return float(loss.detach()), wanted.grad.numpy()

    options = {"maxiter": 500, "ftol": 1e-16, "gtol": 1e-9}
    found = minimize(error, start[inside.numpy()], jac=True, method="L-BFGS-B", options=options)
    return unit(torch.from_numpy(found.x)).numpy()


class CorrelatedSums:
    """Adds noise that is correlated over rounds to each round's sum: computes G + C⁻¹ Z row by row.

    It keeps the last b - 1 rows of sums and of results. C G + Z is computed exactly, in integers: the entries of C are multiples of 1 / `scale`, rounded
    towards 0, so that no column is longer than 1. The product with C⁻¹ depends on these integers alone,
    in any precision.

    Args:
        columns: columns of C, shape (n, b).
        stddev: standard deviation of an entry of Z, in steps of G.
        largest: largest possible entry of G, in steps.

    Raises:
        ConfigurationError: if 64-bit integers are too small.

    Attributes:
        scale: a power of two.

    Example:
        >>> sums = CorrelatedSums(banded_factor(3, bands=2), stddev=1e6, largest=1e3)
        >>> rows = torch.tensor([[5], [7], [-2]])
        >>> nothing = torch.zeros(1, dtype=torch.int64)
        >>> for row in rows:
        ...     print(sums.next(row, nothing).round().tolist())
        ...     sums.advance()
        [5.0]
        [7.0]
        [-2.0]
    """

    def __init__(self, columns: Matrix, stddev: float, largest: float) -> None:
        bands = columns.shape[1]
        room = min(_MOST_BITS - math.log2(max(1.0, stddev)), 60 - math.log2(bands * largest + 1))
        bits = min(_FINEST_BITS, math.floor(room))
        if bits < _COARSEST_BITS:
            raise ConfigurationError(
                "federation.privacy: BandedMatrixDP adds up integers of 64 bits, and the noise "
                "or the cohort is too large for them: lower noise_multiplier, or the cohort's size"
            )
        self.scale = 2**bits
        self._whole = np.trunc(columns * self.scale).astype(np.int64)
        self._whole[(self._whole**2).sum(1) > self.scale**2, 0] -= 1
        self._index = 0
        self._sums: list[Tensor] = []  # rows of G, the newest first
        self._released: list[Tensor] = []
        self._pending: tuple[Tensor, Tensor] | None = None

    def next(self, total: Tensor, noise: Tensor) -> Tensor:
        """Return the current round's sum with noise, in grid steps, float64 of shape (k,).

        Args:
            total: row of G, int64, shape (k,).
            noise: row of Z in units of 1 / `scale`, int64, shape (k,).

        Raises:
            ConfigurationError: if earlier rounds had another number of coordinates.
        """
        if self._sums and self._sums[0].shape != total.shape:
            raise ConfigurationError(
                "federation.privacy: BandedMatrixDP subtracts noise of earlier rounds, and the "
                "mask has changed since: set every_n_rounds of MaskCalibration to null"
            )
        sums = [total, *self._sums]
        whole = noise.clone()
        for back, earlier in enumerate(sums):
            whole += earlier * int(self._whole[self._index - back, back])
        row: Tensor = wide(whole) / self.scale
        for back, before in enumerate(self._released, start=1):
            row -= before * self._entry(back)
        row /= self._entry(0)
        self._pending = total, row
        return row

    def advance(self) -> None:
        """Move on to the next round, once the released sum of this round is final."""
        if self._pending is None:
            return
        (total, row), kept = self._pending, self._whole.shape[1] - 1
        self._sums, self._released = [total, *self._sums][:kept], [row, *self._released][:kept]
        self._index, self._pending = self._index + 1, None

    def _entry(self, back: int) -> float:
        return float(self._whole[self._index - back, back] / self.scale)

    def state_dict(self) -> dict[str, object]:
        """Return for a checkpoint: the round's number, and the latest rounds' sums without and with noise."""
        return {"index": self._index, "sums": self._sums, "released": self._released}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Restore the state from `state_dict`."""
        index, sums, released = state["index"], state["sums"], state["released"]
        assert isinstance(index, int)
        assert isinstance(sums, list)
        assert isinstance(released, list)
        self._index, self._sums, self._released = index, list(sums), list(released)
        self._pending = None
