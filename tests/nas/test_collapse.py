"""A search that collapses is ended, and α goes back; otherwise the callback changes nothing."""

import pytest
import torch
from lightning.pytorch import Callback
from nas.test_supernet import TwoLayers, _doubles, data, images, supernet, vectors  # noqa: F401
from torch.utils.data import TensorDataset
from toys import toy_trainer, weights

from fl_lightning import CentralDP, ConfigurationError, Federation, PoissonCohort
from fl_lightning.nas import HardGumbel, NASBench201, PartialChannels, StopAtCollapse

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no")


class AllSkips(Callback):
    def on_train_epoch_start(self, trainer, module):
        if trainer.current_epoch == 1:
            module.alpha.data[:, module.space.operations.index("skip_connect")] = 9.0


class Sharper(Callback):
    """The loss by α is sharper in every round: heads are scaled up."""

    def on_train_epoch_start(self, trainer, module):
        module.network.head.weight.data *= 3.0


def rounds_of(module, datamodule, *callbacks, rounds):
    trainer = toy_trainer(*callbacks, max_epochs=rounds)
    trainer.fit(module, datamodule=datamodule)
    return trainer.current_epoch


@pytest.mark.parametrize(("most", "rounds"), [(5, 2), (None, 4)])
def test_a_cell_of_skips_ends_the_search(most, rounds):
    stop = StopAtCollapse(most_skips=most)
    found = rounds_of(
        supernet(NASBench201()),
        data(images(), 2, 24),
        AllSkips(),
        stop,
        Federation(local_steps=1),
        rounds=4,
    )
    assert found == rounds


def test_skips_of_the_start_count_only_once_alpha_moves():
    class Skips(Callback):
        def on_fit_start(self, trainer, module):
            module.alpha.data[:, module.space.operations.index("skip_connect")] = 9.0

    found = rounds_of(
        supernet(NASBench201(), PartialChannels(part=2, alpha_from=0.5)),
        data(images(), 2, 24),
        Skips(),
        StopAtCollapse(most_skips=5),
        Federation(local_steps=1),
        rounds=5,
    )
    assert found == 3  # of the rounds 0 to 4 α moves from 2 on


def test_the_eigenvalue_is_that_of_single_and_double_precision():
    def eigenvalue(precision):
        torch.set_default_dtype(torch.float32)
        x, labels = vectors().tensors
        singles = TensorDataset(x.float(), labels)
        stop = StopAtCollapse(eigenvalue=True)
        trainer = toy_trainer(stop, Federation(local_steps=1), max_epochs=1, precision=precision)
        trainer.fit(supernet(TwoLayers()), datamodule=data(singles, 3, 60))
        return float(trainer.callback_metrics["search/eigenvalue"])

    double = eigenvalue("64-true")
    assert double > 0
    assert eigenvalue("32-true") == pytest.approx(double, rel=1e-4)


def test_a_sharp_minimum_ends_the_search_where_alpha_was():
    seen = []

    class Note(Callback):
        def on_train_epoch_end(self, trainer, module):
            seen.append(module.alpha.detach().clone())

    module = supernet(TwoLayers())
    stop = StopAtCollapse(None, eigenvalue=True, window=2, ratio=0.9, num_examples=20)
    callbacks = [Note(), Sharper(), stop, Federation(local_steps=1)]
    ended = rounds_of(module, data(vectors(), 3, 60), *callbacks, rounds=12)
    assert ended < 12
    assert torch.equal(module.alpha, seen[ended - 3])


def test_watching_changes_nothing():
    plain, watched = (supernet(TwoLayers()) for _ in range(2))
    rounds_of(plain, data(vectors(), 3, 60), Federation(local_steps=1), rounds=3)
    stop = StopAtCollapse(eigenvalue=True, ratio=1e-6)
    rounds_of(watched, data(vectors(), 3, 60), stop, Federation(local_steps=1), rounds=3)
    assert torch.equal(weights(plain), weights(watched))
    kept, again = stop.state_dict(), StopAtCollapse(eigenvalue=True)
    assert len(kept["eigenvalues"]) == len(kept["earlier"]) == 3
    again.load_state_dict(kept)
    assert again.state_dict() == kept


def test_what_has_no_hessian_is_refused():
    with pytest.raises(ConfigurationError, match="window"):
        StopAtCollapse(window=0)
    with pytest.raises(ConfigurationError, match="ratio"):
        StopAtCollapse(ratio=1.0)
    with pytest.raises(ConfigurationError, match="HardGumbel, which draws"):
        rounds_of(
            supernet(TwoLayers(), HardGumbel()),
            data(vectors(), 3, 60),
            StopAtCollapse(eigenvalue=True),
            Federation(local_steps=1),
            rounds=1,
        )


@pytest.mark.parametrize("measured", [True, False])
def test_a_private_run_names_what_is_measured(measured):
    private = Federation(
        local_steps=1,
        cohort=PoissonCohort(fraction=0.5),
        privacy=CentralDP(clip_norm=1.0, noise_multiplier=1.0),
    )
    stop = StopAtCollapse(eigenvalue=measured)
    with pytest.warns(UserWarning, match="covers the models, but not") as told:
        rounds_of(supernet(TwoLayers()), data(vectors(), 3, 60), stop, private, rounds=1)
    assert any("the largest eigenvalue" in str(one.message) for one in told) == measured
