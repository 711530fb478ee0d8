"""Central privacy as YAML gives it."""

import pytest

from fl_lightning import AdaptiveClip, CentralDP, ConfigurationError

GIVEN = {"clip_norm": 0.5, "noise_multiplier": 1.0}


def test_an_adaptive_clip_may_be_given_by_its_options_alone():
    options = {"quantile": 0.25, "bits_stddev": 2.0}
    assert CentralDP(**GIVEN, adaptive_clip=options).adaptive_clip == AdaptiveClip(**options)


@pytest.mark.parametrize(
    ("options", "says"),
    [({"quantil": 0.5}, "takes .*quantile.*got quantil"), ({"quantile": 2}, "2")],
)
def test_options_that_an_adaptive_clip_has_not_are_refused(options, says):
    with pytest.raises(ConfigurationError, match=says):
        CentralDP(**GIVEN, adaptive_clip=options)
