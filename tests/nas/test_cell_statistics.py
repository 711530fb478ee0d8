"""Evaluations of a supernet of cells do not depend on which examples stand together in a batch."""

import pytest
import torch
from nas.test_supernet import supernet
from torch.utils.data import DataLoader, Subset, TensorDataset
from toys import LoaderData, validating_trainer

from fl_lightning import FederatedDataModule, Federation
from fl_lightning.nas import HardGumbel, NASBench201
from fl_lightning.secure import SecureMean

NAMES = ("val/accuracy", "val/loss", "val/mixed_accuracy")
LABELS = torch.arange(24) % 2
EXAMPLES = TensorDataset(
    torch.randn(24, 1, 8, 8, generator=torch.Generator().manual_seed(2)), LABELS
)
MIXED, BY_CLASS = list(range(24)), LABELS.argsort().tolist()  # as a folder's images stand


def evaluated(order, num_clients=3, rule=None, batch_size=6, **options):
    """Search for a round; return what is logged of validation examples in an order."""

    class Evaluated(LoaderData):
        def val_dataloader(self):
            return DataLoader(Subset(EXAMPLES, order), batch_size=batch_size)

    source = Evaluated(DataLoader(EXAMPLES, batch_size=24))
    module = supernet(NASBench201(), rule, same_draws=True)
    data_module = FederatedDataModule(source, num_clients=num_clients, search_fraction=0.5, seed=0)
    trainer = validating_trainer(Federation(local_steps=1, **options), max_epochs=1)
    trainer.fit(module.float(), datamodule=data_module)
    return {n: float(v) for n, v in trainer.callback_metrics.items()}


@pytest.mark.parametrize("rule", [None, HardGumbel()], ids=["all operations", "one operation"])
def test_the_order_of_evaluation_examples_has_no_say(rule):
    mixed, by_class = evaluated(MIXED, rule=rule), evaluated(BY_CLASS, rule=rule)
    shown = [name for name in NAMES if name in mixed]
    assert len(shown) == (3 if rule is None else 2)
    for name in shown:
        assert by_class[name] == pytest.approx(mixed[name], abs=1e-5), name
    alone = evaluated(MIXED, rule=rule, batch_size=1)
    assert alone["val/loss"] == pytest.approx(mixed["val/loss"], abs=1e-5)


def test_protected_clients_send_no_sums():
    open_, hidden = evaluated(MIXED), evaluated(MIXED, aggregator=SecureMean())
    assert open_["recalibration/bytes_up"] > 0
    assert "recalibration/bytes_up" not in hidden
