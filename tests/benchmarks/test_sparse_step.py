"""The benchmark of masked optimizers counts bytes and sets up masks as it says."""

import pytest
import torch
from torch import nn

from benchmarks.sparse_step import RUN, bytes_of_state, clustered_mask, compare
from fl_lightning.sparsity.optimizers.sparse_optimizers import SparseSGDM


def test_bytes_of_state():
    params = [nn.Parameter(torch.zeros(1000)), nn.Parameter(torch.zeros(10, 10))]
    for param in params:
        param.grad = torch.ones_like(param)
    dense = torch.optim.SGD(params, momentum=0.9)
    sparse = SparseSGDM(params, momentum=0.9, masks=[torch.arange(1000) < 50, None])
    ratio = compare(sparse.step, dense.step, turns=3)
    assert ratio.milliseconds > 0
    assert bytes_of_state(dense) == (4400, 4400)
    assert bytes_of_state(sparse) == (4 * 150, 4 * 150 + 8 * 50)


def test_clustered_masks_have_whole_runs():
    mask = clustered_mask(torch.zeros(300, 64), 0.1)
    runs = mask.view(-1, RUN)
    assert torch.equal(runs.any(1), runs.all(1))
    assert mask.float().mean() == pytest.approx(0.1, abs=0.06)
