"""Neural architecture search: spaces, supernets, rules of relaxation, training-free searches, costs."""

from fl_lightning.core.kinds import exports
from fl_lightning.nas.alpha_gradients import Gradient as Gradient
from fl_lightning.nas.alpha_gradients import Reward as Reward
from fl_lightning.nas.collapse import StopAtCollapse as StopAtCollapse
from fl_lightning.nas.cost.penalties import LinearPenalty as LinearPenalty
from fl_lightning.nas.cost.penalties import LogPenalty as LogPenalty
from fl_lightning.nas.network import Network as Network
from fl_lightning.nas.one_shot import OneShot as OneShot
from fl_lightning.nas.relaxation import PartialChannels as PartialChannels
from fl_lightning.nas.relaxation import SinglePath as SinglePath
from fl_lightning.nas.relaxation import Softmax as Softmax
from fl_lightning.nas.sampled_paths import BinaryGates as BinaryGates
from fl_lightning.nas.sampled_paths import HardGumbel as HardGumbel
from fl_lightning.nas.sampled_paths import SoftGumbel as SoftGumbel
from fl_lightning.nas.spaces.darts import DARTS as DARTS
from fl_lightning.nas.spaces.mobilenet import MobileNet as MobileNet
from fl_lightning.nas.spaces.mobilenet_layers import MobileNetLayers as MobileNetLayers
from fl_lightning.nas.spaces.nas_bench_201 import NASBench201 as NASBench201
from fl_lightning.nas.spaces.resnet import ResNet as ResNet
from fl_lightning.nas.spaces.vit import ViT as ViT
from fl_lightning.nas.sub_networks.accuracy import AccuracyPredictor as AccuracyPredictor
from fl_lightning.nas.sub_networks.attentive import Attentive as Attentive
from fl_lightning.nas.sub_networks.capability import BudgetTable as BudgetTable
from fl_lightning.nas.sub_networks.capability import DeviceClasses as DeviceClasses
from fl_lightning.nas.sub_networks.methods import RandomPath as RandomPath
from fl_lightning.nas.sub_networks.methods import Sandwich as Sandwich
from fl_lightning.nas.sub_networks.methods import Shrinking as Shrinking
from fl_lightning.nas.supernet import Supernet as Supernet

__all__ = list(exports(__file__, globals()))
