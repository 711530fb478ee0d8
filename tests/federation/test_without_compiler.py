"""Slots on a system without a C compiler: the same numbers, by PyTorch's own layers."""

import sys

import pytest
import torch
import typed

SCRIPT = """
import sys
import torch
from torch import nn
from lightning.pytorch import seed_everything
from toys import ToyModule, toy_data, toy_trainer, weights
from fl_lightning import Federation
from fl_lightning.kernels.c_library import c_libraries
from fl_lightning.kernels.layers import reason_against_direct_layers

torch.set_num_threads(1)
seed_everything(0, verbose=False)
module = ToyModule()
module.net = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 3))
toy_trainer(Federation(engine="slots", local_epochs=2, seed=0)).fit(module, datamodule=toy_data())
print("layers:", reason_against_direct_layers(module))
torch.save(weights(module), sys.argv[1])
"""


def trained(folder, name, **environment):
    path = folder / f"{name}.pt"
    out, err = typed.said_by(SCRIPT, str(path), folder=folder, **environment)
    assert "engine: " in err
    assert " slots, as asked for" in err
    return torch.load(path), out


@pytest.mark.skipif(sys.platform == "win32", reason="paths of programs")
def test_the_numbers_are_the_same_without_a_compiler(tmp_path):
    empty, cache = tmp_path / "empty", tmp_path / "cache"
    empty.mkdir()
    found, said = trained(
        tmp_path, "without", PATH=str(empty), CC=str(empty / "cc"), XDG_CACHE_HOME=str(cache)
    )
    assert "no C compiler" in said
    expected, said = trained(tmp_path, "with")
    assert "no C compiler" not in said
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
