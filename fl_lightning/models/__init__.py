"""LightningModules and networks: an image classifier over timm, small CNNs, schedules."""

from fl_lightning.models.cnn import LeNet, McMahanCNN
from fl_lightning.models.image_classifier import ImageClassifier
from fl_lightning.models.schedule import Schedule

__all__ = ["ImageClassifier", "LeNet", "McMahanCNN", "Schedule"]
