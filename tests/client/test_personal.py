"""Which tensors stay with the client: found by pattern, head or kind of layer, or refused."""

import pytest
from torch import nn
from toys import ToyModule

from fl_lightning import APFL, ConfigurationError, Ditto, FineTuned, ImageClassifier, Personal

HEAD = ["net.4.weight", "net.4.bias"]
NORM = ["weight", "bias", "running_mean", "running_var", "num_batches_tracked"]


@pytest.mark.parametrize(
    "patterns", [["net.4.*"], ["4.*"], ["4.weight", "4.b???"], ["net.4.*", "4.*"]]
)
def test_patterns_match_names_and_what_follows_a_dot(patterns):
    assert Personal(patterns).names(ToyModule()) == HEAD


def test_a_tied_parameter_is_found_by_any_of_its_names():
    module = nn.ModuleDict({"embedding": nn.Linear(2, 2, bias=False)})
    module["head"] = module["embedding"]
    assert Personal(["head.*"]).names(module) == ["embedding.weight"]


def test_norms_are_found_with_their_statistics():
    module = ToyModule(batch_norm=True)
    assert Personal(norms=True).names(module) == [f"net.1.{name}" for name in NORM]
    assert Personal(["4.*"], norms=True).names(module)[2:4] == HEAD


def test_the_head_is_the_one_that_the_network_names():
    kwargs = {"embed_dim": 8, "depth": 1, "num_heads": 2, "patch_size": 4}
    module = ImageClassifier(
        "vit_tiny_patch16_224", num_classes=3, in_chans=1, image_size=8, network_kwargs=kwargs
    )
    names = Personal(head=True).names(module)
    assert sorted(name.split(".")[-2:] for name in names) == [["head", "bias"], ["head", "weight"]]


def frozen():
    module = ToyModule()
    module.net[4].requires_grad_(False)
    return module


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Personal(["4.*", "haed.*"]).names(ToyModule()), r"'haed.\*'; there are net.0.weight, "),
        (lambda: Personal(norms=True).names(ToyModule()), "ToyModule has no normalisation layer"),
        (lambda: Personal(head=True).names(ToyModule()), "ToyModule does not say which layer"),
        (lambda: Personal(["4.*"]).names(frozen()), "all parameters that it names are frozen .* net.4.weight"),
        (lambda: Personal("head.*"), r"write parameters=\['head.\*'\]"),
        (lambda: Personal(["4.*"], own_epochs=-1), "own_epochs must be at least 0"),
        (lambda: Personal(own_epochs=1), "parameters must name the parameters that stay with a client"),
        (lambda: Ditto(pull=-1), "pull must be at least 0 and finite, got -1"),
        (lambda: Ditto(pull=float("inf")), "pull must be at least 0 and finite, got inf"),
        (lambda: APFL(mixture=1.5), r"mixture must be in \[0, 1\], got 1.5"),
        (lambda: APFL(mixture_rate=-1), "mixture_rate must be at least 0"),
        (lambda: FineTuned(local_steps=-1), "local_steps must be at least 1, got -1"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(make, message):
    with pytest.raises(ConfigurationError, match=message):
        make()
