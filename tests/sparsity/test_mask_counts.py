"""Counts say of many masks what looking at them, and at every pair of them, says."""

from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fl_lightning.sparsity import Mask, intersection, jaccard_overlap, union
from fl_lightning.sparsity.masks.report import MaskCounts


def masks_of(bits):
    return [Mask({"a": torch.tensor(row[:2]), "b": torch.tensor(row[2:])}) for row in bits]


def counts_of(masks):
    counts = MaskCounts()
    for mask in masks:
        counts.add(mask)
    return counts


@given(st.lists(st.lists(st.booleans(), min_size=5, max_size=5), min_size=2, max_size=6))
def test_they_are_those_of_all_pairs(bits):
    masks = masks_of(bits)
    counts = counts_of(masks)
    pairs = list(combinations(masks, 2))
    shared = sum(intersection(pair).num_active for pair in pairs)
    either = sum(union(pair).num_active for pair in pairs)
    assert counts.density == pytest.approx(np.mean([mask.density for mask in masks]))
    assert counts.union_density == pytest.approx(union(masks).density)
    assert counts.overlap == pytest.approx(shared / either if either else 1.0)
    assert counts_of(masks[:2]).overlap == pytest.approx(jaccard_overlap(*masks[:2]))


def test_one_mask_is_its_own_union():
    (mask,) = masks_of([[True, False, False, True, True]])
    counts = counts_of([mask])
    assert (counts.density, counts.union_density, counts.overlap) == (0.6, 0.6, 1.0)
