"""What the tests of the simulated sampler run on ranks, and a plain PyTorch copy of the tiny model to compare with."""

import contextlib
import hashlib

import numpy as np
import torch
from sampling_models import HIDDEN, VOCAB, build_model, groups, named_values
from torch.nn import functional as F

from megatron_sc.precision.simulate import simulate_sampler
from megatron_sc.sampling import SamplerConfig, simulated, unwrap
from megatron_sc.sampling.score import next_token_logprobs

TOKENS = np.random.default_rng(3).integers(0, VOCAB, (6, 12))


def scored(specs, split_sums=False, **layout):
    """[b, s, V] log-probabilities under each spec. ``split_sums``: every inner product is summed in two halves."""
    model = build_model(**layout)
    with halved_sums() if split_sums else contextlib.nullcontext():
        return [scored_under(model, spec) for spec in specs]


def scored_under(model, spec):
    with simulated(model, spec, VOCAB, groups()):
        return next_token_logprobs(model, torch.from_numpy(TOKENS), VOCAB, tensor_group=groups().tensor)


@contextlib.contextmanager
def halved_sums():
    """torch.matmul of a matrix product adds the halves of its inner dimension, as two row-parallel ranks do."""
    stock = torch.matmul

    def halved(a, b, **kwargs):
        half = a.shape[-1] // 2
        return stock(a[..., :half], b[..., :half, :]) + stock(a[..., half:], b[..., half:, :])

    torch.matmul = halved
    try:
        yield
    finally:
        torch.matmul = stock


def scored_by_stages(specs):
    """The same from two pipeline stages: hidden states are sent on by hand. None on the first stage."""
    model = build_model(pp=2, tied=False)
    for name, parameter in model.named_parameters():
        if not model.pre_process:  # this stage's layer 0 is the model's layer 1
            parameter.data.copy_(named_values(name.replace("layers.0", "layers.1"), list(parameter.shape)))
    results = []
    tokens = torch.from_numpy(TOKENS)
    positions = torch.arange(TOKENS.shape[1]).expand_as(tokens)
    for spec in specs:
        with simulate_sampler(model, spec):
            if model.pre_process:
                torch.distributed.send(model(tokens, positions, None).contiguous(), 1)
                results.append(None)
            else:
                hidden = torch.empty(TOKENS.shape[1], TOKENS.shape[0], HIDDEN)
                torch.distributed.recv(hidden, 0)
                model.set_input_tensor(hidden)
                results.append(torch.log_softmax(model(tokens, positions, None)[..., :VOCAB], -1))
    return results


def state_hash(model):
    """Of every parameter, buffer, gradient, their storages, hooks, instance attributes, and of the random streams."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    digest = hashlib.sha256(torch.get_rng_state().numpy().tobytes())
    digest.update(repr(sorted((k, v.sum().item()) for k, v in get_cuda_rng_tracker().get_states().items())).encode())
    digest.update(repr(np.random.get_state()).encode())
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        for value in (tensor, tensor.grad, getattr(tensor, "main_grad", None)):
            if value is not None:
                data = value.detach().float().numpy()
                digest.update(f"{name} {value.data_ptr()} {value.dtype} {value.requires_grad}".encode())
                digest.update(data.tobytes())
    for name, module in model.named_modules():
        hooks = [len(module._forward_hooks), len(module._forward_pre_hooks), module.training]
        attributes = sorted(module.__dict__)
        digest.update(f"{name} {hooks} {[a for a in attributes if a != '_forward_impl']}".encode())
    return digest.hexdigest()


def plain_logprobs(weights, tokens, linear, cache):
    """The tiny dense model (gated, tied, float32) in plain PyTorch.

    Args:
        weights: by Megatron's names.
        tokens: [b, s].
        linear: (name, x [tokens, inputs], weights of the projections) -> the product with each, side by side.
        cache: (x [tokens * heads, width], name) -> what the cache holds.
    """
    b, s = tokens.shape
    w = {name.removeprefix("decoder."): value for name, value in weights.items()}
    x = w["embedding.word_embeddings.weight"][tokens] + w["embedding.position_embeddings.weight"][:s]
    heads, width = 4, HIDDEN // 4
    for layer in ("layers.0.", "layers.1."):
        y = F.layer_norm(x, (HIDDEN,), w[layer + "input_layernorm.weight"], w[layer + "input_layernorm.bias"])
        fused = w[layer + "self_attention.linear_qkv.weight"].view(heads, 3, width, HIDDEN)
        projections = [fused[:, i].reshape(HIDDEN, HIDDEN) for i in range(3)]
        bias = w[layer + "self_attention.linear_qkv.bias"].view(heads, 3, width)
        q, k, v = (
            (linear(y.view(-1, HIDDEN), m).view(b, s, heads, width) + bias[:, i]) for i, m in enumerate(projections)
        )
        k, v = (cache(t.reshape(-1, width)).view(t.shape) for t in (k, v))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / width**0.5
        scores = scores.masked_fill(torch.ones(s, s, dtype=torch.bool).triu(1), -1e9).softmax(-1)
        y = torch.einsum("bhqk,bkhd->bqhd", scores, v).reshape(-1, HIDDEN)
        y = linear(y, w[layer + "self_attention.linear_proj.weight"]) + w[layer + "self_attention.linear_proj.bias"]
        x = x + y.view(x.shape)
        norm = layer + "pre_mlp_layernorm."
        y = F.layer_norm(x, (HIDDEN,), w[norm + "weight"], w[norm + "bias"]).view(-1, HIDDEN)
        gates = w[layer + "mlp.linear_fc1.weight"].chunk(2)
        gate, up = (
            linear(y, m) + bias for m, bias in zip(gates, w[layer + "mlp.linear_fc1.bias"].chunk(2), strict=True)
        )
        y = linear(F.silu(gate) * up, w[layer + "mlp.linear_fc2.weight"]) + w[layer + "mlp.linear_fc2.bias"]
        x = x + y.view(x.shape)
    x = F.layer_norm(x, (HIDDEN,), w["final_layernorm.weight"], w["final_layernorm.bias"])
    return torch.log_softmax((x @ w["embedding.word_embeddings.weight"].T)[..., :VOCAB], -1)


def weights_and_scores(specs):
    """The full weights of the one-rank model, and its scores."""
    model = build_model()
    return {n: p.detach().clone() for n, p in model.named_parameters()}, [scored_under(model, spec) for spec in specs]


def make_config(**settings):
    return SamplerConfig(
        **({"task_size": 3, "prompts_per_step": 4, "samples_per_prompt": 3, "head_size": 5} | settings)
    )


class TELinear(torch.nn.Module):
    """What Megatron's wrapper of Transformer Engine's Linear keeps, from one of Megatron's own layers.

    Its product is not to be had here: calling it fails.
    """

    def __init__(self, local):
        super().__init__()
        self.config, self.weight, self.bias = local.config, local.weight, local.bias
        self.use_bias = local.bias is not None
        self.te_return_bias = local.skip_bias_add and self.use_bias
        self._tp_group = local.tp_group
        self.tp_group = None if local.explicit_expert_comm else local.tp_group

    def forward(self, x):
        """Never called where the product is simulated."""
        raise AssertionError("Transformer Engine was asked for a product")


class TEColumnParallelLinear(TELinear):
    """By name."""


class TERowParallelLinear(TELinear):
    """By name."""


class TELayerNormColumnParallelLinear(torch.nn.Module):
    """With the norm in front; not a TELinear."""

    def __init__(self, local, norm):
        super().__init__()
        self.__dict__.update(vars(TELinear(local)))
        self.layer_norm_weight, self.layer_norm_bias, self.eps = norm.weight, norm.bias, norm.eps
        self.normalization, self.zero_centered_gamma = "LayerNorm", False

    forward = TELinear.forward


def scored_by_stand_ins(specs, **layout):
    """Scores of a model whose linear layers, and the norms before them, are Transformer Engine's stand-ins."""
    from megatron.core.tensor_parallel import ColumnParallelLinear
    from megatron.core.transformer.identity_op import IdentityOp

    model = build_model(**layout)
    core = unwrap(model)
    for layer in core.decoder.layers:
        attention, moe = layer.self_attention, hasattr(layer.mlp, "experts")
        attention.linear_qkv = TELayerNormColumnParallelLinear(attention.linear_qkv, layer.input_layernorm)
        layer.input_layernorm = IdentityOp()
        if not moe:
            layer.mlp.linear_fc1 = TELayerNormColumnParallelLinear(layer.mlp.linear_fc1, layer.pre_mlp_layernorm)
            layer.pre_mlp_layernorm = IdentityOp()
        for parent in layer.modules():
            for name in ("linear_proj", "linear_fc1", "linear_fc2"):
                local = getattr(parent, name, None)
                if type(local).__name__ in ("ColumnParallelLinear", "RowParallelLinear"):
                    is_column = isinstance(local, ColumnParallelLinear)
                    setattr(parent, name, (TEColumnParallelLinear if is_column else TERowParallelLinear)(local))
    before = state_hash(core)
    scores = [scored_under(model, spec) for spec in specs]
    assert state_hash(core) == before
    return scores
