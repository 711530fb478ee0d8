"""LightningModules and networks: an image classifier over timm, small CNNs, k-means, schedules."""

from fl_lightning.models.cnn import LeNet, McMahanCNN
from fl_lightning.models.image_classifier import ImageClassifier
from fl_lightning.models.kmeans import KMeans
from fl_lightning.models.schedule import Schedule

__all__ = ["ImageClassifier", "KMeans", "LeNet", "McMahanCNN", "Schedule"]
