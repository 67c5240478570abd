"""The sampler's distribution at one position, against float64 and against hand-worked cases."""

import math

import pytest
import torch

from megatron_sc.sampling.distribution import draw, head_and_tail, log_probabilities, support


def logits(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 3


def test_temperature_divides_the_logits():
    z = torch.tensor([[2.0, 1.0, 0.0]])
    assert log_probabilities(z)[0, 0].item() == pytest.approx(-0.4076, abs=1e-4)
    assert log_probabilities(z, temperature=0.5)[0, 0].item() == pytest.approx(-0.1429, abs=1e-4)
    assert log_probabilities(z.bfloat16(), 0.5).dtype == torch.float32


def test_top_p_keeps_the_fewest_tokens_that_reach_it_and_renormalizes():
    z = torch.tensor([[0.15, 0.5, 0.05, 0.3]]).log()
    logprobs = log_probabilities(z, top_p=0.8 - 1e-6)
    assert torch.allclose(logprobs.exp(), torch.tensor([[0.0, 0.625, 0.0, 0.375]]), atol=1e-6)
    wider = log_probabilities(z, top_p=0.81)
    assert torch.allclose(wider.exp(), torch.tensor([[0.15, 0.5, 0.0, 0.3]]) / 0.95, atol=1e-6)
    assert log_probabilities(z, top_p=1e-9).exp().tolist() == [[0.0, 1.0, 0.0, 0.0]]


def test_top_k_comes_before_top_p():
    z = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    kept = log_probabilities(z, top_k=2).exp()
    assert torch.allclose(kept, torch.tensor([[4 / 7, 3 / 7, 0.0, 0.0]]), atol=1e-6)
    # 4/7 = 0.571 of the two that are left reaches 0.55; 0.4 of all four would not
    assert log_probabilities(z, top_k=2, top_p=0.55).exp().tolist() == [[1.0, 0.0, 0.0, 0.0]]


def test_temperature_comes_before_top_p():
    z = torch.tensor([[0.5, 0.3, 0.2]]).log()
    assert (log_probabilities(z, temperature=0.25, top_p=0.85) > -math.inf).tolist() == [[True, False, False]]
    assert (log_probabilities(z, temperature=1.0, top_p=0.85) > -math.inf).tolist() == [[True, True, True]]


def test_a_head_of_everything_has_no_tail():
    logprobs = log_probabilities(logits(5, 11))
    ids, head, tail = head_and_tail(logprobs, 11)
    assert tail.tolist() == [-math.inf] * 5
    assert torch.equal(ids.sort(dim=1).values, torch.arange(11).expand(5, 11))
    assert torch.allclose(head.exp().sum(1), torch.ones(5))


def test_the_head_is_sorted_and_belongs_to_its_ids():
    logprobs = log_probabilities(logits(6, 40))
    ids, head, _ = head_and_tail(logprobs, 7)
    assert torch.equal(head, logprobs.gather(1, ids))
    assert (head.diff(dim=1) <= 0).all()
    others = logprobs.scatter(1, ids, -math.inf)
    assert (others.max(dim=1).values <= head[:, -1]).all()


@pytest.mark.parametrize("gap", [0.0, 10.0, 18.0, 40.0])
def test_the_tail_mass_is_exact_however_small(gap):
    z = logits(4, 1000) / 3  # so that the first 8 columns are the head
    z[:, :8] += 12 + gap
    _, _, tail = head_and_tail(log_probabilities(z), 8)
    exact = z.double().log_softmax(1)[:, 8:].logsumexp(1)
    assert exact.min() < -gap  # the case is as hard as its name says
    assert torch.allclose(tail.double(), exact, rtol=1e-6, atol=2e-6)


def test_draws_follow_the_distribution():
    logprobs = log_probabilities(logits(1, 9, seed=4))
    count = 40_000
    uniforms = torch.rand(1, count, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    observed = torch.bincount(draw(logprobs, uniforms)[0], minlength=9)
    expected = logprobs[0].exp() * count
    chi_square = ((observed - expected) ** 2 / expected).sum().item()
    assert chi_square < 30  # 8 degrees of freedom: exceeded once in 5000


def test_tokens_without_probability_are_never_drawn():
    logprobs = torch.tensor([[-math.inf, math.log(0.5), -math.inf, math.log(0.5), -math.inf]])
    edges = torch.tensor([[0.0, 0.25, 0.5, 0.75, 1 - 2**-53]], dtype=torch.float64)
    assert draw(logprobs, edges).tolist() == [[1, 1, 3, 3, 3]]


def test_a_support_lists_all_tokens_and_pads_shorter_rows():
    logprobs = torch.tensor([[0.0, -math.inf, -math.inf], [math.log(0.25), -math.inf, math.log(0.75)]])
    ids, values = support(logprobs)
    assert ids.tolist() == [[0, -1], [2, 0]]
    assert values[0].tolist() == [0.0, -math.inf]
    assert torch.allclose(values[1].exp(), torch.tensor([0.75, 0.25]))
