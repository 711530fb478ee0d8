"""Results of runs stay what they were: to the bit where they were recorded, nearly so elsewhere."""

import pytest

from golden.runs import NAMES, VARIANTS, result
from golden.values import machine, read

FAST = (
    *("plain, sequential, 1", "scaffold, sequential, 1", "compressed, sequential, 1"),
    *("plain, slots, 1", "mask, slots, 1"),
)
# Their weights depend on losses, for which there is no exact sum.
NOT_EXACT = ("not exact", "afl", "qfedavg", "tilted_mean")
# What they draw or round next depends on the last bit before: elsewhere they say nothing.
BITS_ALONE = ("bfloat16", "local privacy")
VALUES = read()
RUNS = [
    pytest.param(
        name,
        variant,
        id=f"{name}, {variant}",
        marks=[] if f"{name}, {variant}" in FAST else pytest.mark.slow,
    )
    for name in NAMES
    for variant in VARIANTS
]


@pytest.mark.parametrize(("name", "variant"), RUNS)
def test_a_run_gives_what_it_gave(name, variant, tmp_path):
    before, now = VALUES["runs"][name][str(variant)], result(name, variant, tmp_path)
    assert now.keys() == before.keys()
    if "refused" in now:
        assert now["refused"] == before["refused"]
    elif VALUES["machine"] == machine():
        assert now == before
    elif name in BITS_ALONE:
        pytest.skip(f"recorded on another processor, {VALUES['machine']}")
    else:
        assert now["rough"] == pytest.approx(before["rough"], rel=1e-3, abs=1e-4)


def test_every_run_is_known():
    assert VALUES["runs"].keys() == set(NAMES)
    assert all(list(found) == [str(v) for v in VARIANTS] for found in VALUES["runs"].values())
    results = [value for found in VALUES["runs"].values() for value in found.values()]
    assert sum("bits" in value for value in results) > 160


@pytest.mark.parametrize("name", NAMES)
def test_what_was_recorded_of_two_processes_is_what_one_gave(name):
    """One after the other to the bit; in slots other clients train together, which rounds otherwise."""
    runs = VALUES["runs"][name]
    for engine in ("sequential", "slots"):
        one, two = runs[f"{engine}, 1"], runs[f"{engine}, 2"]
        assert one.keys() == two.keys()
        if "refused" in one:
            continue
        assert one["rough"] == pytest.approx(two["rough"], rel=1e-4, abs=1e-6)
        if engine == "sequential" and name not in NOT_EXACT:
            assert one["bits"] == two["bits"]
