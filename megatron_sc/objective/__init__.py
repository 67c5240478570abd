"""The mathematics of score centering: torch only, no distributed code, no Megatron."""

from .advantages import compute_advantages
from .distributions import Draws, FullVocabulary, SamplerDistribution, Support, TopKHead
from .weights import (
    IMPORTANCE_WEIGHTS,
    ClippedSurrogate,
    ImportanceSampling,
    ImportanceWeight,
    MaskedImportanceSampling,
    TruncatedImportanceSampling,
    Uniform,
    unread_setting,
    weight_of,
)

__all__ = [
    "IMPORTANCE_WEIGHTS",
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
    "unread_setting",
    "weight_of",
]
