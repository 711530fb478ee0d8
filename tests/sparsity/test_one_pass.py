"""The kernel in C against `torch.optim.SGD` on the active entries alone."""

import shutil

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fl_lightning.kernels.masked_sgd_step import sgd_in_one_pass
from fl_lightning.sparsity.optimizers.sparse_optimizers import SparseSGDM
from tests.sparsity.test_masked_optimizers import random, sgd_options

REGISTERS = 256  # a multiple of all entries that torch works on at once

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
PLAIN = {
    "lr": 0.5,
    "momentum": 0.0,
    "dampening": 0.0,
    "weight_decay": 0.0,
    "nesterov": False,
    "maximize": False,
}


@needs_compiler
@given(
    sgd_options,
    st.sampled_from([torch.float32, torch.float64]),
    st.floats(1e-6, 10),
    st.integers(0, 10_000),
)
def test_bits_of_torch(options, dtype, lr, seed):
    value, *grads = random([(4, REGISTERS)] * 5, seed, dtype)
    mask = torch.zeros(4 * REGISTERS, dtype=torch.bool)
    generator = torch.Generator().manual_seed(seed)
    mask[torch.randperm(len(mask), generator=generator)[:REGISTERS]] = True
    mask = mask.view(4, REGISTERS)
    ours, alone = nn.Parameter(value.clone()), nn.Parameter(value[mask])
    optimizer = SparseSGDM([ours], lr=lr, masks=[mask], **options)
    other = torch.optim.SGD([alone], lr=lr, **options)
    for grad in grads:
        ours.grad, alone.grad = grad, grad[mask]
        optimizer.step()
        other.step()
    assert torch.equal(ours[mask], alone)
    assert torch.equal(ours[~mask], value[~mask])


@needs_compiler
def test_autograd_notices_the_change():
    param = nn.Parameter(torch.ones(3))
    param.grad = torch.ones(3)
    loss = (param**2).sum()
    assert sgd_in_one_pass(param, torch.tensor([1]), None, PLAIN)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize(
    ("param", "grad", "options"),
    [
        (torch.ones(2, 3).t(), torch.ones(3, 2), {}),
        (torch.ones(3, 2), torch.ones(2, 3).t(), {}),
        (torch.ones(3, dtype=torch.bfloat16), torch.ones(3, dtype=torch.bfloat16), {}),
        (torch.ones(3), torch.ones(3), {"lr": torch.tensor(0.1)}),
        (torch.ones(1), torch.ones(1), {}),  # smaller than the mask was made for
    ],
)
def test_what_is_left_to_torch(param, grad, options):
    param = nn.Parameter(param)
    param.grad = grad
    assert not sgd_in_one_pass(param, torch.tensor([1]), None, PLAIN | options)
    assert (param == 1).all()
