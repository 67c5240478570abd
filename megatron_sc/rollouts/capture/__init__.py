"""From an engine's output to rollouts: arrays from the start, one error for what is not as it should be.

    from megatron_sc.rollouts import capture

    responses = capture.vllm.responses(output, params, logprobs_mode="processed_logprobs", weight_version=step)
    table = capture.to_table(responses, rewards, group_ids)     # columns, ready for RolloutWriter.write

One module per engine: ``vllm``, ``sglang``, ``tinker``; ``arrays`` for everything else. A response of several requests
(a tool's answer in between, an aborted and resumed generation) is put together by ``join``. No engine is imported: the
modules read attributes and keys. docs/capture.md says what to ask each engine for.
"""

from . import arrays, sglang, tinker, vllm
from .join import join
from .request import CaptureError
from .response import Response, to_table
from .sampling import Sampling

__all__ = ["CaptureError", "Response", "Sampling", "arrays", "join", "sglang", "tinker", "to_table", "vllm"]
