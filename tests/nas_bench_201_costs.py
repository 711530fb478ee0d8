"""What a cell of NAS-Bench-201 costs by closed forms, in the benchmark's counting and in NASLib's: an oracle.

With n₁, n₃, n_p the numbers of 1×1, 3×3 and pool edges of the cell, stages of channels C = 16, 32, 64
and side S, S₀ the image's side, S₂ the last stage's, k classes, c the channels before a reduction:

    params = 464 + Σ_stages 5(n₁(C² + 2C) + n₃(9C² + 2C))
             + Σ_reductions (9cC + 9C² + cC + 4C) + 128 + 65k
    flops  = 432 S₀² + Σ_stages 5(n₁C² + 9n₃C²)S² + Σ_reductions (9cC + 9C² + cC)S² + 65k
    NASLib = flops - k + 2 · outputs of batch norms + outputs of ReLUs
             + 9 · outputs of pools (4 in reductions) + 64(S₂ + 1)²

Source: Dong & Yang 2020, section 2.2, and its published figures; NASLib's table of 725 cells. They are
for networks of the benchmark's own size; `cost_table` counts any.
"""

_CELLS = 5


_CHANNELS = (16, 32, 64)


def benchmark_flops(architecture, *, side=32, num_classes=10):
    """Return multiply-adds as the benchmark counts them.

    Args:
        architecture: a cell.
        side: of the images, a multiple of 4: 32 for CIFAR, 16 for ImageNet-16-120.
        num_classes: 10, 100, 120.
    """
    ones, threes, _ = _edges(architecture)
    flops = 27 * 16 * side**2 + 65 * num_classes
    for stage, width in enumerate(_CHANNELS):
        area = (side >> stage) ** 2
        flops += _CELLS * (ones + 9 * threes) * width**2 * area
        if stage:
            flops += (10 * (width // 2) * width + 9 * width**2) * area
    return flops


def benchmark_params(architecture, *, num_classes=10):
    """Return how many numbers the network has to learn."""
    ones, threes, _ = _edges(architecture)
    params = 464 + 128 + 65 * num_classes
    for stage, width in enumerate(_CHANNELS):
        params += _CELLS * ((ones + 9 * threes) * width**2 + (ones + threes) * 2 * width)
        if stage:
            params += 10 * (width // 2) * width + 9 * width**2 + 4 * width
    return params


def naslib_flops(architecture, *, side=32, num_classes=10):
    """Return what NASLib's tables call flops: norms, ReLUs and pools too, no biases."""
    ones, threes, pools = _edges(architecture)
    more = 2 * 16 * side**2
    for stage, width in enumerate(_CHANNELS):
        area = (side >> stage) ** 2
        more += _CELLS * (3 * (ones + threes) + 9 * pools) * width * area
        if stage:  # two norms, two ReLUs of which one is before the side is halved, a pool
            before = width // 2
            more += 4 * width * area + before * 4 * area + width * area + 4 * before * area
    last = side >> 2
    more += 3 * 64 * last**2 + 64 * (last + 1) ** 2 - num_classes
    return benchmark_flops(architecture, side=side, num_classes=num_classes) + more


def _edges(architecture):
    names = ("nor_conv_1x1", "nor_conv_3x3", "avg_pool_3x3")
    ones, threes, pools = (architecture.options.count(name) for name in names)
    return ones, threes, pools
