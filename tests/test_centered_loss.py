"""`centered_loss` on one rank: golden values, gradients, identities, memory and errors."""

import dataclasses
import gc
import itertools
import math
from unittest import mock

import pytest
import torch
from golden import ESTIMATORS as GOLDEN_ESTIMATORS
from golden import KINDS, golden_cases
from hypothesis import assume, given
from hypothesis import strategies as st
from problems import ESTIMATORS, PROPERTY, WEIGHTS, Problem, as_ragged, make_problem

from megatron_sc import VocabShard, centered_loss
from megatron_sc.objective import (
    Draws,
    FullVocabulary,
    ImportanceSampling,
    Support,
    TopKHead,
    TruncatedImportanceSampling,
    Uniform,
)
from megatron_sc.objective.reference import reference_position
from megatron_sc.vocab_parallel import problem as problem_module

NAN, INF = math.nan, math.inf


def run_case(case, dtype):
    """Loss `[]` and gradient `[len(z)]` of a golden case."""
    logits = torch.tensor([case.z], dtype=torch.float64).to(dtype).requires_grad_()
    scalars = torch.float64 if dtype == torch.float64 else torch.float32
    out = centered_loss(
        logits,
        torch.tensor([case.y]),
        torch.tensor([case.A], dtype=scalars),
        case.sampler(scalars),
        torch.tensor([case.q_y], dtype=torch.float64).log().to(scalars),
        case.weight,
        case.T,
        vocab=VocabShard(0, len(case.z), case.valid),
    )
    out.loss.sum().backward()
    return out.loss[0].detach(), logits.grad[0]


def unit_in_the_last_place(value: float, dtype: torch.dtype) -> float:
    info = torch.finfo(dtype)
    return info.eps * max(2.0 ** math.floor(math.log2(value)), info.smallest_normal) if value > 0 else 0.0


# Against the golden cases and the reference --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("estimator", GOLDEN_ESTIMATORS)
def test_golden_cases(estimator, kind):
    for case in golden_cases(estimator, kind):
        for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 1e-5)):
            loss, gradient = run_case(case, dtype)
            assert loss.dtype == gradient.dtype == dtype
            assert case.gradient_error(gradient) < tolerance, (str(case), dtype)
            assert case.loss_error(loss) < tolerance, (str(case), dtype)
            assert (gradient[case.valid :] == 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("estimator", GOLDEN_ESTIMATORS)
def test_half_precision_gradients_are_rounded_once(estimator, dtype):
    """Within one unit in the last place of the row's largest entry, from the same rounded logits."""
    for case in golden_cases(estimator):
        rounded = torch.tensor(case.z, dtype=torch.float64).to(dtype).double()[: case.valid]
        exact = reference_position(
            rounded, case.y, case.A, case.sampler(), sampled_logprob=math.log(case.q_y), weight=case.weight,
            temperature=case.T,
        ).gradient  # fmt: skip
        _, gradient = run_case(case, dtype)
        assert gradient.dtype == dtype
        error = float((gradient[: case.valid].double() - exact).abs().max())
        # Where the exact gradient cancels to nothing, what is left is the rounding of float32.
        cancelled = 2e-7 * abs(case.A) * max(1.0, case.expected["w"]) / case.T
        assert error <= max(unit_in_the_last_place(float(exact.abs().max()), dtype), cancelled), str(case)


@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_equals_the_dense_reference(estimator, weight):
    for seed in range(3):
        problem = make_problem(estimator, weight, rows=8, seed=seed, temperature=True)
        out, gradient = problem.run()
        losses, gradients = problem.references()
        torch.testing.assert_close(out.loss.detach(), losses, rtol=1e-11, atol=1e-11)
        torch.testing.assert_close(gradient, gradients, rtol=1e-11, atol=1e-11)


def logged_coefficients(problem: Problem, row: int) -> torch.Tensor:
    """`[V]` c_v of Eq. (6) and (8), weighted as in (14): for a head, C_v - alpha p_v on the head and 0 on the tail."""
    weighted = problem.reference(row).weighted_sampler
    if not isinstance(problem.sampler, TopKHead):
        return weighted
    p = torch.softmax(problem.logits[row] / problem.temperature[row], dim=0)
    tail = torch.ones_like(p, dtype=torch.bool)
    tail[problem.sampler.ids[row]] = False
    alpha = weighted[tail].sum() / p[tail].sum() if tail.any() else 0.0
    return torch.where(tail, 0.0, weighted - alpha * p)


def trainer_logprobs(problem: Problem, logits: torch.Tensor, row: int) -> torch.Tensor:
    """`[V]` log p of the logits `[V]`, normalized on the support where there is one."""
    x = logits / problem.temperature[row]
    if isinstance(problem.sampler, Support):
        outside = torch.ones_like(x, dtype=torch.bool)
        outside[problem.sampler.ids[row]] = False
        x = x.masked_fill(outside, -INF)
    return torch.log_softmax(x, dim=0)


@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_gradient_is_the_finite_difference_of_the_loss_with_frozen_coefficients(estimator, weight):
    problem = make_problem(estimator, weight, rows=3, vocab=7, k=3, seed=4, temperature=True)
    _, gradient = problem.run()
    step = 1e-5
    for row in range(problem.rows):
        c, w, y = logged_coefficients(problem, row), problem.reference(row).weight, problem.sampled_ids[row]

        def loss(z, row=row, c=c, w=w, y=y):
            logp = trainer_logprobs(problem, z, row)
            return -problem.advantages[row] * (w * logp[y] - torch.where(c != 0, c * logp, 0.0).sum())

        for u in range(7):
            at = torch.zeros(7, dtype=torch.float64)
            at[u] = step
            z = problem.logits[row]
            slope = (loss(z + at) - loss(z - at)) / (2 * step)
            assert float(gradient[row, u]) == pytest.approx(float(slope), rel=1e-7, abs=1e-8)


def test_upstream_gradients_multiply_row_by_row():
    problem = make_problem("head", "tis", rows=4)
    logits = problem.logits.clone().requires_grad_()
    out = centered_loss(
        logits, problem.sampled_ids, problem.advantages, problem.sampler, problem.sampled_logprobs, problem.weight
    )
    factors = torch.tensor([0.5, -2.0, 0.0, 1e3], dtype=torch.float64)
    (gradient,) = torch.autograd.grad((out.loss * factors).sum(), logits)
    torch.testing.assert_close(gradient, problem.run()[1] * factors.unsqueeze(1))


def test_metrics_carry_no_gradient():
    out, _ = make_problem("head", "tis").run()
    assert out.loss.requires_grad
    assert not any(metric.requires_grad for metric in out.metrics.values())


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_metrics(estimator):
    problem = make_problem(estimator, "tis", rows=6, k=5, temperature=True)
    out, _ = problem.run()
    for row in range(problem.rows):
        got = {name: float(values[row]) for name, values in out.metrics.items()}
        logp = trainer_logprobs(problem, problem.logits[row], row)
        p, y = logp.exp(), int(problem.sampled_ids[row])
        log_ratio = float(logp[y] - problem.sampled_logprobs[row])
        expected = {
            "logprob": float(logp[y]),
            "log_ratio": log_ratio,
            "log_ratio_abs": abs(log_ratio),
            "ratio_kl": math.exp(log_ratio) - 1 - log_ratio,
            "importance_weight": min(math.exp(log_ratio), 1.3),
            "entropy": float(-torch.where(p > 0, p * logp, 0.0).sum()),
        }
        if estimator != "none":
            expected["coefficient_l1"] = float(logged_coefficients(problem, row).abs().sum())
            if estimator != "full":
                expected["sampled_in_recorded"] = float(y in problem.sampler.ids[row].tolist())
            if estimator == "draws":
                j = problem.sampler.ids[row]
                expected["sampler_kl"] = float((problem.sampler.logprobs[row] - logp[j]).mean())
            else:
                model = sampler_model(problem, row)
                expected["sampler_kl"] = float(torch.where(model > 0, model * (model.log() - logp), 0.0).sum())
                expected["drift_l1"] = float((model - p).abs().sum())
        if estimator in ("head", "recorded tail"):
            head = problem.sampler.ids[row]
            tail_p, tail_q = 1 - float(p[head].sum()), 1 - float(problem.q[row, head].sum())
            expected |= {
                "head_mass_sampler": 1 - tail_q,
                "head_mass_trainer": 1 - tail_p,
                "tail_mass_sampler": tail_q,
                "tail_mass_trainer": tail_p,
                "drift_l1_tail": abs(tail_q - tail_p),
                "tail_ratio_above_4": float(tail_q > 4 * tail_p),
            }
        assert got == pytest.approx(expected, rel=1e-9, abs=1e-11)


def test_tail_ratio_above_4_counts_collapsing_tails():
    z = torch.tensor([[0.0, 0.0, math.log(0.1), math.log(0.1)]], dtype=torch.float64)  # tail_p = 0.2 / 2.2 = 0.0909
    for tail_q, expected in ((0.36, 0.0), (0.37, 1.0)):
        head = TopKHead(torch.tensor([[0, 1]]), torch.tensor([[0.3, 0.7 - tail_q]], dtype=torch.float64).log())
        out = centered_loss(z, torch.tensor([0]), torch.ones(1), head)
        assert out.metrics["tail_ratio_above_4"].item() == expected


def test_without_the_entropy_metric_nothing_else_changes():
    problem = make_problem("head", "tis")
    (with_it, gradient), (without, same_gradient) = problem.run(), problem.run(entropy_metric=False)
    assert set(with_it.metrics) - set(without.metrics) == {"entropy"}
    assert list(without.metrics) == [name for name in with_it.metrics if name != "entropy"]
    torch.testing.assert_close(with_it.loss, without.loss, rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(gradient, same_gradient, rtol=1e-14, atol=1e-14)


# The optional terms --------------------------------------------------------------------------------------------------


def sampler_model(problem: Problem, row: int) -> torch.Tensor:
    """`[V]` q_hat: q on the record, the trainer's rescaled tail elsewhere (Eq. 7)."""
    q = problem.q[row]
    if not isinstance(problem.sampler, TopKHead):
        return q
    p = torch.softmax(problem.logits[row] / problem.temperature[row], dim=0)
    tail = torch.ones_like(p, dtype=torch.bool)
    tail[problem.sampler.ids[row]] = False
    return torch.where(tail, q[tail].sum() * p / p[tail].sum(), q)


@pytest.mark.parametrize("advantages", [0.0, 1.7])
@pytest.mark.parametrize("center", [True, False])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_sampler_kl_and_entropy_terms(estimator, center, advantages):
    problem = make_problem(estimator, "tis", rows=4, k=5, seed=2, temperature=True)
    problem = problem.replace(advantages=torch.full_like(problem.advantages, advantages))
    for kl_coef, entropy_coef in ((0.3, 0.0), (0.0, 0.2), (0.3, 0.2)):
        out, gradient = problem.run(sampler_kl_coef=kl_coef, entropy_coef=entropy_coef, center=center)
        for row in range(problem.rows):
            z = problem.logits[row].clone().requires_grad_()
            logp = trainer_logprobs(problem, z, row)
            p, safe = logp.exp(), torch.where(logp > -INF, logp, 0.0)
            if estimator == "none":
                kl = problem.sampled_logprobs[row] - logp[problem.sampled_ids[row]]
            elif estimator == "draws":
                kl = (problem.sampler.logprobs[row] - logp[problem.sampler.ids[row]]).mean()
            else:
                model = sampler_model(problem, row)
                kl = torch.where(model > 0, model * (model.log() - safe), 0.0).sum()
            entropy = -(p * safe).sum()
            w, c = problem.reference(row).weight, logged_coefficients(problem, row) * center
            policy = -advantages * (w * logp[problem.sampled_ids[row]] - (c * safe).sum())
            loss = policy + kl_coef * kl - entropy_coef * entropy
            (expected,) = torch.autograd.grad(loss, z)
            assert out.loss[row].item() == pytest.approx(loss.item(), rel=1e-11, abs=1e-11)
            torch.testing.assert_close(gradient[row], expected, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("estimator", ["head", "draws", "full"])
def test_without_centering_only_the_policy_gradient_is_left(estimator):
    problem = make_problem(estimator, "tis", rows=4, temperature=True)
    out, gradient = problem.run(center=False)
    plain, plain_gradient = problem.run(sampler=None)
    torch.testing.assert_close(out.loss, plain.loss, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient, plain_gradient, rtol=1e-12, atol=1e-12)
    assert "sampler_kl" in out.metrics, "the sampler's distribution is still measured"
    assert float(out.metrics["coefficient_l1"].abs().max()) == 0
    measured = problem.run()[0].metrics["sampler_kl"]
    torch.testing.assert_close(out.metrics["sampler_kl"], measured, rtol=1e-12, atol=1e-12)


# Identities ----------------------------------------------------------------------------------------------------------


@st.composite
def problems(draw, estimators=ESTIMATORS, weights=tuple(WEIGHTS), **fixed):
    vocab = draw(st.integers(2, 24))
    arguments = {
        "rows": draw(st.integers(1, 5)),
        "vocab": vocab,
        "k": draw(st.one_of(st.just(1), st.just(vocab), st.integers(1, vocab))),
        "seed": draw(st.integers(0, 10**6)),
        "temperature": draw(st.booleans()),
        "scale": draw(st.sampled_from([0.1, 2.0, 8.0])),
    } | fixed
    return make_problem(draw(st.sampled_from(estimators)), draw(st.sampled_from(weights)), **arguments)


def has_a_tail_of_its_own(problem: Problem) -> bool:
    """Whether log(1 - Q) does not hang on how Q was rounded: it was recorded, there is none, or it is large."""
    head = problem.sampler
    if not isinstance(head, TopKHead) or head.log_tail_mass is not None or head.ids.shape[1] == problem.q.shape[1]:
        return True
    mass = torch.where(head.ids >= 0, head.logprobs.exp(), 0.0).sum(dim=1)
    return bool((1 - mass > 1e-3).all())


def gradient_unit(problem: Problem, out) -> torch.Tensor:
    """`[n]` |A| max(1, w) / T: the size that errors of the gradient are measured in."""
    weight = out.metrics["importance_weight"].double().clamp(min=1.0)
    return problem.advantages.abs() * weight / problem.temperature


@PROPERTY
@given(problems())
def test_gradients_sum_to_zero(problem):
    out, gradient = problem.run()
    assert (gradient.sum(dim=1).abs() <= 1e-13 * gradient_unit(problem, out)).all()


def every_token(problem: Problem, advantage: float) -> tuple[Problem, torch.Tensor]:
    """The first position of a problem once for every token that its sampler can sample, and their probabilities."""
    tokens = torch.nonzero(problem.q[0] > 0).squeeze(1)
    n = len(tokens)
    sampler = problem.sampler
    if isinstance(sampler, FullVocabulary):
        sampler = FullVocabulary(sampler.logprobs[:1].expand(n, -1))
    elif isinstance(sampler, Support | Draws):
        sampler = type(sampler)(sampler.ids[:1].expand(n, -1), sampler.logprobs[:1].expand(n, -1))
    elif isinstance(sampler, TopKHead):
        tail = None if sampler.log_tail_mass is None else sampler.log_tail_mass[:1].expand(n)
        sampler = TopKHead(sampler.ids[:1].expand(n, -1), sampler.logprobs[:1].expand(n, -1), tail)
    return Problem(
        logits=problem.logits[:1].expand(n, -1),
        sampled_ids=tokens,
        advantages=torch.full((n,), advantage, dtype=torch.float64),
        sampler=sampler,
        sampled_logprobs=problem.q[0, tokens].log(),
        weight=problem.weight,
        temperature=problem.temperature[:1].expand(n),
        q=problem.q[:1].expand(n, -1),
    ), problem.q[0, tokens]


@PROPERTY
@given(problems(("head", "recorded tail", "support", "full"), exact=True), st.sampled_from([1.0, -0.7]))
def test_expected_gradient_of_a_constant_advantage_is_zero(problem, advantage):
    every, q = every_token(problem, advantage)
    _, gradient = every.run()
    largest = (q.unsqueeze(1) * gradient.abs()).max()
    assert (q @ gradient).abs().max() <= 1e-12 * max(float(largest), 1.0)


@PROPERTY
@given(problems(("draws",), vocab=6, k=1), st.sampled_from([1.0, -0.7]))
def test_expected_gradient_over_token_and_draw_is_zero(problem, advantage):
    """Centering by a draw is unbiased: averaged over the sampled token and over the draw nothing is left."""
    every, q = every_token(problem, advantage)
    total = torch.zeros(6, dtype=torch.float64)
    for drawn in range(6):
        logprob = problem.q[0, drawn].log().expand(len(q), 1)
        _, gradient = every.run(sampler=Draws(torch.full((len(q), 1), drawn), logprob))
        total += problem.q[0, drawn] * (q @ gradient)
    assert total.abs().max() <= 1e-12


@PROPERTY
@given(problems(("head", "recorded tail", "support", "draws", "full")), st.sampled_from([1.0, -0.7]))
def test_another_sampled_token_has_the_same_coefficients(problem, advantage):
    """grad(y) = -(A/T) ( w_y (e_y - p) - correction ): the correction depends on the prefix only."""
    every, _ = every_token(problem, advantage)
    out, gradient = every.run()
    score = torch.nn.functional.one_hot(every.sampled_ids, gradient.shape[1]) - torch.stack(
        [trainer_logprobs(problem, problem.logits[0], 0).exp()] * every.rows
    )
    unit = every.advantages / every.temperature
    correction = gradient / unit.unsqueeze(1) + out.metrics["importance_weight"].unsqueeze(1) * score
    bound = 1e-12 * out.metrics["importance_weight"].max().clamp(min=1.0)
    assert (correction - correction[:1]).abs().max() <= bound


@PROPERTY
@given(problems(("head", "recorded tail", "support", "full"), mismatch=0.0))
def test_on_policy_the_correction_is_zero(problem):
    out, gradient = problem.run()
    for row in range(problem.rows):
        score = -trainer_logprobs(problem, problem.logits[row], row).exp()
        score[problem.sampled_ids[row]] += 1
        expected = -problem.advantages[row] / problem.temperature[row] * score
        torch.testing.assert_close(gradient[row], expected, rtol=1e-12, atol=1e-12)
    if isinstance(problem.sampler, TopKHead) and problem.sampler.ids.shape[1] < problem.q.shape[1]:
        assert float(out.metrics["coefficient_l1"].max()) <= 1e-12, "where there is a tail c itself is zero"


@PROPERTY
@given(problems(), st.randoms(use_true_random=False))
def test_the_order_of_the_record_does_not_matter(problem, random):
    if not isinstance(problem.sampler, TopKHead | Support | Draws):
        return
    assume(has_a_tail_of_its_own(problem))
    order = list(range(problem.sampler.ids.shape[1]))
    random.shuffle(order)
    shuffled = dataclasses.replace(
        problem.sampler, ids=problem.sampler.ids[:, order], logprobs=problem.sampler.logprobs[:, order]
    )
    assert_same(problem, problem.run(sampler=shuffled))


def test_a_tail_mass_of_nan_was_not_recorded_in_that_row():
    problem = make_problem("recorded tail", "tis", rows=3)
    head, known = problem.sampler, torch.tensor([False, True, False])
    # What was recorded need not be 1 - Q.
    head = TopKHead(head.ids, head.logprobs, torch.where(known, head.log_tail_mass - 0.3, NAN))
    losses, gradients = problem.replace(sampler=head).references()
    out, gradient = problem.run(sampler=head)
    torch.testing.assert_close(out.loss.detach(), losses, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(gradient, gradients, rtol=1e-11, atol=1e-12)
    unrecorded, _ = problem.run(sampler=TopKHead(head.ids, head.logprobs))
    assert torch.equal(out.loss == unrecorded.loss, ~known)


@PROPERTY
@given(problems(), st.integers(1, 6), st.sampled_from([1, 5, 20]), st.booleans())
def test_chunk_and_block_sizes_do_not_matter(problem, chunk_rows, block_entries, reuse):
    """Chunks bound the workspace, blocks what is allocated per recorded token."""
    with mock.patch.object(problem_module, "BLOCK_ENTRIES", block_entries):
        assert_same(problem, problem.run(chunk_rows=chunk_rows, reuse_logits=reuse))


@PROPERTY
@given(problems(("head", "recorded tail", "support")), st.integers(1, 3), st.integers(1, 3))
def test_ragged_rows_are_rectangular_rows(problem, chunk_rows, shorten):
    """Rows keep different numbers of entries; the rest of the rectangle is padding that holds anything."""
    kept = torch.zeros_like(problem.sampler.ids, dtype=torch.bool)
    for row in range(problem.rows):
        # A support keeps all its entries: dropping one would change the sampler.
        kept[row, : (None if isinstance(problem.sampler, Support) else (row * shorten) % (kept.shape[1] + 1))] = True
    sampler = dataclasses.replace(
        problem.sampler,
        ids=torch.where(kept, problem.sampler.ids, -1),
        logprobs=torch.where(kept, problem.sampler.logprobs, NAN),
    )
    if isinstance(sampler, TopKHead) and sampler.log_tail_mass is not None:
        in_head = torch.zeros_like(problem.q).scatter_reduce(1, sampler.ids.clamp(min=0), kept.double(), "amax")
        sampler = dataclasses.replace(sampler, log_tail_mass=(problem.q * (1 - in_head)).sum(1).log())
    rectangular = problem.replace(sampler=sampler)
    assume(has_a_tail_of_its_own(rectangular))
    assert_same(rectangular, rectangular.run(sampler=as_ragged(sampler), chunk_rows=chunk_rows))


@PROPERTY
@given(problems(), st.integers(1, 5), st.sampled_from([0.0, 50.0, NAN, INF]))
def test_padding_of_the_vocabulary_does_not_matter(problem, columns, value):
    n, vocab = problem.logits.shape
    padded = torch.cat([problem.logits, torch.full((n, columns), value, dtype=torch.float64)], dim=1)
    out, gradient = problem.run(logits=padded, vocab=VocabShard(0, vocab + columns, vocab))
    assert (gradient[:, vocab:] == 0).all()
    assert_same(problem, (out, gradient[:, :vocab]))


def assert_same(problem: Problem, other, rows=slice(None)):
    """Loss, gradient and metrics equal those of the problem up to rounding."""
    (out, gradient), (got, got_gradient) = problem.run(), other
    unit = gradient_unit(problem, out)
    terms = unit * problem.temperature * (1 + out.loss.detach().abs() + out.metrics["logprob"].abs())
    if "coefficient_l1" in out.metrics:
        terms = terms * (1 + out.metrics["coefficient_l1"]) * (1 + problem.logits.abs().amax(dim=1))
    assert ((got.loss[rows] - out.loss).abs() <= 1e-12 * terms).all()
    assert ((got_gradient[rows] - gradient).abs() <= 1e-12 * unit.unsqueeze(1)).all()
    assert list(got.metrics) == list(out.metrics)
    for name, values in out.metrics.items():
        torch.testing.assert_close(got.metrics[name][rows], values, rtol=1e-9, atol=1e-10, msg=name)


def with_garbage_rows(problem: Problem) -> tuple[dict, torch.Tensor]:
    """Every row followed by a masked row that holds nothing but garbage; arguments for `Problem.run`, and the mask."""
    n = problem.rows
    mask = torch.tensor([True, False]).repeat(n)

    def interleave(values, garbage):
        result = torch.full((2 * n, *values.shape[1:]), garbage, dtype=values.dtype)
        result[::2] = values
        return result

    sampler = problem.sampler
    if isinstance(sampler, FullVocabulary):
        sampler = FullVocabulary(interleave(sampler.logprobs, NAN))
    elif isinstance(sampler, TopKHead):
        tail = None if sampler.log_tail_mass is None else interleave(sampler.log_tail_mass, INF)
        sampler = TopKHead(interleave(sampler.ids, 10**6), interleave(sampler.logprobs, NAN), tail)
    elif sampler is not None:
        sampler = type(sampler)(interleave(sampler.ids, 10**6), interleave(sampler.logprobs, 3.0))
    return {
        "logits": interleave(problem.logits, NAN),
        "sampled_ids": interleave(problem.sampled_ids, -100),
        "advantages": interleave(problem.advantages, INF),
        "sampler": sampler,
        "sampled_logprobs": interleave(problem.sampled_logprobs, NAN),
        "temperature": interleave(problem.temperature, 0.0),
        "mask": mask,
    }, mask


@PROPERTY
@given(problems(), st.sampled_from([{}, {"sampler_kl_coef": 0.1}, {"entropy_coef": 0.1}]), st.booleans())
def test_masked_rows_have_no_effect_whatever_they_hold(problem, terms, reuse):
    arguments, mask = with_garbage_rows(problem)
    out, gradient = problem.run(**arguments, **terms, reuse_logits=reuse)
    assert (gradient[~mask] == 0).all(), "exactly zero, not NaN"
    assert (out.loss[~mask] == 0).all()
    assert all((metric[~mask] == 0).all() for metric in out.metrics.values())
    if not terms:
        assert_same(problem, (out, gradient), rows=mask)
    else:
        expected, expected_gradient = problem.run(**terms)
        torch.testing.assert_close(out.loss[mask], expected.loss, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(gradient[mask], expected_gradient, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("terms", [{}, {"sampler_kl_coef": 0.1}, {"entropy_coef": 0.1}], ids=["", "kl", "entropy"])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_masked_rows_of_reused_storage_have_no_gradient(estimator, terms, dtype):
    arguments, mask = with_garbage_rows(make_problem(estimator, "tis", temperature=True))
    _, gradient = make_problem(estimator, "tis").run(dtype, **arguments, **terms, reuse_logits=True)
    assert (gradient[~mask] == 0).all(), "exactly zero, not NaN"
    assert torch.isfinite(gradient).all()


def test_an_advantage_of_zero_is_an_ordinary_row():
    problem = make_problem("head", "tis", rows=2).replace(advantages=torch.zeros(2, dtype=torch.float64))
    out, gradient = problem.run()
    assert (gradient == 0).all()
    assert (out.loss == 0).all()
    assert (out.metrics["entropy"] > 0).all()


@pytest.mark.parametrize("count", [1, 3, 5, 6, 7, 8, 10, 12, 24])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_plain_draws_leave_every_other_column_exactly_zero(count, dtype):
    """K times 1/K is not 1 in floating point: ten times a float32 0.1 is 1.0000001."""
    problem = make_problem("draws", "none", rows=6, vocab=40, k=count, seed=count)
    _, gradient = problem.run(dtype)
    touched = torch.zeros(6, 40, dtype=torch.bool).scatter(1, problem.sampler.ids, True)
    touched = touched.scatter(1, problem.sampled_ids.unsqueeze(1), True)
    assert (gradient[~touched] == 0).all()


# Numerical limits ----------------------------------------------------------------------------------------------------

LARGE = 151936


def large_problem(estimator: str, weight: str, seed: int = 0) -> Problem:
    return make_problem(estimator, weight, rows=4, vocab=LARGE, k=64, seed=seed, temperature=True, scale=3.0)


def in_float32(problem: Problem) -> Problem:
    """The same problem after its inputs were rounded to float32, so that float64 can judge the arithmetic alone."""

    def rounded(value):
        return value.float().double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    sampler = problem.sampler
    if sampler is not None:
        fields = {f.name: rounded(getattr(sampler, f.name)) for f in dataclasses.fields(sampler)}
        sampler = type(sampler)(**fields)
    fields = {f.name: rounded(getattr(problem, f.name)) for f in dataclasses.fields(problem)}
    return Problem(**fields | {"sampler": sampler})


def assert_float32_accuracy(problem: Problem, **options) -> None:
    """The bounds of a production vocabulary: 4e-6 of the gradient's unit and 2e-6 of the loss's terms."""
    problem = in_float32(problem)
    out, gradient = problem.run(torch.float32, **options)
    for row in range(problem.rows):
        exact = problem.reference(row)
        size = abs(float(problem.advantages[row]))
        unit = size * max(1.0, float(exact.weight)) / float(problem.temperature[row])
        assert float((gradient[row].double() - exact.gradient).abs().max()) <= 4e-6 * unit, row
        c, logp = logged_coefficients(problem, row), trainer_logprobs(problem, problem.logits[row], row)
        terms = 1 + float(exact.weight * logp[problem.sampled_ids[row]].abs())
        terms += float(torch.where(c != 0, c * logp, 0.0).abs().sum())
        assert abs(float(out.loss[row]) - float(exact.loss)) <= 2e-6 * size * terms, row


@pytest.mark.parametrize(
    ("estimator", "weight"),
    [("head", "none"), ("recorded tail", "tis"), ("head", "mis"), ("support", "is"), ("draws", "tis"), ("full", "ppo"),
     ("none", "tis")],
)  # fmt: skip
def test_float32_accuracy_at_a_large_vocabulary(estimator, weight):
    assert_float32_accuracy(large_problem(estimator, weight))


def test_half_precision_at_a_large_vocabulary():
    """bfloat16 log-softmax over 151936 entries would be off by 0.125."""
    problem = large_problem("head", "tis", seed=1)
    rounded = problem.logits.bfloat16()
    out, gradient = problem.run(torch.bfloat16)
    losses, gradients = problem.references(rounded.double())
    torch.testing.assert_close(out.loss.double(), losses, rtol=1e-5, atol=1e-5)
    for row in range(problem.rows):
        bound = unit_in_the_last_place(float(gradients[row].abs().max()), torch.bfloat16)
        assert float((gradient[row].double() - gradients[row]).abs().max()) <= bound


def test_logits_far_from_zero_lose_no_digits():
    """Logits near 4096 are exact in float32; only what is left after subtracting the maximum may round."""
    problem = make_problem("head", "tis", rows=4, vocab=50, k=5)
    snapped = (problem.logits * 1024).round() / 1024
    near, near_gradient = problem.run(torch.float32, logits=snapped)
    far, far_gradient = problem.run(torch.float32, logits=snapped + 4096)
    torch.testing.assert_close(near.loss, far.loss, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(near_gradient, far_gradient, rtol=1e-6, atol=1e-7)


def hard_head(tail_p: float, tail_q: float, sampled: str, recorded: bool, vocab: int = 2000, k: int = 8) -> Problem:
    """One position whose tail has mass `tail_p` under the trainer and `tail_q` under the sampler."""
    random = torch.Generator().manual_seed(3)
    head = torch.softmax(torch.randn(k, generator=random, dtype=torch.float64), 0)
    tail = torch.softmax(torch.randn(vocab - k, generator=random, dtype=torch.float64), 0)
    logits = torch.cat([head.log() + math.log1p(-tail_p), tail.log() + math.log(tail_p)])
    q_head = torch.softmax(torch.randn(k, generator=random, dtype=torch.float64), 0) * (1 - tail_q)
    y = 2 if sampled == "head" else 100
    q = torch.cat([q_head, tail * tail_q])
    log_tail = torch.tensor([tail_q], dtype=torch.float64).log() if recorded else None
    return Problem(
        logits=logits.unsqueeze(0),
        sampled_ids=torch.tensor([y]),
        advantages=torch.tensor([-1.3], dtype=torch.float64),
        sampler=TopKHead(torch.arange(k).unsqueeze(0), q_head.log().unsqueeze(0), log_tail),
        sampled_logprobs=q[y].log().reshape(1),
        weight=WEIGHTS["none"],
        temperature=torch.ones(1, dtype=torch.float64),
        q=q.unsqueeze(0),
    )


@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("sampled", ["head", "tail"])
@pytest.mark.parametrize(
    ("tail_p", "tail_q", "recorded"),
    [
        (1e-12, 0.5, True),  # the trainer's tail is gone, the sampler's is not
        (1e-12, 0.5, False),
        (1e-9, 1e-9, True),  # the head rounds to 1 under both
        (1e-12, 1e-3, True),
        (0.5, 1e-12, True),
        (1e-30, 1e-20, True),
    ],
)
def test_tails_of_any_size(tail_p, tail_q, recorded, sampled, weight):
    problem = in_float32(hard_head(tail_p, tail_q, sampled, recorded).replace(weight=WEIGHTS[weight]))
    _, gradient = problem.run(torch.float32)
    exact = problem.reference(0)
    unit = 1.3 * max(1.0, float(exact.weight))
    error = (gradient[0].double() - exact.gradient).abs().max()
    assert float(error) <= 4e-6 * unit
    out, gradient = problem.run(torch.float64)
    assert torch.isfinite(out.loss).all()
    assert float((gradient[0] - exact.gradient).abs().max()) <= 1e-12 * unit


@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("k", [1, 40])
def test_heads_of_one_token_and_of_the_whole_vocabulary(k, weight):
    for estimator in ("head", "recorded tail", "support"):
        problem = make_problem(estimator, weight, rows=6, vocab=40, k=k, seed=5)
        losses, gradients = problem.references()
        out, gradient = problem.run()
        torch.testing.assert_close(out.loss.detach(), losses, rtol=1e-10, atol=1e-11)
        torch.testing.assert_close(gradient, gradients, rtol=1e-10, atol=1e-11)
        assert_float32_accuracy(problem)


@pytest.mark.parametrize("terms", [{}, {"sampler_kl_coef": 0.1, "entropy_coef": 0.1}])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_columns_of_minus_infinity_are_as_if_absent(estimator, terms):
    """A token that the trainer forbids and that is not in the record."""
    problem = make_problem(estimator, "tis", rows=3, vocab=12, k=4)
    n, vocab = problem.logits.shape
    logits = torch.cat([problem.logits, torch.full((n, 1), -INF, dtype=torch.float64)], dim=1)
    sampler = problem.sampler
    if isinstance(sampler, FullVocabulary):
        sampler = FullVocabulary(torch.cat([sampler.logprobs, torch.full((n, 1), -INF, dtype=torch.float64)], dim=1))
    for dtype, reuse in itertools.product((torch.float64, torch.float32, torch.bfloat16), (False, True)):
        out, gradient = problem.run(dtype, **terms)
        got, got_gradient = problem.run(dtype, logits=logits, sampler=sampler, reuse_logits=reuse, **terms)
        # In place on the CPU, where exp stops at e^-87, the gradient may be e^-87 instead of 0.
        assert float(got_gradient[:, vocab].abs().max()) <= (math.exp(-80) if reuse else 0.0)
        torch.testing.assert_close(got.loss, out.loss)
        torch.testing.assert_close(got_gradient[:, :vocab], gradient)
        for name in out.metrics:
            torch.testing.assert_close(got.metrics[name], out.metrics[name])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("estimator", ["head", "recorded tail", "support", "draws", "full"])
def test_a_recorded_token_that_the_trainer_forbids(estimator, weight, dtype):
    """The sampler has mass where the trainer has none: the gradient is that of p = 0, and nothing is NaN."""
    problem = make_problem(estimator, weight, rows=3, vocab=12, k=4)
    forbidden = problem.q.argmax(dim=1) if not isinstance(problem.sampler, Draws) else problem.sampler.ids[:, 0]
    others = problem.q.scatter(1, forbidden.unsqueeze(1), 0.0).argmax(dim=1)
    logits = problem.logits.scatter(1, forbidden.unsqueeze(1), -INF)
    problem = problem.replace(
        logits=logits, sampled_ids=others, sampled_logprobs=problem.q.log().gather(1, others.unsqueeze(1)).squeeze(1)
    )
    out, gradient = problem.run(dtype, entropy_coef=0.0)
    assert torch.isfinite(gradient).all()
    assert not out.loss.isnan().any()
    assert not any(metric.isnan().any() for metric in out.metrics.values())
    # A logit of -60 is p = 1e-26: the limit, where the reference can still tell.
    losses, gradients = problem.references(logits.clamp(min=-60.0))
    torch.testing.assert_close(gradient.double(), gradients, rtol=1e-5, atol=1e-6)
    if weight != "none":
        torch.testing.assert_close(out.loss.double().detach(), losses, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("weight", WEIGHTS)
def test_a_sampled_token_that_the_trainer_forbids(weight):
    problem = make_problem("head", weight, rows=2, vocab=12, k=4)
    problem = problem.replace(logits=problem.logits.scatter(1, problem.sampled_ids.unsqueeze(1), -INF))
    out, gradient = problem.run(torch.float32)
    assert torch.isfinite(gradient).all()
    assert not out.loss.isnan().any()


@pytest.mark.parametrize("estimator", ["head", "support", "full"])
def test_probabilities_below_the_smallest_float_still_count(estimator):
    """log p = -120 underflows to p = 0 in float32, but q log p does not."""
    problem = make_problem(estimator, "none", rows=1, vocab=4, k=4)
    problem = problem.replace(logits=torch.tensor([[0.0, -120.0, -1.0, -130.0]], dtype=torch.float64))
    out, _ = problem.run(torch.float32)
    losses, _ = problem.references()
    torch.testing.assert_close(out.loss.double().detach(), losses, rtol=1e-5, atol=1e-6)


def test_nan_logits_in_a_trained_row_are_not_hidden():
    for estimator in ESTIMATORS:
        problem = make_problem(estimator, rows=2)
        logits = problem.logits.clone()
        logits[1, int(problem.sampled_ids[1])] = NAN
        out, gradient = problem.run(logits=logits)
        assert out.loss[1].isnan(), estimator
        assert gradient[1].isnan().any(), estimator
        assert torch.isfinite(out.loss[0]), estimator


def test_results_do_not_depend_on_autocast():
    """Inside autocast some products would silently be bfloat16."""
    for estimator in ESTIMATORS:
        problem = make_problem(estimator, "tis", rows=4)
        out, gradient = problem.run(torch.float32, entropy_coef=0.1)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            got, got_gradient = problem.run(torch.float32, entropy_coef=0.1)
        assert torch.equal(out.loss, got.loss), estimator
        assert torch.equal(gradient, got_gradient), estimator
        assert all(torch.equal(out.metrics[name], got.metrics[name]) for name in out.metrics)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_bit_identical_from_run_to_run(estimator):
    problem = make_problem(estimator, "tis", rows=7, vocab=301, k=20)
    out, gradient = problem.run(torch.float32)
    for _ in range(3):
        again, again_gradient = problem.run(torch.float32)
        assert torch.equal(out.loss, again.loss)
        assert torch.equal(gradient, again_gradient)


# Memory and layout ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["rectangular", "ragged"])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_nothing_large_is_kept_for_backward(estimator, layout):
    n, k = 64, 32
    problem = make_problem(estimator, "tis", rows=n, vocab=199, k=k, temperature=True)
    sampler = problem.sampler
    if layout == "ragged" and isinstance(sampler, TopKHead | Support):
        sampler = as_ragged(sampler)
    logits = problem.logits.float().requires_grad_()
    callers = [logits, *(vars(sampler).values() if sampler is not None else ())]
    saved = []
    gc.collect()
    gc.freeze()  # what exists now is not looked at again
    try:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            out = centered_loss(
                logits, problem.sampled_ids, problem.advantages, sampler, problem.sampled_logprobs, problem.weight,
                problem.temperature, torch.ones(n, dtype=torch.bool), sampler_kl_coef=0.1, entropy_coef=0.1,
            )  # fmt: skip
        gc.collect()
        alive = [o for o in gc.get_objects() if type(o) is torch.Tensor and o.numel() >= n * k // 2]
    finally:
        gc.unfreeze()
    known = {storage(t) for t in [*callers, out.metrics["logprob"]] if isinstance(t, torch.Tensor)}
    large = [tuple(t.shape) for t in alive if storage(t) not in known]
    assert not large, f"new tensors stay alive until backward: {large}"
    extra = [t for t in saved if storage(t) != storage(logits)]
    assert all(t.numel() == n for t in extra), [tuple(t.shape) for t in extra]
    assert sum(t.numel() * t.element_size() for t in extra) <= 64 * n, "a few float32 a token"


def storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_the_gradient_may_take_the_storage_of_the_logits(estimator, dtype):
    problem = make_problem(estimator, "tis", rows=6, temperature=True)
    mask = torch.tensor([True, False, True, True, False, True])
    padded = torch.cat([problem.logits, torch.full((6, 3), 9.0, dtype=torch.float64)], dim=1)
    options = {"mask": mask, "vocab": VocabShard(0, 20, 17), "chunk_rows": 4, "logits": padded}
    _, expected = problem.run(dtype, **options)
    leaf = padded.to(dtype).requires_grad_()
    logits = leaf * 1.0
    gradients = []
    logits.register_hook(gradients.append)
    options["logits"] = logits
    arguments = {f.name: getattr(problem, f.name) for f in dataclasses.fields(problem) if f.name != "q"} | options
    out = centered_loss(**arguments, reuse_logits=True)
    out.loss.sum().backward()
    assert gradients[0].data_ptr() == logits.data_ptr()
    assert leaf.grad is not None
    largest = expected.abs().amax(dim=1, keepdim=True)  # working in place rounds otherwise: to a unit of the last place
    assert ((leaf.grad - expected).abs() <= torch.finfo(dtype).eps * 4 * largest).all()
    assert not leaf.grad[~mask].any()
    assert not leaf.grad[:, 17:].any()


def call(problem: Problem, logits: torch.Tensor, **options):
    arguments = {f.name: getattr(problem, f.name) for f in dataclasses.fields(problem) if f.name not in ("q", "logits")}
    return centered_loss(logits, **arguments | options)


def test_storage_is_not_taken_from_a_leaf():
    problem = make_problem("head", rows=2)
    leaf = problem.logits.clone().requires_grad_()
    for logits in (leaf, leaf.view(1, 2, -1)[0], leaf[:, :]):
        with pytest.raises(ValueError, match="reuse_logits would overwrite a leaf"):
            call(problem, logits, reuse_logits=True)
    assert torch.equal(leaf, problem.logits)


def test_a_second_backward_through_reused_storage_raises():
    problem = make_problem("head", rows=2)
    for retain in (False, True):
        leaf = problem.logits.clone().requires_grad_()
        out = call(problem, leaf * 1.0, reuse_logits=True)
        out.loss.sum().backward(retain_graph=retain)
        first = leaf.grad.clone()
        with pytest.raises(RuntimeError, match="needs reuse_logits=False"):
            out.loss.sum().backward()
        assert torch.equal(leaf.grad, first)


def test_a_second_backward_without_reuse_gives_the_same_gradient():
    problem = make_problem("head", "tis", rows=3)
    leaf = problem.logits.clone().requires_grad_()
    out = call(problem, leaf)
    (first,) = torch.autograd.grad(out.loss.sum(), leaf, retain_graph=True)
    (second,) = torch.autograd.grad(out.loss.sum(), leaf)
    assert torch.equal(first, second)
    assert torch.equal(leaf, problem.logits)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_any_layout_of_the_logits(estimator):
    problem = make_problem(estimator, "tis", rows=4, vocab=18, temperature=True)
    _, expected = problem.run()
    transposed = problem.logits.t().contiguous().t()
    wide = torch.full((4, 40), NAN, dtype=torch.float64)
    wide[:, 3:39:2] = problem.logits
    interleaved = torch.zeros(8, 18, dtype=torch.float64)
    interleaved[1::2] = problem.logits
    for logits in (transposed, wide[:, 3:39:2], interleaved[1::2]):
        assert not logits.is_contiguous()
        assert torch.equal(logits, problem.logits)
        for reuse in (False, True):
            leaf = logits.detach().requires_grad_()
            out = call(problem, leaf.clone() if reuse else leaf, reuse_logits=reuse)
            (gradient,) = torch.autograd.grad(out.loss.sum(), leaf)
            torch.testing.assert_close(gradient, expected, rtol=1e-13, atol=1e-13)


def test_any_integer_type_of_the_ids_and_any_float_type_of_the_rest():
    problem = make_problem("head", "tis", rows=3)
    out, gradient = problem.run(torch.float32)
    sampler = TopKHead(problem.sampler.ids.int(), problem.sampler.logprobs.float())
    got, got_gradient = problem.run(
        torch.float32,
        sampled_ids=problem.sampled_ids.int(),
        advantages=problem.advantages.float(),
        sampler=sampler,
        sampled_logprobs=problem.sampled_logprobs.float(),
        temperature=1.0,
    )
    torch.testing.assert_close(got.loss, out.loss)
    torch.testing.assert_close(got_gradient, gradient)
    assert got.loss.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_give_a_float32_loss(dtype):
    out, gradient = make_problem("head").run(dtype)
    assert out.loss.dtype == torch.float32
    assert all(metric.dtype == torch.float32 for metric in out.metrics.values())
    assert gradient.dtype == dtype


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_no_rows(estimator):
    problem = make_problem(estimator, "tis", rows=2)
    sampler = problem.sampler
    if sampler is not None:
        sampler = type(sampler)(**{
            f.name: None if getattr(sampler, f.name) is None else getattr(sampler, f.name)[:0]
            for f in dataclasses.fields(sampler)
        })  # fmt: skip
    samplers = [sampler]
    if isinstance(sampler, TopKHead | Support):
        samplers.append(as_ragged(sampler))
    for empty in samplers:
        out, gradient = problem.run(
            logits=problem.logits[:0],
            sampled_ids=problem.sampled_ids[:0],
            advantages=problem.advantages[:0],
            sampler=empty,
            sampled_logprobs=problem.sampled_logprobs[:0],
            temperature=problem.temperature[:0],
        )
        assert out.loss.shape == (0,)
        assert out.loss.sum() == 0
        assert gradient.shape == (0, 17)
        assert list(out.metrics) == list(problem.run()[0].metrics)


def test_rows_without_a_head():
    """An empty head knows nothing of the sampler: its tail is everything, which is the trainer itself."""
    problem = make_problem("none", "none", rows=2)
    _, expected = problem.run()
    nothing = TopKHead.ragged(torch.zeros(0, dtype=torch.int64), torch.zeros(0), torch.zeros(3, dtype=torch.int64))
    for sampler in (nothing, TopKHead(torch.zeros(2, 0, dtype=torch.int64), torch.zeros(2, 0))):
        out, gradient = problem.run(sampler=sampler)
        torch.testing.assert_close(gradient, expected)
        torch.testing.assert_close(out.metrics["tail_mass_sampler"], torch.ones(2, dtype=torch.float64))


# Errors --------------------------------------------------------------------------------------------------------------

HEAD = TopKHead(torch.tensor([[0, 1]] * 3), torch.tensor([[0.6, 0.3]] * 3).log())


def bad_head(ids=None, probabilities=None, tail=None):
    """`HEAD` with another last row."""
    row_ids, row_q = [[0, 1]] * 2 + [ids or [0, 1]], [[0.6, 0.3]] * 2 + [probabilities or [0.6, 0.3]]
    log_tail = None if tail is None else torch.tensor([-2.0, -2.0, tail])
    return TopKHead(torch.tensor(row_ids), torch.tensor(row_q).log(), log_tail)


ERRORS = {
    "one-dimensional logits": ({"logits": torch.zeros(5)}, r"logits must be \[n, V_local\].*got \[5\]"),
    "integer logits": ({"logits": torch.zeros(3, 5).long()}, "logits must be .* torch.int64"),
    "columns": ({"vocab": VocabShard(0, 4, 4)}, "logits have 5 columns but vocab names 4"),
    "a shard without a group": ({"vocab": VocabShard(0, 5, 10)}, "a part of the vocabulary.*group must be given"),
    "ratio": ({"weight": TruncatedImportanceSampling()}, "weight 'tis' needs sampled_logprobs"),
    "draws without log-probabilities": (
        {
            "sampler": Draws(torch.zeros(3, 2).long()),
            "weight": ImportanceSampling(),
            "sampled_logprobs": torch.full((3,), -1.0),
        },
        "'is' needs the log-probabilities of the draws",
    ),
    "full columns": ({"sampler": FullVocabulary(torch.zeros(3, 4))}, "FullVocabulary has 4 columns but .* has 5"),
    "rows of sampled_ids": ({"sampled_ids": torch.zeros(2).long()}, r"sampled_ids must have .* \[3\], got \[2\]"),
    "rows of advantages": ({"advantages": torch.ones(3, 1)}, r"advantages must have .* \[3\], got \[3, 1\]"),
    "rows of mask": ({"mask": torch.ones(4, dtype=torch.bool)}, r"mask must have .* \[3\], got \[4\]"),
    "rows of temperature": ({"temperature": torch.ones(2)}, r"temperature must have .* \[3\], got \[2\]"),
    "rows of sampled_logprobs": ({"sampled_logprobs": torch.ones(2)}, r"sampled_logprobs must have .* \[3\]"),
    "rows of the sampler": ({"sampler": TopKHead(HEAD.ids[:2], HEAD.logprobs[:2])}, "TopKHead has 2 rows but .* 3"),
    "float ids": ({"sampled_ids": torch.zeros(3)}, "sampled_ids must be integers, got torch.float32"),
    "float mask": ({"mask": torch.ones(3)}, "mask must be bool .* got torch.float32"),
    "temperature 0": ({"temperature": 0.0}, "temperature must be positive, got 0.0: a greedy sampler"),
    "temperature infinite": ({"temperature": float("inf")}, "temperature must be positive, got inf"),
    "negative KL coefficient": ({"sampler_kl_coef": -0.1}, r"sampler_kl_coef must be >= 0 and finite, got -0\.1"),
    "KL coefficient nan": ({"sampler_kl_coef": NAN}, "sampler_kl_coef must be >= 0 and finite, got nan"),
    "temperature nan": ({"temperature": NAN}, "temperature must be positive, got nan"),
    "temperature of a row": (
        {"temperature": torch.tensor([1.0, 0.0, 1.0])},
        r"row 1: temperature must be positive \(greedy rows cannot be centered\), got 0.0",
    ),
    "id too large": ({"sampled_ids": torch.tensor([0, 1, 5])}, r"row 2: sampled_ids must be in .*\[0, 5\), got 5"),
    "id negative": ({"sampled_ids": torch.tensor([0, -100, 1])}, "row 1: sampled_ids .* got -100"),
    "advantage": ({"advantages": torch.tensor([1.0, NAN, 1.0])}, "row 1: advantages must be finite, got nan"),
    "positive log-probability": (
        {"sampled_logprobs": torch.tensor([-1.0, -1.0, 0.1])},
        "row 2: sampled_logprobs must be finite and <= 0, got 0.1",
    ),
    "log-probability of -inf": ({"sampled_logprobs": torch.tensor([-INF, -1.0, -1.0])}, "row 0: sampled_logprobs"),
    "head id": ({"sampler": bad_head(ids=[0, 5])}, r"row 2: TopKHead.ids must be in .*\[0, 5\), got 5"),
    "repeated id": ({"sampler": bad_head([1, 1], [0.2, 0.2])}, "row 2: TopKHead.ids must be distinct .* got 1"),
    "repeated small id": (
        {"sampler": TopKHead(torch.tensor([[0, 4, 0]] * 3), torch.full((3, 3), 0.1).log())},
        "row 0: TopKHead.ids must be distinct within a row, got 0",
    ),
    "repeated id, ragged": (
        {"sampler": as_ragged(bad_head([1, 1], [0.2, 0.2]))},
        "row 2: TopKHead.ids must be distinct .* got 1",
    ),
    "mass": ({"sampler": bad_head(probabilities=[0.7, 0.4])}, r"row 2: TopKHead.logprobs have a mass above 1.*1.1"),
    "nan in the head": ({"sampler": bad_head(probabilities=[0.7, NAN])}, "row 2: TopKHead.logprobs must be .*NaN"),
    "probabilities for log-probabilities": (
        {"sampler": bad_head(probabilities=[2.0, 0.1])},
        "row 2: TopKHead.logprobs",
    ),
    "tail": ({"sampler": bad_head(tail=0.1)}, "row 2: TopKHead.log_tail_mass must be <= 0.* got 0.1"),
    "support without the token": (
        {"sampler": Support(HEAD.ids, torch.tensor([[0.7, 0.3]] * 3).log()), "sampled_ids": torch.tensor([0, 2, 1])},
        "row 1: Support.ids must contain the sampled token, got 2",
    ),
    "support with a padded token": (
        {"sampler": Support(torch.tensor([[0, 1]] * 3), torch.tensor([[0.0, -INF]] * 3))},
        "row 1: Support.ids must contain the sampled token, got 1",
    ),
    "support mass": ({"sampler": Support(HEAD.ids, HEAD.logprobs)}, "row 0: Support.logprobs must sum to 1 .* 0.89"),
    "padded draws": (
        {"sampler": Draws(torch.tensor([[0, 1], [0, -1], [1, 1]]))},
        "row 1: Draws.ids must not be padded",
    ),
    "draw id": ({"sampler": Draws(torch.tensor([[0, 1], [0, 5], [1, 1]]))}, "row 1: Draws.ids must be in .* got 5"),
    "draw log-probability": (
        {"sampler": Draws(torch.zeros(3, 1).long(), torch.tensor([[-1.0], [-INF], [-1.0]]))},
        "row 1: Draws.logprobs must be log-probabilities",
    ),
    "full mass": (
        {"sampler": FullVocabulary(torch.full((3, 5), 0.3).log())},
        "row 0: FullVocabulary.logprobs must sum to 1 .* 1.49",
    ),
    "chunk of no rows": ({"chunk_rows": 0}, "chunk_rows must be at least 1, got 0"),
    "chunk of negative rows": ({"chunk_rows": -1}, "chunk_rows must be at least 1, got -1"),
    "sampler KL of nothing": (
        {"sampler": None, "sampler_kl_coef": 0.1},
        "sampler_kl_coef needs sampled_logprobs",
    ),
    "sampler KL of draws without log-probabilities": (
        {"sampler": Draws(torch.zeros(3, 1).long()), "sampler_kl_coef": 0.1},
        "sampler_kl_coef needs the log-probabilities of the draws",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_name_the_argument_and_the_row(name):
    arguments = {
        "logits": torch.zeros(3, 5),
        "sampled_ids": torch.tensor([0, 1, 1]),
        "advantages": torch.ones(3),
        "sampler": HEAD,
    }
    changes, message = ERRORS[name]
    centered_loss(**arguments)
    with pytest.raises(ValueError, match=message):
        centered_loss(**arguments | changes)


def test_what_is_no_weight_or_no_tensor_is_refused_by_name():
    logits, ids, ones = torch.zeros(3, 5), torch.zeros(3, dtype=torch.long), torch.ones(3)
    for weight in ("tis", TruncatedImportanceSampling):
        with pytest.raises(TypeError, match="weight must be an object such as"):
            centered_loss(logits, ids, ones, None, weight=weight)
    with pytest.raises(TypeError, match=r"advantages must be a tensor with one entry a row, \[3\], got list"):
        centered_loss(logits, ids, [1.0, 1.0, 1.0], None)


def test_a_row_that_is_masked_may_hold_what_would_be_refused():
    mask = torch.tensor([True, True, False])
    for name in (
        "id too large",
        "head id",
        "mass",
        "repeated id",
        "repeated id, ragged",
        "nan in the head",
        "tail",
    ):
        arguments = {
            "logits": torch.zeros(3, 5),
            "sampled_ids": torch.tensor([0, 1, 1]),
            "advantages": torch.ones(3),
            "sampler": HEAD,
        } | ERRORS[name][0]
        assert centered_loss(**arguments, mask=mask).loss[2] == 0


def test_the_sampler_must_be_one_of_ours():
    with pytest.raises(TypeError, match=r"sampler must be TopKHead, .* got list"):
        centered_loss(torch.zeros(1, 5), torch.tensor([0]), torch.ones(1), [1.0])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: VocabShard(3, 2, 5), "0 <= start <= stop, got start=3, stop=2"),
        (lambda: VocabShard(-1, 2, 5), "got start=-1"),
        (lambda: VocabShard(0, 2, 0), "true vocabulary size must be positive, got 0"),
        (lambda: VocabShard.of_rank(0, 2, 4, 9), "--true-vocab-size 9 is larger than the model's 2 x 4"),
    ],
)
def test_vocab_shard_errors(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_vocab_shards_of_a_padded_vocabulary():
    shards = [VocabShard.of_rank(rank, 4, 4, 9) for rank in range(4)]
    assert [(s.start, s.stop, s.columns, s.valid) for s in shards] == [
        (0, 4, 4, 4), (4, 8, 4, 4), (8, 12, 4, 1), (12, 16, 4, 0)
    ]  # fmt: skip
    assert not any(s.is_whole for s in shards)
    assert VocabShard(0, 12, 9).is_whole
    assert Uniform() == Uniform()


@pytest.mark.parametrize("reuse_logits", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_columns_of_minus_infinity_have_no_probability(dtype, reuse_logits):
    """Some columns of one row, all columns outside the head of another: no NaN, and the entropy of what is left."""
    problem = make_problem("head", rows=3)
    raw = problem.logits.to(dtype).double()
    ids = problem.sampler.ids.long()
    outside = torch.ones_like(raw, dtype=torch.bool).scatter_(1, ids.clamp(min=0), False)
    outside[torch.arange(3), problem.sampled_ids] = False
    raw[0, outside[0].nonzero()[:2]] = -torch.inf
    only_head = torch.zeros(raw.shape[1], dtype=torch.bool)
    only_head[ids[1][ids[1] >= 0]] = True
    raw[1, ~only_head] = -torch.inf
    sampled = problem.sampled_ids.clone()
    sampled[1] = ids[1, 0]
    leaf = raw.to(dtype).requires_grad_()
    out = centered_loss(leaf * 1.0, sampled, problem.advantages, problem.sampler, None, reuse_logits=reuse_logits)
    out.loss.sum().backward()
    p = raw.softmax(dim=1)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(out.metrics["entropy"].double(), torch.special.entr(p).sum(1), rtol=tolerance, atol=1e-6)
    assert leaf.grad.isfinite().all()
    assert (leaf.grad[raw == -torch.inf].abs() < 1e-37).all()  # exponents may end at -87
