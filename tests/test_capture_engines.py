"""Each engine's payload becomes the response that the sampler's dense distribution says."""

import base64
import json
import random
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks import capture as benchmark
from megatron_sc.rollouts import ExpertRoutes
from megatron_sc.rollouts.capture import CaptureError, sglang, tinker, vllm
from megatron_sc.rollouts.capture.sampling import NEUTRAL
from tests.payloads import (
    PROMPT,
    ModelInput,
    SampledSequence,
    SampleResponse,
    SamplingMask,
    TinkerParams,
    Truth,
    VllmParams,
    WeightVersionSpan,
    mutate,
    npy_base64,
    sglang_output,
    sglang_support,
    tinker_response,
    truth,
    vllm_chat_json,
    vllm_completion_json,
    vllm_flat,
    vllm_generate_json,
    vllm_output,
    vllm_rows,
)

K = 4
SOURCE = truth(40)
SUPPORT = truth(40, top_k=6)
PROCESSED = "processed_logprobs"
ROUTES = np.arange(42 * 2 * 3).reshape(42, 2, 3) % 8  # of all but the last of 3 + 40 tokens


def check(response, source: Truth, k: int, version: int = 7) -> None:
    """Against the dense distribution: the same k tokens in every row, whatever was sampled."""
    assert response.prompt_ids.tolist() == PROMPT
    np.testing.assert_array_equal(response.response_ids, source.tokens)
    np.testing.assert_array_equal(response.sampled_logprobs, source.sampled.astype(np.float32))
    np.testing.assert_array_equal(response.weight_version, version)
    np.testing.assert_array_equal(response.head.sizes, k)
    np.testing.assert_array_equal(response.head.ids.reshape(-1, k), source.top(k))
    np.testing.assert_array_equal(response.head.logprobs.reshape(-1, k), source.at(source.top(k)))
    assert response.response_mask.all()
    assert (response.temperature, response.head_is_support) == (1, False)


def through_json(body: dict) -> dict:
    return json.loads(json.dumps(body))


EVERY = Truth(np.repeat(truth(1, seed=2).logq, 50, axis=0), np.arange(50))
"""One distribution, and each of its tokens as the sampled one."""
REQUEST = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
PATHS = {
    "vllm dicts": lambda s: vllm.responses(
        vllm_output(s, vllm_rows(s, K)), VllmParams(K), logprobs_mode=PROCESSED, weight_version=7
    ),
    "vllm flat": lambda s: vllm.responses(
        vllm_output(s, vllm_flat(s, K)), VllmParams(K), logprobs_mode=PROCESSED, weight_version=7
    ),
    "vllm generate": lambda s: vllm.responses_from_json(
        vllm_generate_json(s, K),
        {"sampling_params": REQUEST | {"logprobs": K}},
        logprobs_mode=PROCESSED,
        weight_version=7,
    ),
    "vllm completion": lambda s: vllm.responses_from_json(
        vllm_completion_json(s, K), REQUEST | {"logprobs": K}, logprobs_mode=PROCESSED, weight_version=7
    ),
    "vllm chat": lambda s: vllm.responses_from_json(
        vllm_chat_json(s, K + 1), REQUEST | {"top_logprobs": K + 1}, logprobs_mode=PROCESSED, weight_version=7
    ),
    "sglang": lambda s: sglang.responses(sglang_output(s, K), {}),
    "tinker": lambda s: tinker.responses(tinker_response(s, K + 1), PROMPT, TinkerParams(), weight_version=7),
}


@pytest.mark.parametrize("path", PATHS)
def test_the_head_does_not_depend_on_the_sampled_token(path):
    (response,) = PATHS[path](EVERY)
    check(response, EVERY, K)


# vLLM


@pytest.mark.parametrize("rows", [vllm_rows, vllm_flat])
def test_vllm_output(rows):
    output = vllm_output(SOURCE, rows(SOURCE, K))
    (response,) = vllm.responses(output, VllmParams(K), logprobs_mode=PROCESSED, weight_version=7)
    check(response, SOURCE, K)
    assert (response.finish_reason, response.name, response.expert_routes) == ("stop", "cmpl-1/0", None)


def test_vllm_flat_rows_made_from_dicts():
    # vLLM appends dicts to FlatLogprobs when it puts streamed parts together: k or k + 1 entries.
    flat = vllm_flat(SOURCE, 0)
    flat.__init__()
    for row in vllm_rows(SOURCE, K):
        flat.add(list(row), [entry.logprob for entry in row.values()])
    (response,) = vllm.responses(
        vllm_output(SOURCE, flat), VllmParams(K), logprobs_mode="raw_logprobs", weight_version=7
    )
    check(response, SOURCE, K)


def test_vllm_choices_versions_routes():
    spans = [WeightVersionSpan("3", 0, 25), WeightVersionSpan("4", 25, 40)]
    output = vllm_output(SOURCE, vllm_rows(SOURCE, K), weight_versions=spans, routed_experts=ROUTES.astype(np.uint8))
    second = truth(8, seed=5)
    output.outputs += vllm_output(second, vllm_rows(second, K), finish_reason="length").outputs
    output.outputs[1].index, output.outputs[1].weight_versions = 1, [WeightVersionSpan("4", 0, 8)]
    a, b = vllm.responses(output, VllmParams(K, n=2), logprobs_mode=PROCESSED)
    assert a.weight_version.tolist() == [3] * 25 + [4] * 15
    assert set(b.weight_version) == {4}
    np.testing.assert_array_equal(a.expert_routes[:-1], ROUTES)
    assert (a.expert_routes[-1] == -1).all()
    assert a.expert_routes.dtype == np.int16
    assert (b.name, b.finish_reason, b.expert_routes) == ("cmpl-1/1", "length", None)
    (mapped, _) = vllm.responses(output, VllmParams(K), logprobs_mode=PROCESSED, weight_version={"3": 30, "4": 40})
    assert mapped.weight_version.tolist() == [30] * 25 + [40] * 15


def test_vllm_routes_from_the_middle_of_the_prompt():
    output = vllm_output(SOURCE, vllm_rows(SOURCE, K), routed_experts=ROUTES[2:])
    params = VllmParams(K, routed_experts_prompt_start=2)
    (response,) = vllm.responses(output, params, logprobs_mode=PROCESSED, weight_version=7)
    assert (response.expert_routes[[0, 1, -1]] == -1).all()
    np.testing.assert_array_equal(response.expert_routes[2:-1], ROUTES[2:])
    with pytest.raises(CaptureError, match=r"routed_experts has shape \[40, 2, 3\]; must be \[42, layers, top-k\]"):
        vllm.responses(output, VllmParams(K), logprobs_mode=PROCESSED, weight_version=7)


def test_vllm_without_heads():
    output = vllm_output(SOURCE, vllm_rows(SOURCE, 0))
    (response,) = vllm.responses(output, VllmParams(0), logprobs_mode=PROCESSED, weight_version=7)
    assert response.head is None
    np.testing.assert_array_equal(response.sampled_logprobs, SOURCE.sampled.astype(np.float32))


@pytest.mark.parametrize("rows", [vllm_rows, vllm_flat])
def test_vllm_support(rows):
    params = VllmParams(8, top_k=6)
    mask = SamplingMask([np.flatnonzero(np.isfinite(row)).tolist() for row in SUPPORT.logq])
    output = vllm_output(SUPPORT, rows(SUPPORT, 8), sampling_mask=mask)
    (response,) = vllm.responses(output, params, logprobs_mode=PROCESSED, weight_version=7)
    assert response.head_is_support
    np.testing.assert_array_equal(response.head.sizes, 6)
    np.testing.assert_array_equal(response.head.ids.reshape(-1, 6), SUPPORT.top(6))
    narrow = vllm_output(SUPPORT, rows(SUPPORT, 5), sampling_mask=mask)
    with pytest.raises(CaptureError, match="position 0: 6 tokens could be sampled, 5 log-probabilities were asked for"):
        vllm.responses(narrow, VllmParams(5, top_k=6), logprobs_mode=PROCESSED, weight_version=7)
    narrow.outputs[0].sampling_mask = None
    with pytest.raises(CaptureError, match=r"position \d+: the [45] listed tokens hold 0\.[0-9]+ of the mass"):
        vllm.responses(narrow, VllmParams(5, top_k=6), logprobs_mode=PROCESSED, weight_version=7)


@pytest.mark.parametrize(
    ("params", "mode", "message"),
    [
        ({"top_p": 0.9}, "raw_logprobs", "raw, but tokens were drawn with top_p 0.9; start vLLM with --logprobs-mode"),
        ({"temperature": 0.6}, "raw_logprobs", "raw, but tokens were drawn with temperature 0.6"),
        ({"repetition_penalty": 1.1}, "raw_logprobs", "drawn with repetition_penalty 1.1"),
        ({"logit_bias": {5: -100.0}}, "raw_logprobs", "drawn with logit_bias"),
        ({"temperature": 0.0}, PROCESSED, ": temperature is 0.0; must be a number > 0"),
        ({}, "processed_logits", "logprobs_mode is 'processed_logits'; must be one of"),
        ({"logprobs": None}, PROCESSED, "SamplingParams.logprobs is None; set it to k"),
        ({"logprobs": -1}, PROCESSED, "logprobs is -1; ask for a number"),
        ({"logprobs": 6}, PROCESSED, "position 0: [45] tokens listed, asked for 6"),
        ({"logprobs": 2}, PROCESSED, "position 0: [45] tokens listed, asked for 2"),
        ({"logprob_token_ids": [1]}, PROCESSED, "logprob_token_ids is set"),
        ({"trace_decode_token_ids": [1]}, PROCESSED, "forced tokens are not sampled"),
        ({"watermarking": True}, PROCESSED, "watermarking is set"),
    ],
)
def test_vllm_calls_that_cannot_be_used(params, mode, message):
    output = vllm_output(SOURCE, vllm_rows(SOURCE, K))
    with pytest.raises(CaptureError, match=f"vllm request cmpl-1.*{message}"):
        vllm.responses(output, VllmParams(**{"logprobs": K} | params), logprobs_mode=mode, weight_version=7)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda o, c: setattr(o, "finished", False), "finished is False; capture the last output"),
        (lambda o, c: setattr(o, "prompt_token_ids", None), "prompt_token_ids is None"),
        (lambda o, c: setattr(c, "logprobs", None), "logprobs is None; set SamplingParams.logprobs"),
        (lambda o, c: (setattr(c, "logprobs", None), setattr(o, "prompt_logprobs", [None])), "another pass's"),
        (lambda o, c: c.logprobs.__setitem__(0, None), "position 0: logprobs is None"),
        (lambda o, c: c.logprobs.__setitem__(3, {}), "position 3: no log-probabilities"),
        (lambda o, c: c.token_ids.pop(), "logprobs has 40 entries and response_ids 39"),  # stop words cut from ids only
        (lambda o, c: c.token_ids.append(2), "logprobs has 40 entries and response_ids 41"),
        (lambda o, c: c.logprobs.insert(0, c.logprobs.pop()), "position 0: token_ids has .* but logprobs begins with"),
        (lambda o, c: setattr(c, "finish_reason", "error"), "the engine failed"),
        (lambda o, c: c.weight_versions.pop(), "weight_versions ends at 25 of 40 tokens"),
        (lambda o, c: c.weight_versions.pop(0), r"weight_versions has \[25, 40\) where \[0, ...\) follows"),
        (lambda o, c: setattr(c.weight_versions[0], "version", "default"), "'default', not a step of the trainer"),
        (lambda o, c: setattr(c, "weight_versions", None), "no weight version is reported; pass weight_version="),
    ],
)  # fmt: skip
def test_vllm_outputs_that_cannot_be_used(change, message):
    spans = [WeightVersionSpan("3", 0, 25), WeightVersionSpan("4", 25, 40)]
    output = vllm_output(SOURCE, vllm_rows(SOURCE, K), weight_versions=spans)
    vllm.responses(output, VllmParams(K), logprobs_mode=PROCESSED)
    change(output, output.outputs[0])
    with pytest.raises(CaptureError, match=message):
        vllm.responses(output, VllmParams(K), logprobs_mode=PROCESSED)


def test_vllm_versions_that_are_not_known():
    spans = [WeightVersionSpan("a", 0, 25), WeightVersionSpan("b", 25, 40)]
    output = vllm_output(SOURCE, vllm_rows(SOURCE, K), weight_versions=spans)
    with pytest.raises(CaptureError, match=r"weights changed during the response \('a', 'b'\)"):
        vllm.responses(output, VllmParams(K), logprobs_mode=PROCESSED, weight_version=7)
    with pytest.raises(CaptureError, match="weight_version is 'b', which weight_version= does not map"):
        vllm.responses(output, VllmParams(K), logprobs_mode=PROCESSED, weight_version={"a": 1})


@pytest.mark.parametrize(
    ("body", "request_", "k"),
    [
        (vllm_generate_json(SOURCE, K), {"sampling_params": REQUEST | {"logprobs": K}}, K),
        (vllm_completion_json(SOURCE, K), REQUEST | {"logprobs": K}, K),
        (vllm_chat_json(SOURCE, K + 1), REQUEST | {"logprobs": True, "top_logprobs": K + 1}, K),
    ],
    ids=["generate", "completion", "chat"],
)
def test_vllm_json(body, request_, k):
    body = through_json(body)
    (response,) = vllm.responses_from_json(body, request_, logprobs_mode=PROCESSED, weight_version=7)
    check(response, SOURCE, k)
    body["choices"][0] |= {
        "weight_versions": [{"version": "8", "start": 0, "end": 40}],
        "routed_experts": npy_base64(ROUTES.astype(np.uint16)),
    }
    (response,) = vllm.responses_from_json(body, request_, logprobs_mode=PROCESSED)
    assert set(response.weight_version) == {8}
    np.testing.assert_array_equal(response.expert_routes[:-1], ROUTES)
    without = json.loads(json.dumps(request_).replace('"top_k": 0, ', ""))
    with pytest.raises(CaptureError, match="the request does not set top_k; servers take it"):
        vllm.responses_from_json(body, without, logprobs_mode=PROCESSED)
    body["choices"][0]["routed_experts"] = "AAAA"
    with pytest.raises(CaptureError, match="routed_experts is no base64 of an npy array"):
        vllm.responses_from_json(body, request_, logprobs_mode=PROCESSED)


@pytest.mark.parametrize("kind", ["generate", "completion", "chat"])
def test_vllm_json_support(kind):
    # The candidates beyond the support have log-probability -9999.
    make, request = {
        "generate": (vllm_generate_json, {"sampling_params": REQUEST | {"top_k": 6, "logprobs": 8}}),
        "completion": (vllm_completion_json, REQUEST | {"top_k": 6, "logprobs": 8}),
        "chat": (vllm_chat_json, REQUEST | {"top_k": 6, "logprobs": True, "top_logprobs": 8}),
    }[kind]
    (response,) = vllm.responses_from_json(
        through_json(make(SUPPORT, 8)), request, logprobs_mode=PROCESSED, weight_version=7
    )
    assert response.head_is_support
    np.testing.assert_array_equal(response.head.ids.reshape(-1, 6), SUPPORT.top(6))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b, c: c["logprobs"]["tokens"].__setitem__(0, " the"), "' the' is text; set return_tokens_as_token_ids"),
        (
            lambda b, c: c["logprobs"]["top_logprobs"].__setitem__(0, None),
            "position 0: top_logprobs is null; an echoed",
        ),
        (lambda b, c: c["logprobs"]["top_logprobs"][2].update({"token_id:1x": -1.0}), "is text"),
        (lambda b, c: c.update(prompt_token_ids=None), "no prompt_token_ids; set return_token_ids"),
        (lambda b, c: c.update(logprobs=None), "logprobs is null"),
        (lambda b, c: c["token_ids"].pop(), "logprobs has 40 entries and response_ids 39"),
        (lambda b, c: b.update(object="chat.completion.chunk"), "object is 'chat.completion.chunk'"),
        (lambda b, c: b.pop("choices"), "no choices in"),
    ],
)
def test_vllm_json_that_cannot_be_used(change, message):
    body = through_json(vllm_completion_json(SOURCE, K))
    change(body, body["choices"][0])
    with pytest.raises(CaptureError, match=message):
        vllm.responses_from_json(body, REQUEST | {"logprobs": K}, logprobs_mode=PROCESSED, weight_version=7)


def test_vllm_json_prompt_and_tokens_from_elsewhere():
    body = through_json(vllm_completion_json(SOURCE, K))
    body["choices"][0] |= {"prompt_token_ids": None, "token_ids": None}
    request = {"prompt": PROMPT, "logprobs": K, "temperature": 1}
    (response,) = vllm.responses_from_json(body, request, logprobs_mode=PROCESSED, weight_version=7, defaults=NEUTRAL)
    check(response, SOURCE, K)


def test_vllm_sentinel_for_the_sampled_token():
    body = through_json(vllm_generate_json(SOURCE, K))
    content = body["choices"][0]["logprobs"]["content"]
    content[5] = {"token_id": content[5]["token_id"], "logprob": -9999.0, "rank": None, "top_logprobs": []}
    with pytest.raises(CaptureError, match="position 5: no log-probabilities"):
        vllm.responses_from_json(
            body, {"sampling_params": REQUEST | {"logprobs": K}}, logprobs_mode=PROCESSED, weight_version=7
        )


def test_vllm_fingerprint():
    config = SimpleNamespace(
        model_config=SimpleNamespace(dtype="torch.bfloat16", quantization=None, logprobs_mode=PROCESSED),
        cache_config=SimpleNamespace(cache_dtype="auto"),
    )
    plain = vllm.fingerprint(config, VllmParams(K, temperature=0.7, top_k=-1), "0.33.0")
    assert (plain.engine, plain.engine_version, plain.temperature, plain.top_k) == ("vllm", "0.33.0", 0.7, 0)
    assert (plain.weight_dtype, plain.kv_cache_dtype, plain.logprobs_mode) == ("bfloat16", "bfloat16", "processed")
    config.model_config.quantization, config.cache_config.cache_dtype = "fp8", "fp8_e4m3"
    config.watermark_config = object()
    with pytest.raises(CaptureError, match="the engine has a watermark_config"):
        vllm.fingerprint(config, VllmParams(K))
    quantized = vllm.fingerprint(config, VllmParams(K, watermarking=False))
    assert (quantized.weight_dtype, quantized.quantization, quantized.kv_cache_dtype) == ("", "fp8", "fp8_e4m3")


# SGLang

GENERATE = {"sampling_params": {"temperature": 1.0}, "top_logprobs_num": K, "return_logprob": True}


@pytest.mark.parametrize("form", ["nested", "flat", "b64"])
def test_sglang_output(form):
    output = sglang_output(SOURCE, K, form)
    (response,) = sglang.responses(through_json(output), GENERATE)
    check(response, SOURCE, K)
    assert (response.finish_reason, response.name) == ("stop", "rid-1")
    (again,) = sglang.responses([output], GENERATE)  # of Engine.generate: tuples
    check(again, SOURCE, K)


def test_sglang_versions_routes_and_prompt():
    spans = [{"version": "3", "start": 0, "end": 25}, {"version": "4", "start": 25, "end": 40}]
    routes = base64.b64encode(ROUTES.astype("<i4").tobytes()).decode()
    output = sglang_output(SOURCE, K, weight_versions=spans, routed_experts=routes)
    del output["prompt_token_ids"]
    shape = ExpertRoutes(layers=2, topk=3, experts=8)
    (response,) = sglang.responses(output, GENERATE | {"input_ids": PROMPT}, expert_routes=shape)
    assert response.prompt_ids.tolist() == PROMPT
    assert response.weight_version.tolist() == [3] * 25 + [4] * 15
    np.testing.assert_array_equal(response.expert_routes[:-1], ROUTES)
    with pytest.raises(CaptureError, match="routed_experts comes without a shape; pass expert_routes="):
        sglang.responses(output, GENERATE | {"input_ids": PROMPT})
    with pytest.raises(CaptureError, match="no multiple of 5 layers times top-3"):
        sglang.responses(output, GENERATE | {"input_ids": PROMPT}, expert_routes=ExpertRoutes(5, 3, 8))
    with pytest.raises(CaptureError, match="no prompt_token_ids; set return_prompt_token_ids"):
        sglang.responses(output, GENERATE | {"text": "a prompt"}, expert_routes=shape)


def test_sglang_support():
    request = {"sampling_params": {"top_k": 6}, "top_logprobs_num": 8}
    untruncated = truth(40)  # the top log-probabilities that SGLang reports beside the support
    output = sglang_output(Truth(untruncated.logq, SUPPORT.tokens), 8, **sglang_support(SUPPORT))
    (response,) = sglang.responses(through_json(output), request)
    assert response.head_is_support
    np.testing.assert_array_equal(response.sampled_logprobs, SUPPORT.sampled.astype(np.float32))
    np.testing.assert_array_equal(response.head.ids.reshape(-1, 6), SUPPORT.top(6))
    meta = output["meta_info"]
    selected = meta | {"output_token_sampling_logprobs": SUPPORT.sampled.tolist()}
    for broken in (selected, {key: value for key, value in meta.items() if "sampling" not in key}):
        with pytest.raises(
            CaptureError, match=r"a truncated sampler.* set return_sampling_mask and sampling_logprobs_mo"
        ):
            sglang.responses(output | {"meta_info": broken}, request)
    meta["output_token_sampling_mask"][3] = [49, *meta["output_token_sampling_mask"][3][1:]]
    meta["output_token_sampling_mask"][4] = meta["output_token_sampling_mask"][4][:-1]
    with pytest.raises(CaptureError, match="rows of different lengths"):
        sglang.responses(output, request)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda o, m: m.update(finish_reason=None), "finish_reason is null; capture the finished output"),
        (lambda o, m: m.pop("output_token_logprobs"), "no output_token_logprobs; set return_logprob"),
        (lambda o, m: (m.pop("output_token_logprobs"), m.update(input_token_logprobs=[1])), "another pass's"),
        (lambda o, m: o["output_ids"].pop(), "output_token_logprobs has 40 entries and response_ids 39"),
        (lambda o, m: o["output_ids"].reverse(), r"position \d+: output_ids has token"),
        (lambda o, m: m["output_top_logprobs"].__setitem__(0, None), "position 0: output_top_logprobs is null"),
        (lambda o, m: m["output_top_logprobs"].pop(), "top log-probabilities has 39 entries and response_ids 40"),
        (lambda o, m: m["output_top_logprobs"].insert(0, m["output_top_logprobs"].pop()), "same position|of one"),
        (lambda o, m: m["output_token_logprobs"].__setitem__(2, (None, o["output_ids"][2], "")), "position 2: .* nan"),
        (lambda o, m: m["output_token_logprobs"].__setitem__(2, None), "position 2: output_token_logprobs is null"),
        (lambda o, m: m.update(weight_version="default"), "weight_version is 'default', not a step of the trainer"),
    ],
)  # fmt: skip
def test_sglang_outputs_that_cannot_be_used(change, message):
    output = sglang_output(SOURCE, K)
    change(output, output["meta_info"])
    with pytest.raises(CaptureError, match=f"sglang request rid-1.*{message}"):
        sglang.responses(output, GENERATE)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"output_top_logprobs_null_prefix": 1}, "output_top_logprobs_null_prefix is 1"),
        ({"output_top_logprobs_val_flat_b64_dtype": "float16"}, "float16'; must be float32"),
        ({"output_top_logprobs_idx_flat_b64": "AAA"}, "no base64 of int32"),
        ({"output_top_logprobs_shape": [39, 4]}, r"160 values for shape \[39, 4\]"),
    ],
)
def test_sglang_flat_that_cannot_be_used(change, message):
    output = sglang_output(SOURCE, K, "b64", **change)
    with pytest.raises(CaptureError, match=message):
        sglang.responses(output, GENERATE)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"temperature": 0}, "temperature is 0"),
        ({"top_k": 1}, "top_k is 1; a greedy response"),
        ({"watermark": {"key": 1}}, "watermark is set"),
        ({"beam_width": 4}, "beam search does not sample"),
    ],
)
def test_sglang_calls_that_cannot_be_used(params, message):
    with pytest.raises(CaptureError, match=message):
        sglang.responses(sglang_output(SOURCE, K), {"sampling_params": params})


def test_sglang_original_logprobs_at_another_temperature():
    request = {"sampling_params": {"temperature": 0.7}}
    sglang.responses(sglang_output(SOURCE, K), request)
    with pytest.raises(CaptureError, match=r"raw, but tokens were drawn with temperature 0.7; start SGLang without"):
        sglang.responses(sglang_output(SOURCE, K), request, original_logprobs=True)
    sglang.responses(sglang_output(SOURCE, K), GENERATE, original_logprobs=True)


def test_sglang_chat():
    output = sglang_output(SOURCE, K, "b64")
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": ""},
        "prompt_token_ids": PROMPT,
        "response_token_ids": output["output_ids"],
        "meta_info": output["meta_info"],
    }
    body = {"id": "chat-1", "object": "chat.completion", "choices": [choice]}
    request = {"temperature": 1, "top_p": 1, "top_k": -1, "min_p": 0, "logprobs": True, "top_logprobs": K}
    (response,) = sglang.responses_from_chat(through_json(body), request)
    check(response, SOURCE, K)
    with pytest.raises(CaptureError, match="the request does not set temperature"):
        sglang.responses_from_chat(body, {"top_logprobs": K})
    del choice["meta_info"]
    with pytest.raises(CaptureError, match="sglang request chat-1/0: no meta_info; set return_meta_info"):
        sglang.responses_from_chat(body, request)


def test_sglang_fingerprint():
    info = {"version": "0.5.23", "dtype": "bfloat16", "kv_cache_dtype": "auto", "quantization": None}
    plain = sglang.fingerprint(info, {"temperature": 0.7, "top_k": -1})
    assert (plain.engine, plain.engine_version, plain.temperature, plain.top_k) == ("sglang", "0.5.23", 0.7, 0)
    assert (plain.weight_dtype, plain.kv_cache_dtype) == ("bfloat16", "bfloat16")
    quantized = sglang.fingerprint(info | {"quantization": "fp8", "kv_cache_dtype": "fp8_e4m3"}, {})
    assert (quantized.weight_dtype, quantized.quantization, quantized.kv_cache_dtype) == ("", "fp8", "fp8_e4m3")


# Tinker


def test_tinker_response():
    response = tinker_response(SOURCE, K + 1)
    (captured,) = tinker.responses(response, ModelInput(PROMPT), TinkerParams(), weight_version=7)
    check(captured, SOURCE, K)  # the unfilled last entry is no token 0
    assert (captured.finish_reason, captured.name) == ("stop", "seq-1")
    ids = SOURCE.top(K)
    lists = [list(zip(row, line, strict=True)) for row, line in zip(ids.tolist(), SOURCE.at(ids).tolist(), strict=True)]
    sequence = SampledSequence(
        "length", "s", tokens=SOURCE.tokens.tolist(), logprobs=SOURCE.sampled.tolist(), topk_logprobs=lists
    )
    (captured,) = tinker.responses(SampleResponse([sequence]), PROMPT, TinkerParams(), weight_version=7)
    check(captured, SOURCE, K)


def test_tinker_that_cannot_be_used():
    response = tinker_response(SOURCE, K)
    with pytest.raises(CaptureError, match=r"drawn with temperature 0.7; sample at temperature 1"):
        tinker.responses(response, PROMPT, TinkerParams(temperature=0.7), weight_version=7)
    tinker.responses(response, PROMPT, TinkerParams(temperature=0.7), weight_version=7, logprobs="processed")
    with pytest.raises(CaptureError, match=r"drawn with top_p 0.9"):
        tinker.responses(response, PROMPT, TinkerParams(top_p=0.9), weight_version=7)
    sequence = SampledSequence("stop", "s", tokens=[1, 2], logprobs=[-1.0, -1.0], topk_logprobs=[[(1, -1.0)], None])
    with pytest.raises(CaptureError, match="tinker request s, position 1: topk_logprobs is None"):
        tinker.responses(SampleResponse([sequence]), PROMPT, TinkerParams(), weight_version=7)


# All of them


REPLIES = {
    "generate": (
        vllm_generate_json(SOURCE, K),
        lambda b: vllm.responses_from_json(
            b, {"sampling_params": REQUEST | {"logprobs": K}}, logprobs_mode=PROCESSED, weight_version=7
        ),
    ),
    "completion": (
        vllm_completion_json(SOURCE, K),
        lambda b: vllm.responses_from_json(b, REQUEST | {"logprobs": K}, logprobs_mode=PROCESSED, weight_version=7),
    ),
    "chat": (
        vllm_chat_json(SOURCE, K),
        lambda b: vllm.responses_from_json(b, REQUEST | {"top_logprobs": K}, logprobs_mode=PROCESSED, weight_version=7),
    ),
    "sglang": (sglang_output(SOURCE, K), lambda b: sglang.responses(b, GENERATE)),
    "sglang b64": (sglang_output(SOURCE, K, "b64"), lambda b: sglang.responses(b, GENERATE)),
    "sglang support": (
        sglang_output(SUPPORT, 8, **sglang_support(SUPPORT)),
        lambda b: sglang.responses(b, {"sampling_params": {"top_k": 6}}),
    ),
}


@pytest.mark.parametrize("kind", REPLIES)
def test_mutated_replies_are_refused_by_name_or_captured(kind):
    body, read = REPLIES[kind]
    text = json.dumps(body)
    rng = random.Random(0)
    messages = []
    for _ in range(200):
        try:
            read(mutate(json.loads(text), rng))
        except CaptureError as error:  # any other exception fails
            messages.append(str(error))
    assert len(messages) > 50
    assert all(message.startswith(("vllm request", "sglang request")) for message in messages)


def test_the_benchmark_measures_every_path(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["capture", "--k", "3", "--tokens", "64", "--length", "32"])
    benchmark.main()
    assert len([line for line in capsys.readouterr().out.splitlines() if "│" in line]) == 8
