"""The article's own numbers (`Score Centering: Stabilize RL Training`): what a reader can check by hand."""

import math

import pytest
import torch

from megatron_sc import centered_loss
from megatron_sc.objective import (
    ClippedSurrogate,
    Draws,
    FullVocabulary,
    ImportanceSampling,
    MaskedImportanceSampling,
    TopKHead,
    TruncatedImportanceSampling,
    Uniform,
    compute_advantages,
)

A, B = 0, 1


def log(values):
    return torch.tensor(values, dtype=torch.float64).log()


def push(p, q, y, *, weight=None, sampler="full", advantage=1.0):
    """`[V]` how a token sampled by q pushes the logits: minus the gradient."""
    logits = log([p]).requires_grad_()
    distribution = FullVocabulary(log([q])) if sampler == "full" else sampler
    advantages = torch.tensor([advantage], dtype=torch.float64)
    out = centered_loss(logits, torch.tensor([y]), advantages, distribution, log([q[y]]), weight)
    out.loss.sum().backward()
    return -logits.grad[0]


def average_push(p, q, **options):
    """`[V]` the push averaged over the tokens that the sampler draws."""
    return sum(q[y] * push(p, q, y, **options) for y in range(len(q)))


def test_two_tokens():
    p, q = [0.5, 0.5], [0.6, 0.4]
    # The plain score is e_y - p; its average is q - p = (0.1, -0.1), the drift.
    assert push(p, q, A, sampler=None).tolist() == pytest.approx([0.5, -0.5])
    assert push(p, q, B, sampler=None).tolist() == pytest.approx([-0.5, 0.5])
    assert average_push(p, q, sampler=None).tolist() == pytest.approx([0.1, -0.1])
    # The trainer's own tokens have none.
    assert average_push(p, p, sampler=None).tolist() == pytest.approx([0.0, 0.0])
    # Centered: e_y - q.
    assert push(p, q, A).tolist() == pytest.approx([0.4, -0.4])
    assert push(p, q, B).tolist() == pytest.approx([-0.6, 0.6])
    assert average_push(p, q).tolist() == pytest.approx([0.0, 0.0])
    # With learning rate 1 the drift moves p_A from 0.5 to about 0.55.
    assert float(torch.softmax(log(p) + average_push(p, q, sampler=None), 0)[A]) == pytest.approx(0.55, abs=1e-3)


def test_ten_draws():
    """Appendix B: A A B A B A A B A B, six pushes of 0.5 against four; after centering 6 x 0.4 - 4 x 0.6 = 0."""
    draws = [A, A, B, A, B, A, A, B, A, B]
    p, q = torch.full((10, 2), 0.5, dtype=torch.float64), torch.tensor([[0.6, 0.4]] * 10, dtype=torch.float64)
    logits = p.log().requires_grad_()
    for sampler, pushes, total in ((None, (0.5, -0.5), 1.0), (FullVocabulary(q.log()), (0.4, -0.6), 0.0)):
        out = centered_loss(logits, torch.tensor(draws), torch.ones(10), sampler)
        (gradient,) = torch.autograd.grad(out.loss.sum(), logits)
        assert (-gradient[:, A]).tolist() == pytest.approx([pushes[y] for y in draws])
        assert float(-gradient[:, A].sum()) == pytest.approx(total, abs=1e-12)


@pytest.mark.parametrize(
    ("weight", "center", "weights", "expected"),
    [
        (Uniform(), False, (1.0, 1.0), 0.40),
        (ImportanceSampling(), False, (0.5556, 5.0), 0.0),
        (TruncatedImportanceSampling(2.0), False, (0.5556, 2.0), 0.15),
        (TruncatedImportanceSampling(2.0), True, (0.5556, 2.0), 0.0),
    ],
)
def test_the_table_of_a_badly_skewed_sampler(weight, center, weights, expected):
    p, q = [0.5, 0.5], [0.9, 0.1]
    for y in (A, B):
        out = centered_loss(log([p]), torch.tensor([y]), torch.ones(1), None, log([q[y]]), weight)
        assert float(out.metrics["importance_weight"]) == pytest.approx(weights[y], abs=1e-4)
    got = average_push(p, q, weight=weight, sampler="full" if center else None)
    assert got.tolist() == pytest.approx([expected, -expected], abs=1e-12)


@pytest.mark.parametrize("q_a", [0.5, 0.6, 0.74, 0.76, 0.9])
def test_truncation_lets_drift_in_once_it_binds(q_a):
    """With p_A = 0.5 and a cap of 2, TIS removes the drift until q_A > 0.75."""
    drift = float(average_push([0.5, 0.5], [q_a, 1 - q_a], weight=TruncatedImportanceSampling(2.0), sampler=None)[A])
    assert (abs(drift) > 1e-3) == (q_a > 0.75)


MENU = {"42": (0.70, 0.64), "41": (0.12, 0.15), "forty": (0.05, 0.07), "newline": (0.03, 0.04)}


def test_the_menu_of_42():
    """Q = P = 0.9, so rho = 1 and c = q - p; the loss is -A (.94 log p_42 + .03 log p_41 + .02 log p + .01 log p)."""
    q = [q for q, _ in MENU.values()]
    p = [p for _, p in MENU.values()] + [0.06, 0.04]
    advantage = -1.7
    logits = log([p]).requires_grad_()
    head = TopKHead(torch.tensor([[0, 1, 2, 3]]), log([q]))
    out = centered_loss(logits, torch.tensor([0]), torch.tensor([advantage], dtype=torch.float64), head)
    credit = {0: 0.94, 1: 0.03, 2: 0.02, 3: 0.01}
    assert out.loss.item() == pytest.approx(-advantage * sum(c * math.log(p[v]) for v, c in credit.items()))
    assert float(out.metrics["coefficient_l1"]) == pytest.approx(0.06 + 0.03 + 0.02 + 0.01)
    out.loss.sum().backward()
    # e_y - q_hat, where the tail of q_hat is the trainer's.
    assert logits.grad[0].tolist() == pytest.approx([-advantage * g for g in (0.30, -0.12, -0.05, -0.03, -0.06, -0.04)])


def test_the_menu_if_the_engines_agreed():
    """Every c_v is zero and this is the plain loss exactly."""
    p = [p for _, p in MENU.values()] + [0.06, 0.04]
    head = TopKHead(torch.tensor([[0, 1, 2, 3]]), log([p[:4]]))
    logits = log([p])
    centered = centered_loss(logits, torch.tensor([0]), torch.ones(1), head)
    plain = centered_loss(logits, torch.tensor([0]), torch.ones(1), None)
    assert centered.loss.item() == pytest.approx(plain.loss.item(), abs=1e-14)


def test_the_sparse_gradient_of_eight_draws():
    """e_y - mean of 8 one-hots: +0.875 at y if it was drawn once, -0.125 a draw elsewhere, exactly 0 on the others."""
    random = torch.Generator().manual_seed(0)
    logits = torch.randn(1, 40, generator=random).requires_grad_()
    for draws, y in (
        ([1, 2, 11, 17, 25, 29, 31, 39], 39),
        ([1, 2, 11, 17, 25, 29, 31, 3], 39),
        ([25, 25, 25, 39, 39, 7, 7, 7], 39),
        ([5] * 8, 5),
    ):
        out = centered_loss(logits, torch.tensor([y]), torch.ones(1), Draws(torch.tensor([draws])))
        (gradient,) = torch.autograd.grad(out.loss.sum(), logits)
        expected = torch.zeros(40)
        expected[y] += 1
        for v in draws:
            expected[v] -= 0.125
        assert torch.equal(-gradient[0], expected), draws
        assert set(torch.nonzero(gradient[0]).flatten().tolist()) <= {*draws, y}


def test_plain_reinforce_moves_every_logit():
    logits = torch.randn(1, 40, generator=torch.Generator().manual_seed(0)).requires_grad_()
    centered_loss(logits, torch.tensor([39]), torch.ones(1), None).loss.sum().backward()
    assert (logits.grad != 0).all()
    assert (-logits.grad[0, 39] > 0).all()


def test_eight_draws_are_right_on_average():
    """The estimate averages to e_y - q."""
    q = torch.tensor([0.5, 0.25, 0.125, 0.125], dtype=torch.float64)
    n = 20000
    draws = torch.multinomial(q.expand(n, -1), 8, replacement=True, generator=torch.Generator().manual_seed(1))
    logits = torch.zeros(n, 4, dtype=torch.float64, requires_grad=True)
    centered_loss(logits, torch.zeros(n, dtype=torch.int64), torch.ones(n), Draws(draws)).loss.sum().backward()
    mean = -logits.grad.mean(dim=0)
    assert mean.tolist() == pytest.approx([0.5, -0.25, -0.125, -0.125], abs=5e-3)


HEAD_P, HEAD_Q, TAIL_P = (0.30, 0.20), (0.45, 0.05), (0.35, 0.15)


@pytest.mark.parametrize("y", [0, 1, 2])
@pytest.mark.parametrize(
    ("weight", "f"),
    [
        (Uniform(), lambda r: 1.0),
        (ImportanceSampling(), lambda r: r),
        (TruncatedImportanceSampling(2.0), lambda r: min(r, 2.0)),
        (MaskedImportanceSampling(0.5, 5.0), lambda r: r if 0.5 <= r <= 5 else 0.0),
        (ClippedSurrogate(0.2, 0.2), lambda r: r if r <= 1.2 else 0.0),  # for A > 0
    ],
    ids=["none", "is", "tis", "mis", "ppo"],
)
@pytest.mark.parametrize("center", [False, True])
def test_the_rows_of_appendix_c(weight, f, center, y):
    """L = -A ( w_t log p_y - sum_H c_v log p_v ) with c_v = q_v w_v - alpha p_v, alpha = rho f(1/rho)."""
    p = [*HEAD_P, *TAIL_P]
    rho = (1 - sum(HEAD_Q)) / (1 - sum(HEAD_P))
    q = [*HEAD_Q, *(rho * v for v in TAIL_P)]
    alpha = rho * f(1 / rho)
    c = [HEAD_Q[v] * f(HEAD_P[v] / HEAD_Q[v]) - alpha * HEAD_P[v] for v in (0, 1)] if center else [0.0, 0.0]
    advantage = 0.8
    expected = -advantage * (f(p[y] / q[y]) * math.log(p[y]) - sum(c[v] * math.log(HEAD_P[v]) for v in (0, 1)))
    out = centered_loss(
        log([p]), torch.tensor([y]), torch.tensor([advantage]), TopKHead(torch.tensor([[0, 1]]), log([HEAD_Q])),
        log([q[y]]), weight, center=center,
    )  # fmt: skip
    assert out.loss.item() == pytest.approx(expected, rel=1e-6)  # A = 0.8 is a float32
    assert float(out.metrics["importance_weight"]) == pytest.approx(f(p[y] / q[y]), rel=1e-12)
    assert float(out.metrics["coefficient_l1"]) == pytest.approx(sum(map(abs, c)), abs=1e-12)


def test_group_centered_rewards():
    """Eq. (13): A = R - mean of the 8 completions of the prompt."""
    rewards = [1, 1, 0, 0, 0, 0, 0, 0]
    assert compute_advantages(rewards, [5] * 8, "group").tolist() == [0.75] * 2 + [-0.25] * 6


def test_the_ratio_of_a_rare_token():
    """p = 0.01 and q = 0.0001 give r = 100, which TIS caps at 2."""
    for weight, expected in ((ImportanceSampling(), 100.0), (TruncatedImportanceSampling(2.0), 2.0)):
        out = centered_loss(log([[0.01, 0.99]]), torch.tensor([0]), torch.ones(1), None, log([0.0001]), weight)
        assert float(out.metrics["importance_weight"]) == pytest.approx(expected)
