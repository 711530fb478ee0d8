"""LightningModules and networks: an image classifier over timm, small CNNs, k-means, schedules."""

from fl_lightning.core.kinds import exports
from fl_lightning.models.causal_lm import CausalLM as CausalLM
from fl_lightning.models.cnn import LeNet as LeNet
from fl_lightning.models.cnn import McMahanCNN as McMahanCNN
from fl_lightning.models.image_classifier import ImageClassifier as ImageClassifier
from fl_lightning.models.kmeans import KMeans as KMeans
from fl_lightning.models.schedule import Schedule as Schedule

__all__ = list(exports(__file__, globals()))
