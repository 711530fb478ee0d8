"""Sparse training: masks calibrated from sensitivities, masked optimizers, task vectors, fitted heads."""

from fl_lightning.sparsity.calibration.calibrate import Calibration, calibrate
from fl_lightning.sparsity.calibration.plan import CalibrationPlan, soften
from fl_lightning.sparsity.calibration.rules import (
    HighestMagnitude,
    LeastSensitive,
    LowestMagnitude,
    MostSensitive,
    RandomEntries,
    Rule,
    next_mask,
)
from fl_lightning.sparsity.heads import FittedHead, HeadFit, LinearHead, RidgeHead, head_features
from fl_lightning.sparsity.masks.mask import Mask, load_mask, save_mask
from fl_lightning.sparsity.masks.maskable import freeze_masked, maskable_names
from fl_lightning.sparsity.masks.report import (
    LayerDensity,
    density_figure,
    density_per_layer,
    density_per_tensor,
)
from fl_lightning.sparsity.optimizers.masked_optimizer import MaskedOptimizer
from fl_lightning.sparsity.optimizers.sparse_adamw import SparseAdamW
from fl_lightning.sparsity.optimizers.sparse_sgdm import SparseSGDM
from fl_lightning.sparsity.sensitivity.fisher import (
    EmpiricalFisher,
    ExactFisher,
    SampledFisher,
    SquaredMeanGradient,
)
from fl_lightning.sparsity.sensitivity.per_example import SquaredGradients
from fl_lightning.sparsity.sensitivity.protocol import (
    Scores,
    Sensitivity,
    log_probabilities,
    raw_logits,
)
from fl_lightning.sparsity.sensitivity.scoring import Scoring
from fl_lightning.sparsity.tasks.merging import (
    Similarity,
    compare_masks,
    compare_tasks,
    intersection,
    jaccard_overlap,
    majority,
    union,
)
from fl_lightning.sparsity.tasks.task_vectors import (
    TaskVector,
    load_task_vector,
    merge,
    save_task_vector,
)

__all__ = [
    "Calibration",
    "CalibrationPlan",
    "EmpiricalFisher",
    "ExactFisher",
    "FittedHead",
    "HeadFit",
    "HighestMagnitude",
    "LayerDensity",
    "LeastSensitive",
    "LinearHead",
    "LowestMagnitude",
    "Mask",
    "MaskedOptimizer",
    "MostSensitive",
    "RandomEntries",
    "RidgeHead",
    "Rule",
    "SampledFisher",
    "Scores",
    "Scoring",
    "Sensitivity",
    "Similarity",
    "SparseAdamW",
    "SparseSGDM",
    "SquaredGradients",
    "SquaredMeanGradient",
    "TaskVector",
    "calibrate",
    "compare_masks",
    "compare_tasks",
    "density_figure",
    "density_per_layer",
    "density_per_tensor",
    "freeze_masked",
    "head_features",
    "intersection",
    "jaccard_overlap",
    "load_mask",
    "load_task_vector",
    "log_probabilities",
    "majority",
    "maskable_names",
    "merge",
    "next_mask",
    "raw_logits",
    "save_mask",
    "save_task_vector",
    "soften",
    "union",
]
