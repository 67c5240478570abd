"""The embedded sampler: rollouts of a step, their groups, versions and rewards, under every layout."""

import numpy as np
import pytest
import torch
from distributed import run_ranks
from sampling_models import VOCAB, build_model, groups

from megatron_sc.sampling import EmbeddedSampler, SamplerConfig
from megatron_sc.sampling.shards import unwrap

SETTINGS = {
    "task_size": 3,
    "prompts_per_step": 4,
    "samples_per_prompt": 3,
    "head_size": 5,
    "num_draws": 2,
    "sampler_seed": 11,
}
ARRAYS = (
    "prompt_ids",
    "response_ids",
    "response_mask",
    "sampled_logprobs",
    "weight_version",
    "head_ids",
    "head_logprobs",
    "log_tail_mass",
    "draw_ids",
    "draw_logprobs",
)


def make_sampler(**settings):
    return EmbeddedSampler(SamplerConfig(**(SETTINGS | settings)), VOCAB, groups())


def sampled(steps=(0,), layout=None, clean=False, **settings):
    """The rollouts of some steps from one fixed model, as dictionaries."""
    model = build_model(**(layout or {}))
    sampler = make_sampler(**settings)
    return [[vars(rollout) for rollout in sampler.sample(model, step, clean)] for step in steps]


def assert_same(one, other, atol=2e-5):
    """Two lists of rollouts are the same up to rounding."""
    assert len(one) == len(other)
    for left, right in zip(one, other, strict=True):
        for name, value in left.items():
            if name in ARRAYS and value is not None and value.dtype == np.float32:
                assert np.allclose(value, right[name], atol=atol), name
            elif name in ARRAYS:
                assert np.array_equal(value, right[name]), name
            else:
                assert value == right[name], name


def test_rollouts_of_a_step():
    ((first, second),) = run_ranks(sampled, 1, (0, 1), megatron=True, sampler="gaussian")
    assert len(first) == len(second) == 12
    assert [rollout["group_id"] for rollout in first + second] == [i // 3 for i in range(24)]
    for step, rollouts in enumerate((first, second)):
        for rollout in rollouts:
            prompt, response = rollout["prompt_ids"], rollout["response_ids"]
            assert prompt.dtype == response.dtype == rollout["weight_version"].dtype == np.int32
            assert response.shape == (3,)
            assert rollout["head_ids"].shape == rollout["head_logprobs"].shape == (3, 5)
            assert rollout["draw_ids"].shape == rollout["draw_logprobs"].shape == (3, 2)
            assert rollout["log_tail_mass"].shape == (3,)
            assert (rollout["weight_version"] == step).all()
            assert rollout["response_mask"].all()
            accuracy = np.mean(prompt[:3][::-1] == response)
            assert rollout["metadata"] == {"accuracy": pytest.approx(accuracy), "correct": accuracy == 1}
            assert rollout["reward"] == pytest.approx(accuracy)
    prompts = {tuple(rollout["prompt_ids"]) for rollout in first + second}
    assert len(prompts) == 8
    assert len({tuple(rollout["response_ids"]) for rollout in first[:3]}) > 1  # samples of one prompt differ


def sampled_twice(**settings):
    """A step sampled after others, and by a new sampler: as after a resume."""
    model = build_model()
    sampler = make_sampler(**settings)
    for step in range(3):
        before = sampler.sample(model, step)
    return [[vars(r) for r in rollouts] for rollouts in (before, make_sampler(**settings).sample(model, 2))]


@pytest.mark.parametrize("kind", ["trainer", "gaussian", "int8"])
def test_a_resumed_run_samples_the_same_rollouts(kind):
    ((before, after),) = run_ranks(sampled_twice, 1, megatron=True, sampler=kind)
    assert_same(before, after, atol=0)


@pytest.mark.parametrize("kind", ["gaussian", "int4", "trainer"])
@pytest.mark.parametrize(
    ("layout", "ranks"),
    [({}, 2), ({"tp": 2}, 2), ({"ep": 2, "moe": True}, 2), ({"tp": 2, "ep": 2, "moe": True}, 4)],
    ids=["dp2", "tp2", "ep2", "tp2-dp2-ep2"],
)
def test_rollouts_do_not_depend_on_the_layout(layout, ranks, kind):
    if kind != "gaussian" and ranks == 4:
        kind = "fp8"
    single = {key: value for key, value in layout.items() if key not in ("tp", "ep")}
    (((alone),),) = run_ranks(sampled, 1, megatron=True, layout=single, sampler=kind)
    parallel = [steps[0] for steps in run_ranks(sampled, ranks, megatron=True, layout=layout, sampler=kind)]
    tp = layout.get("tp", 1)
    for rank, rollouts in enumerate(parallel):
        assert_same(rollouts, parallel[rank - rank % tp], atol=0)
    assert_same(alone, [rollout for rollouts in parallel[::tp] for rollout in rollouts])


def test_the_distorted_sampler_differs_from_the_trainer():
    (((trainer),),) = run_ranks(sampled, 1, megatron=True)
    for kind in ("gaussian", "int8", "int4", "fp8"):
        (((other),),) = run_ranks(sampled, 1, megatron=True, sampler=kind)
        gap = max(
            np.abs(a["head_logprobs"][0] - b["head_logprobs"][0]).max() for a, b in zip(trainer, other, strict=True)
        )
        assert gap > 1e-4, kind


def stale_run(staleness, steps, change, kind="trainer"):
    """Rollouts of each step while the trainer moves, and those of a fresh sampler at the step they claim."""
    model = build_model()
    sampler = make_sampler(sampler_staleness=staleness, sampler=kind)
    history, rows = [], []
    for step in steps:
        history.append([p.detach().clone() for p in model.parameters()])
        rollouts = [vars(r) for r in sampler.sample(model, step)]
        current = [p.detach().clone() for p in model.parameters()]
        assert all(map(torch.equal, current, history[-1]))
        version = int(rollouts[0]["weight_version"][0])
        for p, value in zip(model.parameters(), history[steps.index(version)], strict=True):
            p.data.copy_(value)
        fresh = [vars(r) for r in make_sampler(sampler=kind).sample(model, step)]
        for p, value in zip(model.parameters(), current, strict=True):
            p.data.copy_(value + change * torch.sin(torch.arange(value.numel()) + step).view_as(value))
        for rollout in fresh:
            rollout["weight_version"] = np.full_like(rollout["weight_version"], version)
        rows.append((version, rollouts, fresh))
    return rows


@pytest.mark.parametrize("kind", ["trainer", "gaussian"])
def test_a_stale_sampler_holds_the_weights_of_its_version(kind):
    (rows,) = run_ranks(stale_run, 1, 3, [0, 1, 2, 3, 4, 6], 0.1, kind, megatron=True)
    assert [version for version, _, _ in rows] == [0, 0, 0, 3, 3, 6]
    for _, rollouts, fresh in rows:
        assert_same(rollouts, fresh, atol=0)


def test_a_stale_sampler_that_resumes_refreshes_and_says_so():
    (rows,) = run_ranks(stale_run, 1, 4, [5, 6, 7, 8], 0.1, megatron=True)
    assert [version for version, _, _ in rows] == [5, 5, 5, 8]


def test_demonstrations_are_correct_answers_without_a_sampler():
    (((rollouts),),) = run_ranks(sampled, 1, megatron=True, sampler="demonstrations", samples_per_prompt=1)
    assert len(rollouts) == 4
    for rollout in rollouts:
        assert rollout["response_ids"].tolist() == rollout["prompt_ids"][:3][::-1].tolist()
        assert rollout["reward"] == 1.0
        assert rollout["metadata"] == {"accuracy": 1.0, "correct": True}
        assert not rollout["sampled_logprobs"].any()
        assert rollout["head_ids"] is rollout["draw_ids"] is None


def clean_and_trainer():
    """Clean rollouts of a distorted sampler, and what a sampler of the trainer's weights draws on clean prompts."""
    model = build_model()
    distorted, trainer = make_sampler(sampler="gaussian", sampler_staleness=5), make_sampler()
    distorted.sample(model, 0)
    unwrap(model).decoder.final_layernorm.weight.data.mul_(1.1)
    pair = [[vars(r) for r in sampler.sample(model, 3, clean=True)] for sampler in (distorted, trainer)]
    return pair, [vars(r) for r in trainer.sample(model, 3)], distorted.evaluate(model, 3), trainer.evaluate(model, 3)


def test_clean_rollouts_come_from_the_trainers_own_weights_on_other_prompts():
    ((pair, training, evaluation, same),) = run_ranks(clean_and_trainer, 1, megatron=True)
    assert_same(*pair, atol=0)
    assert (pair[0][0]["weight_version"] == 3).all()
    seen = {tuple(rollout["prompt_ids"]) for rollout in training}
    assert not seen & {tuple(rollout["prompt_ids"]) for rollout in pair[0]}
    assert evaluation == same
    assert evaluation.count == 12
    assert evaluation.accuracy_sum == pytest.approx(sum(rollout["metadata"]["accuracy"] for rollout in pair[0]))
    assert evaluation.correct == sum(rollout["metadata"]["correct"] for rollout in pair[0])


def greedy_evaluations():
    model = build_model()
    sampler = make_sampler()
    one, again = sampler.evaluate(model, 0, greedy=True), make_sampler().evaluate(model, 0, greedy=True)
    return one, again


def test_greedy_evaluation_has_one_answer_a_prompt():
    ((one, again),) = run_ranks(greedy_evaluations, 1, megatron=True)
    assert one == again
    assert one.count == 4


def sampled_before_the_gather():
    """Rollouts when each rank has updated its own half of the parameters, which --overlap-param-gather gathers late."""
    model = build_model(lazy_gather=True)
    rank = torch.distributed.get_rank()
    hooks = len(model.remove_forward_pre_hook_handles)
    for buffer in model.buffers:
        buffer.param_data.chunk(2)[1 - rank].zero_()
    rollouts = [vars(r) for r in make_sampler(sampler="gaussian").sample(model, 0)]
    expected = build_reference()
    gathered = all(map(torch.equal, unwrap(model).parameters(), expected))
    return rollouts, gathered, hooks, len(model.remove_forward_pre_hook_handles)


def build_reference():
    """The parameters of the same model, before anything happened to them."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    return [parameter.detach() for parameter in build_model().parameters()]


def test_parameters_are_gathered_before_they_are_distorted():
    (((alone),),) = run_ranks(sampled, 1, megatron=True, sampler="gaussian")
    ranks = run_ranks(sampled_before_the_gather, 2, megatron=True)
    assert_same(alone, [rollout for rollouts, *_ in ranks for rollout in rollouts])
    for _, gathered, before, after in ranks:
        assert gathered
        assert before == after > 0


def countdown_rollouts(bias):
    """Countdown rollouts from a model that likes the end token, by ``bias``."""
    model = build_model(tied=False)
    unwrap(model).output_layer.register_forward_hook(
        lambda _module, _args, output: (output[0] + bias * (torch.arange(output[0].shape[-1]) == 19), output[1])
    )
    return [vars(r) for r in make_sampler(task="countdown", task_size=2, reward_mode="signed").sample(model, 0)]


def test_a_response_ends_at_its_end_token():
    (rollouts,) = run_ranks(countdown_rollouts, 1, 2.0, megatron=True)
    lengths = {len(rollout["response_ids"]) for rollout in rollouts}
    assert len(lengths) > 1
    assert len({len(rollout["prompt_ids"]) for rollout in rollouts}) > 1
    for rollout in rollouts:
        ids = rollout["response_ids"].tolist()
        assert 19 not in ids[:-1]
        assert rollout["finish_reason"] == ("stop" if ids[-1] == 19 else "length")
        assert rollout["reward"] == -1.0 or rollout["metadata"]["correct"]
        assert all(len(rollout[name]) == len(ids) for name in ARRAYS if name != "prompt_ids")
    assert {rollout["finish_reason"] for rollout in run_ranks(countdown_rollouts, 1, -99.0, megatron=True)[0]} == {
        "length"
    }


def supports():
    return sampled(sampler_top_p=0.8)


def test_a_truncated_sampler_hands_over_supports():
    (((rollouts),),) = run_ranks(supports, 1, megatron=True)
    for rollout in rollouts:
        assert rollout["head_is_support"]
        assert rollout["log_tail_mass"] is None
        assert (rollout["head_ids"] == rollout["response_ids"][:, None]).any(1).all()
        assert np.allclose(np.exp(rollout["head_logprobs"]).sum(1), 1, atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "vocab", "message"),
    [
        ({"head_size": 33}, 32, "--head-size 33 exceeds --true-vocab-size 32"),
        ({"head_size": 2}, 8, "--task reverse has 11 tokens but --true-vocab-size is 8"),
    ],
)
def test_settings_that_do_not_fit_the_vocabulary_are_refused(settings, vocab, message):
    with pytest.raises(ValueError, match=message):
        EmbeddedSampler(SamplerConfig(**settings), vocab)


def construct(layout, **settings):
    build_model(**layout)
    with pytest.raises(ValueError) as error:  # noqa: PT011 the caller looks at the message
        make_sampler(**settings)
    return str(error.value)


def test_layouts_that_do_not_fit_are_refused():
    for message in run_ranks(construct, 2, {}, megatron=True, prompts_per_step=3):
        assert message == "--prompts-per-step 3 does not divide over 2 data-parallel ranks"
    for message in run_ranks(construct, 2, {"pp": 2}, megatron=True):
        assert "--pipeline-model-parallel-size 2" in message
