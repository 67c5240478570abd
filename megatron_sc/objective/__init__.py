"""The mathematics of score centering: torch only, no distributed code, no Megatron."""

from .advantages import compute_advantages
from .distributions import Draws, FullVocabulary, SamplerDistribution, Support, TopKHead
from .weights import (
    IMPORTANCE_WEIGHTS,
    WEIGHT_SETTINGS,
    ClippedSurrogate,
    ImportanceSampling,
    ImportanceWeight,
    MaskedImportanceSampling,
    TruncatedImportanceSampling,
    Uniform,
    weight_of,
)

__all__ = [
    "IMPORTANCE_WEIGHTS",
    "WEIGHT_SETTINGS",
    "ClippedSurrogate",
    "Draws",
    "FullVocabulary",
    "ImportanceSampling",
    "ImportanceWeight",
    "MaskedImportanceSampling",
    "SamplerDistribution",
    "Support",
    "TopKHead",
    "TruncatedImportanceSampling",
    "Uniform",
    "compute_advantages",
    "weight_of",
]
