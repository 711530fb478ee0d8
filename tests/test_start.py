"""What is imported when: the front door opens at once, and heavy libraries wait until needed."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_digits

import fl_lightning
from fl_lightning.data import Digits

HEAVY = (
    "lightning",
    "matplotlib",
    "scipy",
    "sklearn",
    "tensorboard",
    "timm",
    "torch",
    "torchvision",
)


def test_heavy_libraries_are_loaded_when_they_are_needed():
    """Torchmetrics, which Lightning imports, loads matplotlib, scipy and torchvision by itself."""
    show = f"import sys; print('loaded', *(name for name in {HEAVY} if name in sys.modules))"
    steps = (
        "import fl_lightning; dir(fl_lightning)",
        "fl_lightning.data.IID()",
        "import fl_lightning.cli.commands\nfl_lightning.data.Digits().setup()",
    )
    process = [sys.executable, "-c", "\n".join(f"{step}\n{show}" for step in steps)]
    output = subprocess.run(process, check=True, capture_output=True, text=True).stdout
    lines = [line.split() for line in output.splitlines()]
    door, room, all_else = (
        set(names) for first, *names in filter(None, lines) if first == "loaded"
    )
    assert not door
    assert "torch" in room
    assert not all_else & {"sklearn", "tensorboard", "timm"}


def test_every_public_name_is_there_and_no_other():
    for name in fl_lightning.__all__:
        assert getattr(fl_lightning, name).__name__ == name
    assert set(fl_lightning.__all__) <= set(dir(fl_lightning))
    assert set(fl_lightning._MODULES) == set(fl_lightning.__all__)
    rooms = {path.parent.name for path in Path(fl_lightning.__file__).parent.glob("*/__init__.py")}
    assert set(fl_lightning._ROOMS) == rooms
    with pytest.raises(AttributeError, match="'fl_lightning' has no attribute 'Fedaration'"):
        _ = fl_lightning.Fedaration


def test_the_digits_are_those_that_scikit_learn_loads():
    found, expected = Digits().load(), load_digits()
    pixels = np.round(expected.images * 255 / 16).astype(np.uint8)
    np.testing.assert_array_equal(found.train.images[:, 0], pixels)
    np.testing.assert_array_equal(found.train.targets, expected.target)
    assert found.class_names == tuple(str(name) for name in expected.target_names)
