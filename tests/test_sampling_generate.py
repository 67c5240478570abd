"""Generation with a Megatron model: what is recorded, and that layout, padding and batch change nothing."""

import math
import random

import numpy as np
import pytest
import torch
from distributed import run_ranks
from sampling_models import VOCAB, build_model, groups

from megatron_sc.sampling import SamplingParameters, generate
from megatron_sc.sampling.shards import unwrap

LENGTH, DRAWS = 5, 3
ATOL = 2e-5


def make_prompts(count, seed=0):
    """Prompts [count, 6], lengths 3..6, uniforms [count, LENGTH, 1 + DRAWS]."""
    rng = np.random.default_rng(seed)
    return (
        torch.from_numpy(rng.integers(0, VOCAB, (count, 6))),
        torch.from_numpy(rng.integers(3, 7, count)),
        torch.from_numpy(rng.random((count, LENGTH, 1 + DRAWS))),
    )


def full_logprobs(model, prompts, lengths, generation, temperature=1.0):
    """The log-probabilities at every generated position, [b, R, V] float64, from one full forward per sequence."""
    rows = []
    model.eval()
    with torch.no_grad():
        for prompt, length, ids in zip(prompts, lengths, generation.ids, strict=True):
            tokens = torch.cat([prompt[:length], ids.long()]).unsqueeze(0)
            positions = torch.arange(tokens.shape[1]).unsqueeze(0)
            logits = model(tokens, positions, None, runtime_gather_output=True)[0, length - 1 : -1, :VOCAB]
            rows.append((logits.double() / temperature).log_softmax(-1))
    return torch.stack(rows)


def generated(parameters=None, count=8, pad_multiple=1, rows=None, **layout):
    """A generation and the full distributions it should come from."""
    model = build_model(**layout)
    prompts, lengths, uniforms = make_prompts(count)
    if rows is not None:
        prompts, lengths, uniforms = prompts[rows], lengths[rows], uniforms[rows]
    result = generate(model, prompts, lengths, uniforms, VOCAB, parameters, groups().tensor, pad_multiple)
    temperature = parameters.temperature if parameters and parameters.temperature else 1.0
    return vars(result), full_logprobs(model, prompts, lengths, result, temperature)


def assert_same(one, other, atol=ATOL):
    assert one.keys() == other.keys()
    for name, value in one.items():
        if not isinstance(value, torch.Tensor):
            assert value == other[name], name
        elif value.dtype == torch.int32:
            assert torch.equal(value, other[name]), name
        else:
            assert torch.allclose(value, other[name], atol=atol, rtol=1e-4), name


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("tied", [True, False])
def test_a_generation_records_the_distribution_it_was_drawn_from(tied, temperature):
    parameters = SamplingParameters(temperature=temperature, head_size=4)
    ((result, logprobs),) = run_ranks(generated, 1, parameters, megatron=True, tied=tied)
    ids, head_ids, draw_ids = (result[name].long() for name in ("ids", "head_ids", "draw_ids"))
    assert ids.shape == (8, LENGTH)
    assert head_ids.shape == (8, LENGTH, 4)
    assert draw_ids.shape == (8, LENGTH, DRAWS)
    assert ids.max() < VOCAB
    assert torch.allclose(result["logprobs"].double(), logprobs.gather(2, ids[..., None])[..., 0], atol=ATOL)
    assert torch.allclose(result["draw_logprobs"].double(), logprobs.gather(2, draw_ids), atol=ATOL)
    top = logprobs.topk(4)
    assert torch.equal(head_ids, top.indices)
    assert torch.allclose(result["head_logprobs"].double(), top.values, atol=ATOL)
    tail = logprobs.scatter(2, head_ids, -math.inf).logsumexp(2)
    assert torch.allclose(result["log_tail_mass"].double(), tail, atol=ATOL)
    assert not result["head_is_support"]
    assert all(result[name].dtype == torch.float32 for name in ("logprobs", "head_logprobs", "log_tail_mass"))
    assert all(result[name].dtype == torch.int32 for name in ("ids", "head_ids", "draw_ids"))


def test_a_head_of_the_whole_vocabulary_has_no_tail():
    ((result, logprobs),) = run_ranks(generated, 1, SamplingParameters(head_size=VOCAB), megatron=True)
    ordered = result["head_logprobs"].gather(2, result["head_ids"].long().argsort(2))
    assert torch.allclose(ordered.double(), logprobs, atol=ATOL)
    assert (result["log_tail_mass"] == -math.inf).all()


def test_without_a_head_none_is_recorded():
    ((result, _),) = run_ranks(generated, 1, None, megatron=True)
    assert result["head_ids"] is result["head_logprobs"] is result["log_tail_mass"] is None


@pytest.mark.parametrize("truncation", [{"top_k": 6}, {"top_p": 0.7}])
def test_a_truncated_sampler_records_its_whole_support(truncation):
    parameters = SamplingParameters(head_size=2, **truncation)
    ((result, logprobs),) = run_ranks(generated, 1, parameters, megatron=True)
    assert result["head_is_support"]
    assert result["log_tail_mass"] is None
    ids, values = result["head_ids"].long(), result["head_logprobs"].double()
    kept = ids >= 0
    assert torch.equal(kept, values > -math.inf)
    assert torch.allclose(values.exp().sum(2), torch.ones(8, LENGTH, dtype=torch.float64), atol=1e-5)
    raw = torch.where(kept, logprobs.gather(2, ids.clamp(min=0)), -math.inf)
    mass = raw.logsumexp(2, keepdim=True)
    assert torch.allclose(values[kept], (raw - mass)[kept], atol=ATOL)  # renormalized on the support
    if "top_k" in truncation:
        assert (kept.sum(2) == 6).all()
    else:
        smallest = torch.where(kept, raw, math.inf).min(2, keepdim=True).values.exp()
        assert (mass.exp() >= 0.7 - 1e-6).all()
        assert (mass.exp() - smallest < 0.7 + 1e-6).all()
    for name in ("ids", "draw_ids"):
        drawn = result[name].long().reshape(8, LENGTH, -1)
        assert (drawn[..., None] == ids[..., None, :]).any(-1).all(), name
    found = (ids == result["ids"].long()[..., None]).long().argmax(2, keepdim=True)
    assert torch.allclose(result["logprobs"].double(), values.gather(2, found)[..., 0], atol=1e-6)


def test_greedy_takes_the_most_likely_token():
    ((result, logprobs),) = run_ranks(generated, 1, SamplingParameters(temperature=0, head_size=3), megatron=True)
    assert torch.equal(result["ids"].long(), logprobs.argmax(2))
    assert result["head_ids"] is result["draw_ids"] is None
    assert not result["head_is_support"]


def many_draws(count):
    """First tokens and draws of one prompt, ``count`` times, and their distribution."""
    model = build_model()
    prompts = torch.arange(4).expand(count, 4)
    uniforms = torch.from_numpy(np.random.default_rng(1).random((count, 1, 3)))
    result = generate(model, prompts, torch.full((count,), 4), uniforms, VOCAB, SamplingParameters(head_size=VOCAB))
    return result.ids[:, 0], result.draw_ids[:, 0], result.head_ids[0, 0], result.head_logprobs[0, 0]


def test_sampled_tokens_and_draws_follow_the_recorded_head():
    count = 6000
    ((ids, draws, head_ids, head_logprobs),) = run_ranks(many_draws, 1, count, megatron=True)
    expected = torch.zeros(VOCAB).scatter_(0, head_ids.long(), head_logprobs.exp()) * count
    common = expected > 5
    for drawn in (ids, draws[:, 0], draws[:, 1]):
        observed = torch.bincount(drawn, minlength=VOCAB)
        chi_square = ((observed - expected) ** 2 / expected)[common].sum().item()
        assert chi_square < 2.5 * common.sum()  # 2.5 a degree of freedom: beyond 1 in 10^4
    # independent: the share of equal pairs is the sum of squared probabilities
    collision = (expected / count).square().sum()
    assert abs((ids == draws[:, 0]).float().mean() - collision) < 4 * math.sqrt(collision / count)


@pytest.mark.parametrize(
    "layout",
    [{"tp": 2}, {"tp": 2, "tied": False, "gated": False}, {"tp": 2, "moe": True}],
    ids=lambda layout: "-".join(layout),
)
def test_tensor_parallel_ranks_draw_the_tokens_of_one_rank(layout):
    parameters = SamplingParameters(head_size=6)
    single = {key: value for key, value in layout.items() if key != "tp"}
    ((alone, _),) = run_ranks(generated, 1, parameters, megatron=True, **single)
    first, second = (result for result, _ in run_ranks(generated, 2, parameters, megatron=True, **layout))
    assert_same(first, second, atol=0)
    assert_same(alone, first)


def first_ranks_draws():
    """Tokens when the ranks' random numbers disagree, as the rounding of a parallel cumulative sum may."""
    model = build_model(tp=2)
    prompts, lengths, uniforms = make_prompts(8)
    if torch.distributed.get_rank() == 1:
        uniforms = 1 - uniforms
    result = generate(model, prompts, lengths, uniforms, VOCAB, tensor_group=groups().tensor)
    return result.ids, result.draw_ids


def test_tensor_parallel_ranks_follow_the_first_ranks_draws():
    ((expected, _),) = run_ranks(generated, 1, None, megatron=True)
    for ids, draw_ids in run_ranks(first_ranks_draws, 2, megatron=True):
        assert torch.equal(ids, expected["ids"])
        assert torch.equal(draw_ids, expected["draw_ids"])


class SequenceParallel(torch.nn.Module):
    """Hidden states cut along the sequence, and Megatron's output layer under sequence parallelism.

    A whole GPTModel does not support it on a CPU: its LayerNorm needs Apex or Transformer Engine.
    """

    def __init__(self, model, hidden_states):
        super().__init__()
        self.hidden_states = hidden_states  # [s, b, h]
        self.output_layer = model.output_layer
        self.output_layer.sequence_parallel = True
        self.output_layer.allreduce_dgrad = False

    def forward(self, tokens, position_ids, attention_mask, output_processor):
        """What GPTModel hands to an output processor."""
        rank = torch.distributed.get_rank()
        return output_processor(
            hidden_states=self.hidden_states.chunk(2)[rank],
            output_layer=self.output_layer,
            output_weight=None,
            scale_logits=lambda logits: 2 * logits,
        )


def sequence_parallel_logits():
    """Logits at chosen positions, and those computed from the whole hidden states and weight."""
    from megatron_sc.sampling.generate import _next_token_logits

    core = build_model(tp=2, tied=False)
    hidden_states = torch.randn(8, 3, 32, generator=torch.Generator().manual_seed(0))
    model = SequenceParallel(core, hidden_states)
    last = torch.tensor([1, 7, 4])
    with torch.no_grad():
        logits = _next_token_logits(model, torch.zeros(3, 8), torch.zeros(3, 8), last)
        weight = [torch.empty_like(core.output_layer.weight) for _ in range(2)]
        torch.distributed.all_gather(weight, core.output_layer.weight.detach())
    expected = 2 * hidden_states[last, torch.arange(3)] @ torch.cat(weight).T
    return logits, expected, core.output_layer.sequence_parallel


def test_sequence_parallel_hidden_states_are_gathered():
    for logits, expected, restored in run_ranks(sequence_parallel_logits, 2, megatron=True):
        assert torch.allclose(logits, expected, atol=1e-5)
        assert restored


def expert_parallel(parameters):
    """This data-parallel rank's half of the prompts."""
    rank = torch.distributed.get_rank()
    return generated(parameters, rows=slice(4 * rank, 4 * rank + 4), ep=2, moe=True)


def test_expert_parallel_ranks_draw_the_tokens_of_one_rank():
    parameters = SamplingParameters(head_size=6)
    ((alone, _),) = run_ranks(generated, 1, parameters, megatron=True, moe=True)
    halves = [result for result, _ in run_ranks(expert_parallel, 2, parameters, megatron=True)]
    joined = {
        name: torch.cat([half[name] for half in halves]) if isinstance(value, torch.Tensor) else value
        for name, value in halves[0].items()
    }
    assert_same(alone, joined)


@pytest.mark.parametrize(
    "layout", [{"wrapped": True}, {"bf16": True, "wrapped": True}], ids=lambda layout: "-".join(layout)
)
def test_wrapped_models_generate(layout):
    parameters = SamplingParameters(head_size=4)
    ((result, logprobs),) = run_ranks(generated, 1, parameters, megatron=True, **layout)
    at_ids = logprobs.gather(2, result["ids"].long()[..., None])[..., 0]
    assert torch.allclose(result["logprobs"].double(), at_ids, atol=0.1 if "bf16" in layout else ATOL)


def test_padding_and_the_rest_of_the_batch_change_nothing():
    parameters = SamplingParameters(head_size=4)
    ((plain, _),) = run_ranks(generated, 1, parameters, megatron=True)
    ((padded, _),) = run_ranks(generated, 1, parameters, megatron=True, pad_multiple=16)
    ((some, _),) = run_ranks(generated, 1, parameters, megatron=True, rows=[1, 4, 6])
    assert_same(plain, padded)
    assert_same({k: v[[1, 4, 6]] if isinstance(v, torch.Tensor) else v for k, v in plain.items()}, some)


def sequence_lengths(pad_multiple):
    """The lengths of the forward passes, and how many positions had logits computed."""
    model = build_model()
    seen, computed = [], []
    model.register_forward_pre_hook(lambda _module, args: seen.append(args[0].shape[1]))
    model.output_layer.register_forward_pre_hook(lambda _module, args: computed.append(args[0].shape[0]))
    prompts, lengths, uniforms = make_prompts(4)
    generate(model, prompts, lengths, uniforms, VOCAB, None, pad_multiple=pad_multiple)
    return seen, computed


def test_every_pass_is_as_short_as_it_can_be_and_computes_one_position():
    assert run_ranks(sequence_lengths, 1, 1, megatron=True) == [([6, 7, 8, 9, 10], [1] * LENGTH)]
    assert run_ranks(sequence_lengths, 1, 4, megatron=True) == [([8, 8, 8, 12, 12], [1] * LENGTH)]


def state(model):
    """Everything that generation must leave alone."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    return (
        [p.detach().clone() for p in model.parameters()],
        [None if p.grad is None else p.grad.clone() for p in model.parameters()],
        [(p.main_grad.clone(), p.requires_grad) for p in model.parameters()],
        [b.clone() for b in unwrap(model).buffers()],
        [module.training for module in model.modules()],
        torch.get_rng_state(),
        torch.cuda.get_rng_state(),
        {name: value.clone() for name, value in get_cuda_rng_tracker().get_states().items()},
        np.random.get_state()[1].copy(),
        random.getstate(),
        torch.is_grad_enabled(),
    )


def equal(one, other):
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return one == other


def trace_of_a_generation(fails):
    """Which parts of the trainer's state a generation changed. The model has dropout and consumes random numbers."""
    model = build_model(wrapped=True, dropout=0.1, moe=True)
    core = unwrap(model)
    model.train()
    core.decoder.layers[1].eval()  # a mixed state, as with frozen layers

    def consume(*_):
        torch.rand(7)
        if fails:
            raise KeyError

    core.decoder.final_layernorm.register_forward_hook(consume)
    for parameter in model.parameters():
        parameter.main_grad.fill_(0.5)
    core.embedding.word_embeddings.weight.grad = torch.ones_like(core.embedding.word_embeddings.weight)
    before = state(model)
    prompts, lengths, uniforms = make_prompts(4)
    try:
        generate(model, prompts, lengths, uniforms, VOCAB, SamplingParameters(head_size=4))
    except KeyError:
        assert fails
    return [i for i, (one, other) in enumerate(zip(before, state(model), strict=True)) if not equal(one, other)]


@pytest.mark.parametrize("fails", [False, True])
def test_the_trainer_is_left_as_found(fails):
    assert run_ranks(trace_of_a_generation, 1, fails, megatron=True) == [[]]


def refusal(change, pp=1, **arguments):
    """The message of the error that a generation raises."""
    model = build_model(pp=pp)
    for name, value in change.items():
        setattr(model.config, name, value)
    prompts, lengths, uniforms = make_prompts(2)
    with pytest.raises(ValueError) as error:  # noqa: PT011 the caller looks at the message
        generate(model, prompts, lengths, uniforms, VOCAB, **arguments)
    return str(error.value)


def test_pipeline_parallelism_is_refused():
    for message in run_ranks(refusal, 2, {}, megatron=True, pp=2):
        assert "--pipeline-model-parallel-size 2" in message


def test_context_parallelism_is_refused():
    (message,) = run_ranks(refusal, 1, {"context_parallel_size": 2}, megatron=True)
    assert "--context-parallel-size 2" in message


def test_delayed_scaling_is_refused():
    (message,) = run_ranks(refusal, 1, {"fp8": "e4m3", "fp8_recipe": "delayed"}, megatron=True)
    assert "--fp8-recipe delayed" in message


def test_a_head_larger_than_the_vocabulary_is_refused():
    (message,) = run_ranks(refusal, 1, {}, megatron=True, parameters=SamplingParameters(head_size=VOCAB + 1))
    assert "--head-size 22" in message


def test_a_sequence_longer_than_the_position_embeddings_is_refused():
    (message,) = run_ranks(refusal, 1, {}, megatron=True, pad_multiple=64)
    assert "--max-position-embeddings" in message
