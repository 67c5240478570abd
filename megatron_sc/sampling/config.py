"""The embedded sampler's settings; command-line flags are generated from the fields."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from megatron_sc.precision.specs import SamplerSpec

from .distortion import Distortion, GaussianWeights, NoDistortion, QuantizedWeights
from .generate import SamplingParameters
from .simulated import noise_of, without_weight_changes
from .tasks import RewardMode, Task, TaskName, build_task

SamplerName = Literal["trainer", "gaussian", "int8", "int4", "fp8", "demonstrations"]


def _help(text: str) -> dict[str, str]:
    """A field's metadata: the text its flag shows."""
    return {"help": text}


@dataclass(frozen=True)
class SamplerConfig:
    """How the embedded sampler differs from the trainer, what it is asked, and what it records.

    Raises:
        ValueError: from ``__post_init__``; the message names the flag.
    """

    sampler: SamplerName = field(
        default="trainer",
        metadata=_help(
            "What samples the rollouts. trainer: the trainer's own weights. gaussian: the trainer plus a fixed "
            "Gaussian direction, added again after every step. int8, int4, fp8: the trainer's weights, quantized per "
            "output row. demonstrations: correct answers with reward 1, for a supervised warm start."
        ),
    )
    sampler_precision: str | None = field(
        default=None,
        metadata=_help(
            "Compute the rollouts as a quantized inference engine would: a name of docs/samplers.md, such as "
            "fp8-fp4kv or fp8-fp4kv+noise=0.02+staleness=8, or a .yaml file. With --sampler trainer or gaussian."
        ),
    )
    sampler_noise: float = field(
        default=0.5,
        metadata=_help("With --sampler gaussian: the noise's size, in standard deviations of each weight matrix."),
    )
    sampler_staleness: int = field(
        default=1,
        metadata=_help("Refresh the sampler's weights from the trainer every this many steps (1: before every step)."),
    )
    sampler_seed: int = field(
        default=1234, metadata=_help("Seed of the prompts, the draws and the Gaussian direction.")
    )
    sampler_temperature: float = field(default=1.0, metadata=_help("Sampling temperature, above 0."))
    sampler_top_p: float = field(
        default=1.0,
        metadata=_help("Sample from the most likely tokens up to this mass. Below 1 the whole support is recorded."),
    )
    sampler_top_k: int = field(
        default=0,
        metadata=_help("Sample from this many most likely tokens (0: all). Then the whole support is recorded."),
    )
    head_size: int = field(
        default=128,
        metadata=_help("Tokens of the sampler's distribution recorded at each position, most likely first (0: none)."),
    )
    num_draws: int = field(
        default=0,
        metadata=_help("Independent draws from the sampler recorded at each position, for the draws estimator."),
    )
    task: TaskName = field(
        default="reverse",
        metadata=_help("What is asked. reverse: a string of digits. countdown: reach a target with given numbers."),
    )
    task_size: int = field(
        default=0, metadata=_help("Digits to reverse or numbers to combine (0: the task's default, 6 and 3).")
    )
    reward_mode: RewardMode = field(
        default="fraction",
        metadata=_help(
            "binary: 1 for a correct answer, else 0. signed: 1 or -1. fraction: the fraction of the answer that is "
            "right."
        ),
    )
    prompts_per_step: int = field(
        default=16, metadata=_help("Prompts per training step, over all data-parallel ranks.")
    )
    samples_per_prompt: int = field(
        default=8, metadata=_help("Responses per prompt: the group of a group-centered advantage.")
    )

    def __post_init__(self) -> None:
        """Check the ranges."""
        for flag, value, is_valid, requirement in (
            ("--sampler-noise", self.sampler_noise, self.sampler_noise >= 0, "at least 0"),
            ("--sampler-staleness", self.sampler_staleness, self.sampler_staleness >= 1, "at least 1"),
            ("--sampler-seed", self.sampler_seed, self.sampler_seed >= 0, "at least 0"),
            (
                "--sampler-temperature",
                self.sampler_temperature,
                0 < self.sampler_temperature < float("inf"),
                "above 0 (a greedy sampler has no distribution to center under)",
            ),
            ("--sampler-top-p", self.sampler_top_p, 0 < self.sampler_top_p <= 1, "in (0, 1]"),
            ("--sampler-top-k", self.sampler_top_k, self.sampler_top_k >= 0, "at least 0"),
            ("--head-size", self.head_size, self.head_size >= 0, "at least 0"),
            ("--num-draws", self.num_draws, self.num_draws >= 0, "at least 0"),
            ("--task-size", self.task_size, self.task_size >= 0, "at least 0"),
            ("--prompts-per-step", self.prompts_per_step, self.prompts_per_step >= 1, "at least 1"),
            ("--samples-per-prompt", self.samples_per_prompt, self.samples_per_prompt >= 1, "at least 1"),
        ):
            if not is_valid:
                raise ValueError(f"{flag} is {value} but must be {requirement}")
        try:
            self.build_task()
        except ValueError as error:
            raise ValueError(f"--task-size {self.task_size}: {error}") from None
        self._check_precision()

    def _check_precision(self) -> None:
        if self.sampler_precision is None:
            return
        spec = self._load_precision()
        flag = f"--sampler-precision {self.sampler_precision}"
        if self.sampler not in ("trainer", "gaussian"):
            reason = "samples nothing" if self.sampler == "demonstrations" else "quantizes the weights already"
            raise ValueError(f"{flag} and --sampler {self.sampler}, which {reason}: leave one of them out")
        if spec.noise and self.sampler == "gaussian":
            raise ValueError(f"{flag} has noise {spec.noise} and --sampler gaussian adds more: leave one of them out")
        if spec.staleness > 1 and self.sampler_staleness > 1:
            raise ValueError(
                f"{flag} has staleness {spec.staleness} and --sampler-staleness is {self.sampler_staleness}: leave one "
                "of them out"
            )

    def _load_precision(self) -> SamplerSpec:
        try:
            return SamplerSpec.load(self.sampler_precision) if self.sampler_precision else SamplerSpec()
        except ValueError as error:
            raise ValueError(f"--sampler-precision: {error}") from None

    @property
    def truncates(self) -> bool:
        """Whether the sampler cuts its distribution, so that it records its whole support."""
        return self.sampler_top_p < 1 or self.sampler_top_k > 0

    def build_task(self) -> Task:
        """The task that ``task`` and ``task_size`` describe."""
        return build_task(self.task, self.task_size or None)

    def build_precision(self) -> SamplerSpec:
        """The numerics that ``sampler_precision`` names, without its noise and staleness."""
        return without_weight_changes(self._load_precision())

    @property
    def staleness(self) -> int:
        """Steps from one refresh of the sampler's weights to the next."""
        return max(self.sampler_staleness, self._load_precision().staleness)

    def build_distortion(self) -> Distortion:
        """The rule that ``sampler`` names, or the noise of ``sampler_precision``."""
        if self.sampler == "gaussian":
            return GaussianWeights(self.sampler_noise, self.sampler_seed)
        if self.sampler == "trainer":
            return noise_of(self._load_precision())
        if self.sampler == "demonstrations":
            return NoDistortion()
        return QuantizedWeights(self.sampler)

    def sampling_parameters(self) -> SamplingParameters:
        """How tokens are drawn for training."""
        return SamplingParameters(self.sampler_temperature, self.sampler_top_k, self.sampler_top_p, self.head_size)
