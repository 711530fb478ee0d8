"""Iris: 150 flowers of three species, four lengths in centimetres. Comes with scikit-learn.

Source: Fisher 1936, *The use of multiple measurements in taxonomic problems*, Annals of Eugenics 7.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import final

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.seeds import derive_seed, run_seed, torch_generator
from fl_lightning.data.partitions.stratified_split import stratified_split


@final
class Iris(LightningDataModule):
    """The 150 flowers: four features in centimetres as they are, and the species, 0 to 2.

    Args:
        batch_size: flowers a batch; 150 is all at once.
        test_fraction: part held out for the test, in (0, 1), of every species alike.
        val_fraction: part of the rest held out for validation, in (0, 1), likewise.
        seed: of what is held out and of central training's order; the run's seed if None.

    Raises:
        ConfigurationError: for settings out of range.

    Example:
        >>> iris = Iris(seed=0)
        >>> iris.setup("fit")
        >>> features, species = next(iter(iris.val_dataloader()))
        >>> features.shape, species.bincount()
        (torch.Size([24, 4]), tensor([8, 8, 8]))
    """

    def __init__(
        self,
        *,
        batch_size: int = 150,
        test_fraction: float = 0.2,
        val_fraction: float = 0.2,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        if batch_size < 1:
            raise ConfigurationError(f"Iris: batch_size must be at least 1, got {batch_size}")
        for name, share in (("test_fraction", test_fraction), ("val_fraction", val_fraction)):
            if not 0 < share < 1:
                raise ConfigurationError(f"Iris: {name} must be in (0, 1), got {share}")
        self.batch_size = batch_size
        self._fractions = test_fraction, val_fraction
        self._seed = seed

    def setup(self, stage: str | None = None) -> None:
        """Read and split the flowers, the first time."""
        if hasattr(self, "train_set"):
            return
        features, species = _flowers()
        seed, parts = run_seed(self._seed), []
        for name, fraction in zip(("test split", "val split"), self._fractions, strict=True):
            kept, held = stratified_split(species, fraction, seed=derive_seed(seed, name))
            parts.append(TensorDataset(features[held], species[held]))
            features, species = features[kept], species[kept]
        self.train_set = TensorDataset(features, species)
        self.test_set, self.val_set = parts

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Return batches in a new order each pass."""
        generator = torch_generator(run_seed(self._seed), "centralized")
        return DataLoader(self.train_set, self.batch_size, shuffle=True, generator=generator)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Return batches of the validation flowers."""
        return DataLoader(self.val_set, self.batch_size)

    def test_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Return batches of the test flowers."""
        return DataLoader(self.test_set, self.batch_size)

    predict_dataloader = test_dataloader


def _flowers() -> tuple[Tensor, Tensor]:
    # its file, because importing scikit-learn takes a second: a row is four lengths and the species
    scikit_learn = find_spec("sklearn")
    assert scikit_learn is not None  # a dependency of this package
    assert scikit_learn.origin is not None
    path = Path(scikit_learn.origin).parent / "datasets" / "data" / "iris.csv"
    table = torch.from_numpy(np.loadtxt(path, delimiter=",", skiprows=1))
    return table[:, :4].float(), table[:, 4].long()
