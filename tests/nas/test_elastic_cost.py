"""What running a part of a supernet takes: memory, measured."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fl_lightning.nas.spaces.elastic import ElasticDepthwise
from fl_lightning.nas.spaces.mobilenet import MobileNet
from fl_lightning.nas.spaces.resnet import ResNet
from fl_lightning.nas.spaces.vit import ViT

# each at its full width and at half of it, all else equal
HALVES = [
    (
        MobileNet(
            expansions=(3, 6),
            depths=(2,),
            widths=(16, 16, 16, 24, 32, 64, 64),
            strides=(1, 1, 2, 2),
            squeeze=(False,) * 4,
            swish=(False,) * 4,
        ),
        "k5e3-k5e3|k5e3-k5e3|k5e3-k5e3",
        "k5e6-k5e6|k5e6-k5e6|k5e6-k5e6",
    ),
    (
        ResNet(
            stem=16,
            channels=(128, 256),
            strides=(1, 2),
            stem_strides=(1, 1),
            widths=(0.5, 1.0),
            depths=((2,), (2,)),
            expansions=(0.5,),
        ),
        "w0.5:e0.5-e0.5|w0.5:e0.5-e0.5",
        "w1:e0.5-e0.5|w1:e0.5-e0.5",
    ),
    (
        ViT(features=(128, 256), heads=(2, 4), ratios=(4.0,), depths=(2,)),
        "d128:h2m4-h2m4",
        "d256:h4m4-h4m4",
    ),
]


EACH = pytest.mark.parametrize(
    ("space", "half", "full"), HALVES, ids=[space.name for space, _, _ in HALVES]
)


@EACH
def test_a_part_needs_no_second_copy_of_its_weights(space, half, full):
    """No tensor that a forward pass makes has the shape of a part's weights."""
    network = space.supernet(num_classes=10).eval()
    part = space.parse(half)
    weights = [own for own in space.build(part, num_classes=10).parameters() if own.dim() > 1]
    # kernels are left out: smaller ones are computed, by matrices
    shapes = {tuple(own.shape) for own in weights if own.numel() > 500 and own.shape[1] > 1}
    memory = {own.untyped_storage().data_ptr() for own in network.parameters()}
    copies = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            output = function(*args, **(kwargs or {}))
            for tensor in output if isinstance(output, tuple | list) else (output,):
                shape = tuple(tensor.shape)
                if tensor.untyped_storage().data_ptr() not in memory and (
                    shape in shapes or shape[::-1] in shapes
                ):
                    copies.append((str(function), shape))
            return output

    x = torch.randn(5, 3, 32, 32)
    with torch.no_grad(), Watch():
        network(x, part)
    assert copies == []


@EACH
def test_a_step_of_a_part_keeps_no_more_memory_than_the_plain_network(space, half, full):
    network, part = space.supernet(num_classes=10), space.parse(half)
    plain = space.extract(network, part)
    x = torch.randn(5, 3, 32, 32)

    def kept(run, network):
        """Bytes that wait for the backward pass, besides the network's own and the images."""
        own = {
            tensor.untyped_storage().data_ptr()
            for tensor in (*network.parameters(), *network.buffers(), x)
        }
        storages = {}

        def pack(tensor):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                storages[storage.data_ptr()] = storage
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            run().sum()
        return sum(storage.nbytes() for storage in storages.values())

    matrices = sum(
        4 * 2 * 25 * layer.out_channels
        for layer in network.modules()
        if isinstance(layer, ElasticDepthwise)
    )
    assert kept(lambda: network(x, part), network) <= kept(lambda: plain(x), plain) + matrices
