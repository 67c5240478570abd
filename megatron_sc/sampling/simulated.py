"""A quantized, noisy sampler from the weights that a model holds now."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from torch import nn

from megatron_sc.precision.simulate import Simulated, simulate_sampler
from megatron_sc.precision.specs import SamplerSpec

from .distortion import Distortion, GaussianWeights, NoDistortion, distorted_weights
from .groups import ParallelGroups
from .isolation import inference_only


@contextmanager
def simulated(
    model: nn.Module, spec: SamplerSpec, true_vocab_size: int, groups: ParallelGroups | None = None
) -> Iterator[Simulated]:
    """Inside, the model computes as the sampler of ``spec`` would after its weights were refreshed.

    Noise is added first and the noisy weights are quantized: what ``precision.simulate_sampler`` does, with noise.
    Staleness is a property of a run, not of a forward pass: ``EmbeddedSampler`` has it. Evaluation mode, no gradients,
    and every bit of the trainer and of its random streams as before afterwards.

    Collective over the tensor-parallel groups.

    Args:
        model: a Megatron GPTModel, possibly wrapped.
        spec: the numerics.
        true_vocab_size: rows of the vocabulary matrices beyond it are padding and get no noise.
        groups: this rank's process groups; None: one rank.

    Yields:
        The names of what is quantized.

    Raises:
        ValueError: as ``simulate_sampler`` and ``sampler_weights``.
    """
    with (
        inference_only(model),
        distorted_weights(model, noise_of(spec), true_vocab_size, groups),
        simulate_sampler(model, without_weight_changes(spec)) as names,
    ):
        yield names


def noise_of(spec: SamplerSpec) -> Distortion:
    """The spec's noise as a distortion of weights."""
    return GaussianWeights(spec.noise, spec.noise_seed) if spec.noise else NoDistortion()


def without_weight_changes(spec: SamplerSpec) -> SamplerSpec:
    """The spec of one forward pass: without noise and staleness."""
    return replace(spec, noise=0.0, staleness=1)
