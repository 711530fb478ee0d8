"""What all tests share."""

import os

# Lightning calls jsonargparse by names that it has renamed: not ours to mend
os.environ["JSONARGPARSE_DEPRECATION_WARNINGS"] = "off"
os.environ.setdefault("MPLBACKEND", "agg")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # small tensors gain nothing from more, see below

import torch

# On a busy machine two threads wait for each other: some tests took twenty times as long.
torch.set_num_threads(1)
