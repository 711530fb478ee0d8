"""What a GPU computes is not waited for in a local step.

Shown without one, on PyTorch's device without numbers: whoever asks it for a number fails, and what goes
to it from the host can be counted. That it happens in the same kernels on a GPU is for `test_gpu`.
"""

import pytest
import torch
from test_slot_training import OPTIMIZERS, works
from torch import Tensor
from torch.fx.experimental import _config as meta_config
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import TensorDataset
from toys import ToyModule

from fl_lightning.client.local_step import PlainStep
from fl_lightning.client.local_training import LocalTrainer
from fl_lightning.client.log_collector import LogCollector
from fl_lightning.data.training_set import batch_reader
from fl_lightning.data.transforms import PixelPipeline
from fl_lightning.engines.slots.stacked_step import StackedStep
from fl_lightning.engines.slots.step_functions import StackedOptions
from fl_lightning.engines.slots.training import SlotTrainer

THERE = torch.device("meta")


class Copies(TorchDispatchMode):
    """Counts what goes between the devices: numbers, and whether that is waited for.

    ``asks``: whether a number of there may be asked for: whoever does is told 0.
    """

    def __init__(self, *, asks=False):
        super().__init__()
        self.waiting, self.others = 0, 0
        self.asks, self.asked = asks, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self.asks and function.name() == "aten::_local_scalar_dense" and args[0].is_meta:
            self.asked += 1
            return torch.zeros((), dtype=args[0].dtype).item()
        result = function(*args, **kwargs)
        tensors = [x for x in tree_leaves((args, kwargs, result)) if isinstance(x, Tensor)]
        # a number of the host's may take part in what is computed there
        devices = {x.device for x in tensors if x.ndim or x.device == THERE}
        if len(devices) > 1:
            is_copy = function.name() == "aten::_to_copy"
            if is_copy and kwargs.get("non_blocking"):
                self.others += 1
            else:
                self.waiting += 1
        return result


def there(optimizer="momentum", **options):
    """Return a model, its sequential engine and a reader of its examples, all on that device."""
    with THERE:
        module = ToyModule(**options)
    examples = torch.empty(60, 4, device=THERE), torch.empty(60, dtype=torch.long, device=THERE)
    collector = LogCollector()
    object.__setattr__(module, "log", collector.log)
    # how many entries a mask has is a number as well, needed once
    with meta_config.patch(meta_nonzero_assume_all_nonzero=True):
        made = OPTIMIZERS[optimizer](module.parameters())
        trainer = LocalTrainer(module, made, PlainStep(module, made, collector), collector)
    return module, made, trainer, batch_reader(TensorDataset(*examples))


def test_numbers_from_there_and_copies_are_noticed():
    value = torch.ones(3, device=THERE)
    for asking in (lambda: value.sum().item(), value.tolist, value.cpu, lambda: bool(value[0] > 0)):
        with pytest.raises((NotImplementedError, RuntimeError)):
            asking()
    with Copies() as copies:
        torch.ones(3).to(THERE)
        torch.ones(3).to(THERE, non_blocking=True)
        value.index_select(0, torch.tensor([0]))
        value + torch.tensor(1.0)
    assert (copies.waiting, copies.others) == (2, 1)


def assert_slots_never_wait(optimizer="momentum", sizes=(8, 3, 5), *, kind=None, **options):
    """Only the rehearsal asks what it has computed, as often for one epoch as for two."""
    asked = set()
    for epochs in (1, 2):
        module, made, trainer, read = there(optimizer, **(kind or {}))
        step = StackedStep(module, made, True, StackedOptions(2, **options))
        slots = SlotTrainer(step, trainer.space, trainer.buffers, read, 4)
        with Copies(asks=True) as copies:
            groups = list(slots.train(trainer.read(), works(sizes, epochs=epochs)))
        assert sum(len(group.client_ids) for group in groups) == len(sizes)
        assert all(group.deltas.device == THERE for group in groups)
        assert copies.waiting == 0
        assert copies.others > 0
        asked.add(copies.asked)
    assert len(asked) == 1


# those whose steps are functions of their own
STEPS = ("momentum", "adam", "sparse sgd", "nearly whole sgd", "sparse adamw")


@pytest.mark.parametrize(
    "options",
    [
        *({"optimizer": name} for name in STEPS),
        {"sizes": (4, 4, 4)},  # all begin together
        {"clip_norm": 0.1},
        {"clip_value": 0.1},
        {"kind": {"dropout": 0.5}},
        {"kind": {"batch_norm": True}, "sizes": (8, 4, 12)},
        {"padded": True},
    ],
    ids=str,
)
def test_slots(options):
    assert_slots_never_wait(**options)


@pytest.mark.parametrize(
    ("optimizer", "kind"),
    [
        *((name, {}) for name in STEPS),
        ("momentum", {"dropout": 0.5}),
        ("momentum", {"batch_norm": True}),
    ],
    ids=str,
)
def test_one_client_after_the_other(optimizer, kind):
    _, _, trainer, read = there(optimizer, **kind)
    (work,) = works([18], epochs=2)
    seen = []

    def batches():
        for batch in work.batches:
            seen.append(len(batch))
            yield [(read(batch), len(batch))]

    start = trainer.read()
    with Copies() as copies, pytest.raises(NotImplementedError, match="no data"):
        # asked for once, after the last step: whether the update is finite
        trainer.train(start, client_id=0, num_examples=18, batches=batches())
    assert seen == list(work.sizes)
    assert copies.waiting == 0


def test_augmentation():
    three = (0.5, 0.5, 0.5)
    pipeline = PixelPipeline(three, three, crop_padding=1, horizontal_flip=True, image_size=8)
    with Copies() as copies:
        images = pipeline(torch.empty(5, 3, 6, 6, dtype=torch.uint8, device=THERE))
    assert images.shape == (5, 3, 8, 8)
    assert images.device == THERE
    assert (copies.waiting, copies.others) == (0, 5)  # two offsets, who is mirrored, mean and std
