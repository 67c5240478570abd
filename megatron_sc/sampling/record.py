"""What the embedded sampler's rollouts say of their sampler, when they are written to a buffer."""

from __future__ import annotations

from importlib.metadata import version

from ..rollouts import HeadPolicy, Manifest, SamplerFingerprint
from .config import SamplerConfig


def sampler_manifest(config: SamplerConfig, true_vocab_size: int) -> Manifest:
    """Of a buffer that ``--rollout-record`` writes.

    Args:
        config: the sampler's settings.
        true_vocab_size: the model's vocabulary without padding.
    """
    spec = config.build_precision()
    names = {name: getattr(spec, name) for name in ("weights", "activations", "keys", "values")}
    numerics = {name: "" if quantizer is None else quantizer.name for name, quantizer in names.items()}
    return Manifest(
        true_vocab_size,
        sampler=SamplerFingerprint(
            engine="embedded",
            engine_version=version("megatron-sc"),
            weight_dtype=numerics["weights"],
            activation_dtype=numerics["activations"],
            kv_cache_dtype=" ".join(dict.fromkeys([numerics["keys"], numerics["values"]])).strip(),
            quantization=config.sampler_precision or config.sampler,
            temperature=config.sampler_temperature,
            top_p=config.sampler_top_p,
            top_k=config.sampler_top_k,
        ),
        heads=HeadPolicy.lossless(true_vocab_size if config.truncates else max(config.head_size, 1)),
    )
