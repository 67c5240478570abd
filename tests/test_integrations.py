"""slime and miles: the adapter's loss and gradient equal ``centered_loss`` on the response rows alone."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron_sc import VocabShard, centered_loss
from megatron_sc.integrations._common import Ranks, framework_loss
from megatron_sc.integrations._layout import response_spans
from megatron_sc.objective import Support, TopKHead
from tests.distributed import run_ranks

VOCAB, PADDED, K = 37, 40, 5
PROMPTS, RESPONSES = (3, 1, 5, 2), (4, 9, 2, 6)
TEMPERATURE, ENTROPY = 0.7, 0.01
SETTINGS = {"importance_weight": "tis", "tis_cap": 1.3}


@dataclass
class Sample:
    """One sequence, whole."""

    tokens: Tensor  # [total]
    logits: Tensor  # [total, PADDED] float32; columns beyond VOCAB and rows that predict no response token hold NaN
    mask: Tensor  # [response] int32
    advantages: Tensor  # [response]
    logprobs: Tensor  # [response] log q of the sampled token
    ids: Tensor  # [response, K] int32
    head: Tensor  # [response, K] log q

    @property
    def prompt(self) -> int:
        """Its length."""
        return len(self.tokens) - len(self.mask)


def samples(truncated: bool) -> list[Sample]:
    """With a sampler that differs from the trainer; ``truncated``: it draws from its K most likely tokens only."""
    random = torch.Generator().manual_seed(3)
    made = []
    for prompt, response in zip(PROMPTS, RESPONSES, strict=True):
        total = prompt + response
        logits = torch.full((total, PADDED), torch.nan)
        logits[prompt - 1 : -1, :VOCAB] = 2 * torch.randn(response, VOCAB, generator=random)
        p = torch.softmax(logits[prompt - 1 : -1, :VOCAB] / TEMPERATURE, dim=1)
        q = torch.softmax(p.log() + 0.5 * torch.randn(response, VOCAB, generator=random), dim=1)
        head, ids = q.topk(K, dim=1)
        if truncated:
            q = torch.zeros_like(q).scatter(1, ids, head / head.sum(1, keepdim=True))
        y = torch.multinomial(q, 1, generator=random)
        prompt_ids = torch.randint(VOCAB, (prompt,), generator=random)
        made.append(
            Sample(
                torch.cat([prompt_ids, y.squeeze(1)]),
                logits,
                (torch.rand(response, generator=random) < 0.8).int(),
                torch.randn(response, generator=random),
                q.gather(1, y).squeeze(1).log(),
                ids.int(),
                q.gather(1, ids).log(),
            )
        )
    return made


def local_positions(sample: Sample, cp_rank: int, cp_size: int, padded_to: int | None) -> list[int]:
    """Positions of the sequence on this rank, those behind its end included: zigzag chunks, one by one."""
    length = padded_to or len(sample.tokens)
    if cp_size == 1:
        return list(range(length))
    while length % (2 * cp_size):
        length += 1
    chunks = torch.arange(length).chunk(2 * cp_size)
    return torch.cat([chunks[cp_rank], chunks[-1 - cp_rank]]).tolist()


class MicroBatch:
    """The samples as a framework lays them out on one rank."""

    def __init__(self, samples: list[Sample], ranks: Ranks, padded_to: int | None, sliced: bool):
        tp_rank, tp = dist.get_rank(ranks.tp_group), dist.get_world_size(ranks.tp_group)
        self.columns = slice(tp_rank * PADDED // tp, (tp_rank + 1) * PADDED // tp)
        self.samples = samples
        self.positions = [local_positions(s, ranks.cp_rank, ranks.cp_size, padded_to) for s in samples]
        # By sample: the response tokens that the local positions predict.
        self.tokens = [
            [p + 1 - s.prompt for p in positions if s.prompt <= p + 1 < len(s.tokens)]
            for s, positions in zip(samples, self.positions, strict=True)
        ]
        rows = [
            torch.cat([s.logits, torch.full((100, PADDED), torch.nan)])[positions, self.columns]
            for s, positions in zip(samples, self.positions, strict=True)
        ]
        if padded_to:
            self.logits = torch.stack(rows)
        else:
            padding = torch.full((7, rows[0].shape[1]), torch.nan)
            self.logits = torch.cat([*rows, padding]).unsqueeze(0)

        def of_rank(name: str) -> list[Tensor]:
            return [getattr(s, name)[tokens] for s, tokens in zip(samples, self.tokens, strict=True)]

        def head(name: str) -> list[Tensor]:
            return of_rank(name) if sliced else [getattr(s, name) for s in samples]

        self.batch: dict[str, Any] = {
            "unconcat_tokens": [s.tokens for s in samples],
            "total_lengths": [len(s.tokens) for s in samples],
            "response_lengths": [len(s.mask) for s in samples],
            "loss_masks": [s.mask for s in samples],
            "advantages": of_rank("advantages"),
            "rollout_log_probs": of_rank("logprobs"),
            "rollout_topk_token_ids": head("ids"),
            "rollout_topk_log_probs": head("head"),
            "max_seq_lens": [padded_to] * len(samples) if padded_to else None,
        }

    def sum_of_sample_mean(self, values: Tensor) -> Tensor:
        """The mean over each sample's trained tokens, summed over samples; over ranks the parts add up."""
        parts = values.split([len(tokens) for tokens in self.tokens])
        return sum(  # type: ignore[return-value]
            (part * s.mask[tokens]).sum() / s.mask.sum().clamp(min=1)
            for part, s, tokens in zip(parts, self.samples, self.tokens, strict=True)
        )


def direct(samples: list[Sample], distribution: str, settings: dict[str, Any]) -> tuple[Tensor, list[Tensor]]:
    """``centered_loss`` on the response rows and the whole vocabulary; the loss, and its gradient by sample."""
    from megatron_sc.integrations._config import FrameworkObjective

    logits = [s.logits[s.prompt - 1 : -1, :VOCAB].clone().requires_grad_() for s in samples]
    kind = TopKHead if distribution == "head" else Support
    loss = torch.zeros(())
    for s, rows in zip(samples, logits, strict=True):
        out = centered_loss(
            rows, s.tokens[s.prompt :], s.advantages, kind(s.ids, s.head), s.logprobs,
            FrameworkObjective(**settings).weight(), TEMPERATURE, s.mask.bool(),
            VocabShard(0, VOCAB, VOCAB), entropy_coef=ENTROPY,
            center=settings.get("loss_correction") != "none",
        )  # fmt: skip
        loss = loss + out.loss.sum() / s.mask.sum().clamp(min=1)
    return loss.detach(), list(torch.autograd.grad(loss, logits))


def arguments(**settings: Any) -> Namespace:
    """A framework's arguments, as far as they are read."""
    return Namespace(
        score_centering=settings, rollout_temperature=TEMPERATURE, entropy_coef=ENTROPY, vocab_size=VOCAB,
        qkv_format="thd", rollout_top_p=1.0, rollout_top_k=-1,
    )  # fmt: skip


def as_ragged(batch: dict[str, Any], samples: list[Sample]) -> None:
    """slime's record of a top-p sampler."""
    del batch["rollout_topk_token_ids"], batch["rollout_topk_log_probs"]
    batch["rollout_top_p_token_ids"] = [s.ids.flatten() for s in samples]
    batch["rollout_top_p_log_probs"] = [s.head.flatten() for s in samples]
    batch["rollout_top_p_token_offsets"] = [torch.arange(0, s.ids.numel() + 1, K).int() for s in samples]


def compare_on_rank(tp: int, cp: int, framework: str, distribution: str, layout: str, **settings: Any) -> None:
    from megatron.core import mpu

    from megatron_sc.integrations import miles, slime

    mpu.destroy_model_parallel()
    mpu.initialize_model_parallel(tensor_model_parallel_size=tp, context_parallel_size=cp)
    ranks = Ranks.from_megatron()
    assert (dist.get_world_size(ranks.tp_group), ranks.cp_size) == (tp, cp)

    truncated = distribution != "head"
    data = samples(truncated)
    args = arguments(sampler_distribution="support" if truncated else "head", **settings)
    args.qkv_format = "bshd" if layout == "bshd" else "thd"
    if truncated:
        args.rollout_top_p = 0.9
    micro_batch = MicroBatch(data, ranks, 16 if layout == "bshd" else None, sliced=layout == "sliced")
    if distribution == "ragged":
        as_ragged(micro_batch.batch, data)
    leaf = micro_batch.logits.requires_grad_()
    function = {"slime": slime, "miles": miles}[framework].loss
    loss, metrics = function(args, micro_batch.batch, leaf * 1, micro_batch.sum_of_sample_mean)
    (gradient,) = torch.autograd.grad(loss, leaf)

    expected_loss, expected = direct(data, "head" if distribution == "head" else "support", settings)
    total = loss.detach().clone()
    dist.all_reduce(total, group=mpu.get_context_parallel_group())
    torch.testing.assert_close(total, expected_loss, rtol=2e-6, atol=1e-6)
    assert torch.equal(metrics["loss"], loss.detach())
    assert all(value.shape == () and not value.requires_grad for value in metrics.values())
    assert "sampler_kl" in metrics

    flat, row = gradient.view(-1, gradient.shape[-1]), 0
    assert torch.isfinite(flat).all(), "rows and columns that hold NaN have a gradient of 0"
    for s, positions, of_response in zip(data, micro_batch.positions, expected, strict=True):
        whole = torch.zeros(100, PADDED)
        whole[s.prompt - 1 : len(s.tokens) - 1, :VOCAB] = of_response
        wanted = whole[positions][:, micro_batch.columns]
        torch.testing.assert_close(flat[row : row + len(positions)], wanted, rtol=2e-5, atol=1e-7)
        row += len(positions)
    assert flat[:row].abs().sum() > 0
    assert flat[row:].abs().sum() == 0


CASES = [
    ("slime", "head", "whole", SETTINGS),
    ("slime", "head", "sliced", {}),
    ("slime", "support", "whole", SETTINGS),
    ("slime", "ragged", "whole", SETTINGS),
    ("slime", "head", "whole", {"loss_correction": "none", "importance_weight": "ppo"}),
    ("miles", "head", "whole", SETTINGS),
    ("miles", "head", "bshd", {"importance_weight": "mis"}),
    ("miles", "support", "bshd", SETTINGS),
]


def compare_all_on_rank(tp: int, cp: int) -> None:
    for framework, distribution, layout, settings in CASES:
        try:
            compare_on_rank(tp, cp, framework, distribution, layout, **settings)
        except Exception as error:
            error.add_note(f"{framework} {distribution} {layout} {settings}")
            raise


@pytest.mark.parametrize(("tp", "cp"), [(1, 1), (2, 1), (1, 2)])
def test_loss_and_gradient_equal_the_direct_call(tp: int, cp: int) -> None:
    run_ranks(compare_all_on_rank, tp * cp, tp, cp, megatron=True)


def test_a_rank_without_response_tokens() -> None:
    """Under context parallelism a rank may hold nothing but prompt."""
    run_ranks(no_response_on_rank, 1)


def no_response_on_rank() -> None:
    data = samples(truncated=False)[:1]
    ranks = Ranks(dist.group.WORLD, 3, 4)  # of four ranks the last holds positions 3 and 4 of 7, all of the response...
    alone = MicroBatch(data, ranks, None, sliced=True)
    data[0].tokens = torch.cat([torch.zeros(40, dtype=torch.int64), data[0].tokens])  # ... and here only prompt
    data[0].logits = torch.cat([torch.full((40, PADDED), torch.nan), data[0].logits])
    empty = MicroBatch(data, ranks, None, sliced=True)
    assert [len(alone.tokens[0]), len(empty.tokens[0])] == [2, 0]
    logits = empty.logits.requires_grad_()
    loss, metrics = framework_loss(arguments(**SETTINGS), empty.batch, logits, empty.sum_of_sample_mean, ranks)
    loss.backward()
    assert loss == 0
    assert torch.equal(logits.grad, torch.zeros_like(logits))
    _, others = framework_loss(arguments(**SETTINGS), alone.batch, alone.logits, alone.sum_of_sample_mean, ranks)
    assert metrics.keys() == others.keys()


def test_recomputing_the_loss_gives_the_same_gradient() -> None:
    """``--recompute-loss-function`` runs the adapter a second time on the same logits, in backward."""
    run_ranks(recompute_on_rank, 1)


def recompute_on_rank() -> None:
    ranks = Ranks(dist.group.WORLD, 0, 1)
    micro_batch = MicroBatch(samples(truncated=False), ranks, None, sliced=False)
    leaf = micro_batch.logits.requires_grad_()

    def function(args: Namespace, batch: Any, logits: Tensor, reduce: Any) -> Any:
        return framework_loss(args, batch, logits, reduce, ranks)

    args = arguments(**SETTINGS)
    inputs = micro_batch.batch, leaf * 1, micro_batch.sum_of_sample_mean
    (expected,) = torch.autograd.grad(function(args, *inputs)[0], leaf)
    args.recompute_loss_function = True
    for use_reentrant in (False, True):
        inputs = micro_batch.batch, leaf * 1, micro_batch.sum_of_sample_mean
        loss, _ = checkpoint(function, args, *inputs, use_reentrant=use_reentrant)
        leaf.grad = None
        loss.backward()
        assert torch.equal(leaf.grad, expected)


def test_spans() -> None:
    """Sequences of 3 + 4 and 1 + 3 tokens over two ranks: 8 padded positions in chunks of 2, and 4 in chunks of 1."""
    spans, rows = response_spans([7, 4], [4, 3], cp_rank=0, cp_size=2)
    # Rank 0 holds positions 0 1 6 7 and 0 3; positions 2 to 5 and 0 to 2 predict the responses.
    assert [(s.sample, s.row, s.start, s.stop) for s in spans] == [(1, 4, 0, 1)]
    assert rows == 6
    spans, rows = response_spans([7, 4], [4, 3], cp_rank=1, cp_size=2)
    assert [(s.sample, s.row, s.start, s.stop) for s in spans] == [
        (0, 0, 0, 2), (0, 2, 2, 4), (1, 4, 1, 2), (1, 5, 2, 3),
    ]  # fmt: skip
    with pytest.raises(ValueError, match="sample 1 has 4 tokens, 4 of them in the response: without a prompt"):
        response_spans([7, 4], [4, 4], 0, 1)


REFUSED = [
    ({"score_centering": None}, {}, "the arguments have no score_centering: pass --custom-config-path FILE.yaml"),
    ({"score_centering": {"tis_clip": 2.0}}, {}, r"score_centering.tis_clip is unknown; the settings are loss_corr"),
    ({"score_centering": {"tis_cap": "2,0"}}, {}, r"score_centering.tis_cap must be a number, got '2,0'"),
    ({"score_centering": {"true_vocab_size": 3.5}}, {}, r"score_centering.true_vocab_size must be an integer, got 3.5"),
    (
        {"score_centering": {"importance_weight": "tiz"}},
        {},
        r"importance_weight must be one of none, is, tis, mis, ppo",
    ),
    ({"score_centering": {"importance_weight": "tis", "tis_cap": -1}}, {}, r"importance_weight tis: .*cap must be pos"),
    ({"score_centering": {"tis_cap": 3.0}}, {}, r"score_centering\.tis_cap is of importance_weight tis, not none"),
    ({"vocab_size": None}, {}, r"score_centering.true_vocab_size is needed: the arguments have no vocab_size"),
    ({"use_tis": True}, {}, r"--use-tis does not go with this custom loss: .*set score_centering.importance_weight"),
    ({"use_kl_loss": True, "kl_loss_coef": 0.1}, {}, r"--use-kl-loss does not go with this custom loss"),
    (
        {"rollout_top_p": 0.9},
        {},
        r"--rollout-top-p and --rollout-top-k truncate: set score_centering.sampler_distribut",
    ),
    ({}, {"rollout_topk_token_ids": None}, r"the batch has no rollout_topk_token_ids: the sampler's distribution must"),
    ({}, {"rollout_topk_log_probs": None}, r"the batch has no rollout_topk_log_probs: the sampler's distribution must"),
    ({}, {"rollout_log_probs": None}, r"the batch has no rollout_log_probs: the importance weight needs"),
    ({}, {"advantages": None}, r"the batch has no advantages"),
    ({}, {"advantages": []}, r"advantages has 0 samples, but total_lengths 4"),
    ({}, {"loss_masks": "short"}, r"loss_masks of sample 1 has 8 rows, expected 9 \(the response's\)"),
    ({}, {"rollout_topk_token_ids": "short"}, r"rollout_topk_token_ids of sample 1 has 8 rows, expected 9"),
    ({}, {"rollout_topk_log_probs": "narrow"}, r"rollout_topk_log_probs of sample 1 is \[9, 4\], of sample 0 \[4, 5\]"),
    ({}, {"unconcat_tokens": "short"}, r"unconcat_tokens of sample 1 has 9 entries, but total_lengths says 10"),
    ({}, {"total_lengths": [70, 10, 7, 8]}, r"have fewer rows than the 95 that total_lengths take"),
]


def refused_on_rank() -> list[str]:
    """The message of each refusal."""
    ranks = Ranks(dist.group.WORLD, 0, 1)
    messages = []
    for changes, damage, _ in REFUSED:
        micro_batch = MicroBatch(samples(truncated=False), ranks, None, sliced=False)
        args = arguments(**SETTINGS)
        vars(args).update(changes)
        for key, value in damage.items():
            if value == "short":
                micro_batch.batch[key][1] = micro_batch.batch[key][1][:-1]
            elif value == "narrow":
                micro_batch.batch[key][1] = micro_batch.batch[key][1][:, :-1]
            else:
                micro_batch.batch[key] = value
        with pytest.raises(ValueError) as error:  # noqa: PT011  # the caller matches every message
            framework_loss(args, micro_batch.batch, micro_batch.logits, micro_batch.sum_of_sample_mean, ranks)
        messages.append(str(error.value))
    args = arguments(**SETTINGS)
    args.allgather_cp = True
    with pytest.raises(ValueError, match="--allgather-cp cuts sequences"):
        framework_loss(args, {}, torch.zeros(1, 1, 1), torch.sum, Ranks(dist.group.WORLD, 0, 2))
    return messages


def test_refusals_name_what_is_missing() -> None:
    import re

    (messages,) = run_ranks(refused_on_rank, 1)
    for message, (_, _, pattern) in zip(messages, REFUSED, strict=True):
        assert re.search(pattern, message), message
