"""Trained models are audited: with noise the bound is below what is accounted, without above."""

import pytest

from benchmarks.canaries import Audit
from fl_lightning import CentralDP, ExampleDP

pytestmark = pytest.mark.filterwarnings("ignore:privacy:UserWarning")
SMALL = {"num_canaries": 150, "num_clients": 15, "rounds": 2, "batch_size": 200, "share": 0.8}


@pytest.mark.parametrize("kind", [CentralDP, ExampleDP])
def test_a_training_is_audited(kind):
    options = {"clip_norm": 1.0, "delta": 1e-5, "secure_noise": False}
    private, accounted, _ = Audit(privacy=kind(epsilon=1.0, **options), **SMALL)()
    assert accounted == pytest.approx(1.0, abs=1e-3)
    assert private.epsilon(1e-5) <= accounted
    bare, endless, accuracy = Audit(privacy=kind(noise_multiplier=0.0, **options), **SMALL)()
    assert endless is None
    assert bare.right == bare.guesses == 120
    assert bare.epsilon(1e-5) > 3.0
    assert accuracy > 0.12  # it has learnt something of the digits
