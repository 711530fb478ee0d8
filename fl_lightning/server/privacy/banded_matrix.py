"""Correlated noise for running sums: the matrix mechanism with a banded, column-normalised matrix.

    A = lower triangle of ones,  A G = (A C⁻¹) C G,  released: A C⁻¹ (C G + Z) = A (G + C⁻¹ Z)
    minimise  ‖A C⁻¹‖²_F / n   over lower-triangular C with b bands and ‖C e_j‖₂ = 1

G has a row of clients' sums per round. A client that takes part at most P times, at least b rounds
apart, moves C G by at most S √P: the columns of C at its rounds share no row, and each has norm 1.
Source: Choquette-Choo et al. 2023 (2306.08153), Theorem 2 and Section 4. Differs: columns are scaled
to norm 1 while C is optimised, and checked afterwards, so that the sensitivity is what is claimed.
For more than 512 rounds C is the banded square root of A (Kalinin and Lampert 2024, 2405.13763) with
its columns scaled to norm 1, which is close to the best one.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from scipy.optimize import minimize
from torch import Tensor

from fl_lightning.core.errors import ConfigurationError

Matrix = npt.NDArray[np.float64]
MOST_OPTIMISED = 512


def banded_factor(num_rounds: int, bands: int) -> Matrix:
    """Return C by its columns: entry (j, i) is C[j + i, j], shape (num_rounds, bands).

    Args:
        num_rounds: n ≥ 1.
        bands: b in [1, n]; with 1 noise is independent.

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
    check_column_norms(columns)
    return columns


def check_column_norms(columns: Matrix) -> None:
    """Refuse a matrix whose sensitivity is not 1.

    Raises:
        ValueError: if a column's norm is off by more than rounding.
    """
    norms = np.linalg.norm(columns, axis=1)
    if not np.allclose(norms, 1, rtol=0, atol=1e-12):
        raise ValueError(f"columns must have norm 1, they have {norms.min()} to {norms.max()}")


def dense(columns: Matrix) -> Matrix:
    """Return the matrix C itself, shape (n, n)."""
    matrix = np.zeros((len(columns), len(columns)))
    for band in range(columns.shape[1]):
        rows = np.arange(band, len(columns))
        matrix[rows, rows - band] = columns[: len(columns) - band, band]
    return matrix


def mean_squared_error(columns: Matrix) -> float:
    """Return the mean variance of the noise in running sums, ‖A C⁻¹‖²_F / n, at z = 1.

    Example:
        >>> round(mean_squared_error(np.ones((4, 1))), 6)  # independent noise: (1 + 2 + 3 + 4) / 4
        2.5
        >>> round(mean_squared_error(banded_factor(4, bands=4)), 4)
        1.7185
    """
    matrix = dense(columns)
    noise = np.linalg.solve(matrix.T, np.tril(np.ones_like(matrix)).T)
    return float((noise**2).sum() / len(matrix))


def noise_of_rounds(columns: Matrix) -> float:
    """Return the standard deviation of a round's own noise, over rounds, at z = 1."""
    return float(np.sqrt((np.linalg.inv(dense(columns)) ** 2).sum() / len(columns)))


def _square_root(num_rounds: int, bands: int) -> Matrix:
    """Return the first bands of √A, which has (1 - x)^(-½)'s coefficients, with unit columns."""
    steps = np.arange(1, bands)
    coefficients = np.concatenate([[1.0], np.cumprod(1 - 0.5 / steps)])
    inside = np.arange(num_rounds)[:, None] + np.arange(bands) < num_rounds
    columns: Matrix = coefficients * inside
    columns /= np.linalg.norm(columns, axis=1, keepdims=True)
    return columns


def _optimised(start: Matrix) -> Matrix:
    """Descend the error from there by L-BFGS; entries below the matrix remain 0."""
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


class CorrelatedNoise:
    """Rows of C⁻¹ Z, one after the other, from the last b - 1 of them.

    Args:
        columns: of C, shape (n, b).

    Example:
        >>> noise = CorrelatedNoise(banded_factor(3, bands=2))
        >>> rows = torch.stack([noise.next(row) for row in torch.eye(3, dtype=torch.float64)])
        >>> bool(np.allclose(dense(banded_factor(3, bands=2)) @ rows.numpy(), np.eye(3)))
        True
    """

    def __init__(self, columns: Matrix) -> None:
        self._columns = columns
        self._index = 0
        self._past: list[Tensor] = []  # the newest first

    def next(self, normals: Tensor) -> Tensor:
        """Return the next round's noise, shape (k,), given independent normal numbers.

        Raises:
            ConfigurationError: if earlier rounds had another number of coordinates.
        """
        if self._past and self._past[0].shape != normals.shape:
            raise ConfigurationError(
                "federation.privacy: BandedMatrixDP takes back noise of earlier rounds, and the "
                "mask has changed since: set every_n_rounds of MaskCalibration to null"
            )
        noise = normals.clone()
        for back, earlier in enumerate(self._past, start=1):
            noise -= earlier * float(self._columns[self._index - back, back])
        noise /= float(self._columns[self._index, 0])
        self._index += 1
        self._past = [noise, *self._past][: self._columns.shape[1] - 1]
        return noise

    def state_dict(self) -> dict[str, object]:
        """Return the round and the last rows."""
        return {"index": self._index, "past": self._past}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Go on from there."""
        index, past = state["index"], state["past"]
        assert isinstance(index, int)
        assert isinstance(past, list)
        self._index, self._past = index, list(past)
