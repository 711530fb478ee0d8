"""Neural architecture search: spaces, supernets, rules of relaxation, training-free searches, costs."""

from fl_lightning.nas.alpha_gradients import Gradient, Reward
from fl_lightning.nas.collapse import StopAtCollapse
from fl_lightning.nas.cost.penalties import (
    AbsolutePenalty,
    LinearPenalty,
    LogPenalty,
    NoPenalty,
    RelativeLogPenalty,
)
from fl_lightning.nas.network import Network
from fl_lightning.nas.one_shot import OneShot
from fl_lightning.nas.relaxation import PartialChannels, SinglePath, Softmax
from fl_lightning.nas.sampled_paths import BinaryGates, HardGumbel, SoftGumbel
from fl_lightning.nas.spaces.darts import DARTS
from fl_lightning.nas.spaces.mobilenet import MobileNet
from fl_lightning.nas.spaces.mobilenet_layers import MobileNetLayers
from fl_lightning.nas.spaces.nas_bench_201 import NASBench201
from fl_lightning.nas.spaces.resnet import ResNet
from fl_lightning.nas.spaces.vit import ViT
from fl_lightning.nas.sub_networks.accuracy import AccuracyPredictor
from fl_lightning.nas.sub_networks.attentive import Attentive
from fl_lightning.nas.sub_networks.capability import BudgetTable, DeviceClasses
from fl_lightning.nas.sub_networks.methods import RandomPath, Sandwich, Shrinking
from fl_lightning.nas.supernet import Supernet

__all__ = [
    "DARTS",
    "AbsolutePenalty",
    "AccuracyPredictor",
    "Attentive",
    "BinaryGates",
    "BudgetTable",
    "DeviceClasses",
    "Gradient",
    "HardGumbel",
    "LinearPenalty",
    "LogPenalty",
    "MobileNet",
    "MobileNetLayers",
    "NASBench201",
    "Network",
    "NoPenalty",
    "OneShot",
    "PartialChannels",
    "RandomPath",
    "RelativeLogPenalty",
    "ResNet",
    "Reward",
    "Sandwich",
    "Shrinking",
    "SinglePath",
    "SoftGumbel",
    "Softmax",
    "StopAtCollapse",
    "Supernet",
    "ViT",
]
