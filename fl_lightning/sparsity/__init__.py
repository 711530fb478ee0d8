"""Sparse training: masks calibrated from sensitivities, masked optimizers, task vectors, fitted heads."""

from fl_lightning.core.kinds import exports
from fl_lightning.sparsity.calibration.calibrate import Calibration as Calibration
from fl_lightning.sparsity.calibration.calibrate import calibrate as calibrate
from fl_lightning.sparsity.calibration.plan import CalibrationPlan as CalibrationPlan
from fl_lightning.sparsity.calibration.plan import soften as soften
from fl_lightning.sparsity.calibration.rules import HighestMagnitude as HighestMagnitude
from fl_lightning.sparsity.calibration.rules import LeastSensitive as LeastSensitive
from fl_lightning.sparsity.calibration.rules import LowestMagnitude as LowestMagnitude
from fl_lightning.sparsity.calibration.rules import MostSensitive as MostSensitive
from fl_lightning.sparsity.calibration.rules import RandomEntries as RandomEntries
from fl_lightning.sparsity.calibration.rules import Rule as Rule
from fl_lightning.sparsity.calibration.rules import next_mask as next_mask
from fl_lightning.sparsity.heads import FittedHead as FittedHead
from fl_lightning.sparsity.heads import HeadFit as HeadFit
from fl_lightning.sparsity.heads import LinearHead as LinearHead
from fl_lightning.sparsity.heads import RidgeHead as RidgeHead
from fl_lightning.sparsity.heads import head_features as head_features
from fl_lightning.sparsity.masks.mask import LayerDensity as LayerDensity
from fl_lightning.sparsity.masks.mask import Mask as Mask
from fl_lightning.sparsity.masks.mask import density_per_layer as density_per_layer
from fl_lightning.sparsity.masks.mask import load_mask as load_mask
from fl_lightning.sparsity.masks.mask import save_mask as save_mask
from fl_lightning.sparsity.masks.maskable import freeze_masked as freeze_masked
from fl_lightning.sparsity.masks.maskable import maskable_names as maskable_names
from fl_lightning.sparsity.optimizers.masked_optimizer import MaskedOptimizer as MaskedOptimizer
from fl_lightning.sparsity.optimizers.sparse_optimizers import SparseAdamW as SparseAdamW
from fl_lightning.sparsity.optimizers.sparse_optimizers import SparseSGDM as SparseSGDM
from fl_lightning.sparsity.sensitivity.fisher import EmpiricalFisher as EmpiricalFisher
from fl_lightning.sparsity.sensitivity.fisher import ExactFisher as ExactFisher
from fl_lightning.sparsity.sensitivity.fisher import SampledFisher as SampledFisher
from fl_lightning.sparsity.sensitivity.fisher import SquaredMeanGradient as SquaredMeanGradient
from fl_lightning.sparsity.sensitivity.per_example import SquaredGradients as SquaredGradients
from fl_lightning.sparsity.sensitivity.protocol import Scores as Scores
from fl_lightning.sparsity.sensitivity.protocol import Sensitivity as Sensitivity
from fl_lightning.sparsity.sensitivity.protocol import log_probabilities as log_probabilities
from fl_lightning.sparsity.sensitivity.protocol import raw_logits as raw_logits
from fl_lightning.sparsity.sensitivity.scoring import Scoring as Scoring
from fl_lightning.sparsity.tasks.merging import Similarity as Similarity
from fl_lightning.sparsity.tasks.merging import compare_masks as compare_masks
from fl_lightning.sparsity.tasks.merging import compare_tasks as compare_tasks
from fl_lightning.sparsity.tasks.merging import intersection as intersection
from fl_lightning.sparsity.tasks.merging import jaccard_overlap as jaccard_overlap
from fl_lightning.sparsity.tasks.merging import majority as majority
from fl_lightning.sparsity.tasks.merging import union as union
from fl_lightning.sparsity.tasks.task_vectors import TaskVector as TaskVector
from fl_lightning.sparsity.tasks.task_vectors import load_task_vector as load_task_vector
from fl_lightning.sparsity.tasks.task_vectors import merge as merge
from fl_lightning.sparsity.tasks.task_vectors import save_task_vector as save_task_vector

__all__ = list(exports(__file__, globals()))
