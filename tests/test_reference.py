"""The dense float64 reference against the golden cases: it reads like the paper, so it must be the paper."""

import pytest
import torch
from golden import ESTIMATORS, KINDS, golden_cases

from megatron_sc.objective import Support, TopKHead, TruncatedImportanceSampling
from megatron_sc.objective.reference import reference_position


def test_there_are_250_cases_of_every_estimator_and_weight():
    assert len(golden_cases()) == 250
    for estimator in ESTIMATORS:
        for kind in KINDS:
            assert len(golden_cases(estimator, kind)) == 10


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_golden_cases(estimator, kind):
    for case in golden_cases(estimator, kind):
        logits = torch.tensor(case.z, dtype=torch.float64)
        got = reference_position(
            logits[: case.valid],
            case.y,
            case.A,
            case.sampler(),
            sampled_logprob=float(torch.tensor(case.q_y, dtype=torch.float64).log()),
            weight=case.weight,
            temperature=case.T,
        )
        padded = torch.zeros_like(logits)
        padded[: case.valid] = got.gradient
        assert case.gradient_error(padded) < 1e-9, case
        assert case.loss_error(got.loss) < 1e-9, case
        assert abs(float(got.weight) - case.expected["w"]) < 1e-9 * max(1.0, case.expected["w"]), case
        if estimator != "none":
            weighted = torch.tensor(case.expected["C"], dtype=torch.float64)[: case.valid]
            torch.testing.assert_close(got.weighted_sampler, weighted, rtol=1e-9, atol=1e-12, msg=str(case))


def test_rows_of_a_batch_and_ragged_rows_are_read_at_their_place():
    logits = torch.tensor([0.3, -1.0, 2.0, 0.5], dtype=torch.float64)
    ids = torch.tensor([[2, 0], [3, -1]])
    logprobs = torch.tensor([[0.6, 0.2], [0.5, 1.0]], dtype=torch.float64).log()
    tail = torch.tensor([0.2, 0.5], dtype=torch.float64).log()
    ragged = TopKHead.ragged(
        torch.tensor([2, 0, 3]), torch.tensor([0.6, 0.2, 0.5], dtype=torch.float64).log(), torch.tensor([0, 2, 3]), tail
    )
    for row, head in ((0, {2: 0.6, 0: 0.2}), (1, {3: 0.5})):
        p = torch.softmax(logits, 0)
        rest = [v for v in range(4) if v not in head]
        expected = torch.zeros(4, dtype=torch.float64)
        for v, q in head.items():
            expected[v] = q
        expected[rest] = (1 - sum(head.values())) * p[rest] / p[rest].sum()
        for sampler in (TopKHead(ids, logprobs, tail), ragged):
            got = reference_position(logits, 1, 1.0, sampler, row)
            torch.testing.assert_close(got.weighted_sampler, expected)


def test_a_tail_without_trainer_mass_is_no_tail():
    logits = torch.tensor([1.0, 0.0, -torch.inf, -torch.inf], dtype=torch.float64)
    head = TopKHead(torch.tensor([[0, 1]]), torch.tensor([[0.6, 0.3]], dtype=torch.float64).log())
    got = reference_position(logits, 0, 1.0, head)
    assert torch.isfinite(got.gradient).all()
    assert got.weighted_sampler.tolist() == pytest.approx([0.6, 0.3, 0.0, 0.0])


def test_columns_outside_a_support_have_no_gradient():
    logits = torch.tensor([1.0, 0.0, 5.0], dtype=torch.float64)
    got = reference_position(
        logits, 0, 1.0, Support(torch.tensor([[0, 1]]), torch.tensor([[0.7, 0.3]], dtype=torch.float64).log())
    )
    assert got.gradient[2] == 0
    assert got.gradient[:2].tolist() == pytest.approx([-0.3, 0.3])


def test_a_weight_needs_the_sampled_logprob():
    with pytest.raises(ValueError, match="tis needs sampled_logprob"):
        reference_position(torch.zeros(3), 0, 1.0, None, weight=TruncatedImportanceSampling())
