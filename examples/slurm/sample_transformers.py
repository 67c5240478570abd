"""A sampler on Hugging Face transformers: runs anywhere, for tests and small models. See sampling_loop.py.

SAMPLER=(examples/slurm/sample_transformers.py --prompts prompts.jsonl --groups-per-step 16 --max-tokens 64
    --true-vocab-size 151936)
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import sampling_loop
import torch
import transformers
from torch import Tensor

from megatron_sc.rollouts import SamplerFingerprint, capture


class TransformersEngine:
    """``model.generate``, with the top k of the distribution that each token was drawn from.

    Args:
        arguments: of the command line.
    """

    def __init__(self, arguments: argparse.Namespace):
        self._arguments = arguments
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self._sampling = capture.Sampling(temperature=arguments.temperature)
        torch.manual_seed(int(sampling_loop.random_stream(arguments.seed).generate_state(2).view("uint64")[0] >> 1))

    def fingerprint(self) -> SamplerFingerprint:
        """See ``Engine``."""
        dtype = self._arguments.dtype
        return self._sampling.fingerprint(
            engine="transformers",
            engine_version=transformers.__version__,
            weight_dtype=dtype,
            activation_dtype=dtype,
            kv_cache_dtype=dtype,
        )

    def load(self, path: Path) -> None:
        """See ``Engine``."""
        model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, self._arguments.dtype))
        self._model = model.to(self._device).eval()
        ends = self._model.generation_config.eos_token_id
        self._ends = [] if ends is None else [ends] if isinstance(ends, int) else list(ends)

    @torch.no_grad()
    def generate(self, prompts: Sequence[Sequence[int]], version: int) -> list[list[capture.Response]]:
        """See ``Engine``."""
        samples = self._arguments.samples_per_prompt
        longest = max(map(len, prompts))
        tokens = torch.zeros(len(prompts), longest, dtype=torch.long)
        attended = torch.zeros_like(tokens)
        for row, prompt in enumerate(prompts):  # padded on the left: generation goes on at the right
            tokens[row, longest - len(prompt) :] = torch.tensor(prompt)
            attended[row, longest - len(prompt) :] = 1
        output = self._model.generate(
            tokens.to(self._device),
            attention_mask=attended.to(self._device),
            generation_config=transformers.GenerationConfig(
                do_sample=True,
                temperature=self._arguments.temperature,
                top_k=0,
                top_p=1.0,
                max_new_tokens=self._arguments.max_tokens,
                num_return_sequences=samples,
                eos_token_id=self._ends or None,
                pad_token_id=self._ends[0] if self._ends else 0,
                output_scores=True,
                return_dict_in_generate=True,
            ),
        )
        generated = output.sequences[:, longest:].cpu()
        heads = [self._head(scores, generated[:, place]) for place, scores in enumerate(output.scores)]
        sampled, ids, logprobs, tails = (torch.stack(parts, dim=1) for parts in zip(*heads, strict=True))
        return [
            [
                self._response(prompt, generated[row], sampled[row], ids[row], logprobs[row], tails[row], version)
                for row in range(number * samples, (number + 1) * samples)
            ]
            for number, prompt in enumerate(prompts)
        ]

    def _head(self, scores: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Of one position of all sequences: log q of the chosen token, and the head with its tail's log mass."""
        logq = scores[:, : self._arguments.true_vocab_size].float().log_softmax(dim=1).cpu()  # after the temperature
        logprobs, ids = logq.topk(self._arguments.head_size, dim=1)
        tail = logq.scatter(1, ids, -torch.inf).logsumexp(dim=1)  # summed over the tail, not 1 - head
        return logq.gather(1, chosen[:, None])[:, 0], ids, logprobs, tail

    def _response(
        self,
        prompt: Sequence[int],
        generated: Tensor,
        sampled: Tensor,
        ids: Tensor,
        logprobs: Tensor,
        tail: Tensor,
        version: int,
    ) -> capture.Response:
        """One response up to its first end-of-sequence token; what follows that is padding."""
        ends = [place for place, token in enumerate(generated.tolist()) if token in self._ends]
        length = ends[0] + 1 if ends else len(generated)
        return capture.arrays.response(
            list(prompt),
            generated[:length].numpy(),
            sampled[:length].numpy(),
            version,
            self._sampling,
            head_ids=ids[:length].numpy(),
            head_logprobs=logprobs[:length].numpy(),
            log_tail_mass=tail[:length].numpy(),
            finish_reason="stop" if ends else "length",
        )


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sampling_loop.add_arguments(parser)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    return parser.parse_args(words)


def main() -> None:
    """Sample."""
    arguments = parse()
    sampling_loop.run(TransformersEngine(arguments), arguments)


if __name__ == "__main__":
    main()
