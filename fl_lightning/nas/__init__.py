"""Neural architecture search: spaces, supernets, relaxations, training-free searches, costs."""

from fl_lightning.core.kinds import exports
from fl_lightning.nas.alpha_gradients import Gradient as Gradient
from fl_lightning.nas.alpha_gradients import LinearPenalty as LinearPenalty
from fl_lightning.nas.alpha_gradients import LogPenalty as LogPenalty
from fl_lightning.nas.alpha_gradients import Reward as Reward
from fl_lightning.nas.collapse import StopAtCollapse as StopAtCollapse
from fl_lightning.nas.network import Network as Network
from fl_lightning.nas.one_shot import OneShot as OneShot
from fl_lightning.nas.relaxation import PartialChannels as PartialChannels
from fl_lightning.nas.relaxation import SinglePath as SinglePath
from fl_lightning.nas.relaxation import Softmax as Softmax
from fl_lightning.nas.report import cell_figure as cell_figure
from fl_lightning.nas.sampled_paths import BinaryGates as BinaryGates
from fl_lightning.nas.sampled_paths import HardGumbel as HardGumbel
from fl_lightning.nas.sampled_paths import SoftGumbel as SoftGumbel
from fl_lightning.nas.search.problem import on_front as on_front
from fl_lightning.nas.search.proxy_scores import ZeroCostStart as ZeroCostStart
from fl_lightning.nas.spaces.choices import ValueChoice as ValueChoice
from fl_lightning.nas.spaces.darts import DARTS as DARTS
from fl_lightning.nas.spaces.elastic import ElasticBatchNorm2d as ElasticBatchNorm2d
from fl_lightning.nas.spaces.elastic import ElasticConv2d as ElasticConv2d
from fl_lightning.nas.spaces.elastic import ElasticDepthwise as ElasticDepthwise
from fl_lightning.nas.spaces.elastic import ElasticLayerNorm as ElasticLayerNorm
from fl_lightning.nas.spaces.elastic import ElasticLinear as ElasticLinear
from fl_lightning.nas.spaces.elastic import Repeat as Repeat
from fl_lightning.nas.spaces.mobilenet import MobileNet as MobileNet
from fl_lightning.nas.spaces.mobilenet_layers import MobileNetLayers as MobileNetLayers
from fl_lightning.nas.spaces.nas_bench_201 import NASBench201 as NASBench201
from fl_lightning.nas.spaces.own import InputChoice as InputChoice
from fl_lightning.nas.spaces.own import LayerChoice as LayerChoice
from fl_lightning.nas.spaces.own import LayerSpace as LayerSpace
from fl_lightning.nas.spaces.own import ModuleSpace as ModuleSpace
from fl_lightning.nas.spaces.resnet import ResNet as ResNet
from fl_lightning.nas.spaces.vit import ViT as ViT
from fl_lightning.nas.sub_networks.attentive import Attentive as Attentive
from fl_lightning.nas.sub_networks.capability import BudgetTable as BudgetTable
from fl_lightning.nas.sub_networks.capability import DeviceClasses as DeviceClasses
from fl_lightning.nas.sub_networks.methods import RandomPath as RandomPath
from fl_lightning.nas.sub_networks.methods import Sandwich as Sandwich
from fl_lightning.nas.sub_networks.methods import Shrinking as Shrinking
from fl_lightning.nas.supernet import Supernet as Supernet

__all__ = list(exports(__file__, globals()))
