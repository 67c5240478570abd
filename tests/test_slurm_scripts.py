"""The scripts of a cluster job outside of Slurm: what they refuse and hand on; vLLM is only an interface here."""

from __future__ import annotations

import importlib
import json
import os
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from megatron_sc.rollouts import RolloutReader
from tests.distributed import free_port, run_ranks
from tests.slurm_jobs import QWEN3, SCRIPTS, flags_of, shell

JOB = SCRIPTS / "job.env"
ENDS = [3, 7, 11, 15, 19, 23, 27]  # end-of-sequence tokens of a test model
REQUIRED = "NODES=2 GPUS_PER_NODE=8 OUTPUT=/shared/run ROLLOUTS=/shared/rollouts\n"


@pytest.fixture
def examples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Import the samplers as their scripts import each other."""
    monkeypatch.syspath_prepend(str(SCRIPTS))


@pytest.mark.parametrize(
    ("script", "settings", "message"),
    [
        ("train.sbatch", "GPUS_PER_NODE=8 OUTPUT=/o ROLLOUTS=/r", "NODES must be a number, got ''"),
        ("train.sbatch", REQUIRED + "NODES=0", "NODES must be at least 1"),
        ("train.sbatch", REQUIRED + "OUTPUT=runs/one", "OUTPUT must be an absolute path, got 'runs/one'"),
        ("train.sbatch", None, "job.env is not a file: copy job.env and edit it"),
        ("nowhere.sbatch", REQUIRED, "nowhere.sbatch is not a file: name train.sbatch or train_and_sample.sbatch"),
        ("train_and_sample.sbatch", REQUIRED, "needs SAMPLER_NODES of at least 1"),
        ("train_and_sample.sbatch", REQUIRED + "SAMPLER_NODES=1", "needs a SAMPLER"),
    ],
)
def test_settings_that_cannot_work_are_refused(script: str, settings: str | None, message: str, tmp_path: Path) -> None:
    if settings is not None:
        (tmp_path / "job.env").write_text(settings)
    process = shell(SCRIPTS / "submit.sh", SCRIPTS / script, tmp_path / "job.env")
    assert process.returncode == 2
    assert message in process.stderr


def test_what_is_submitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The size of the job, then the settings' flags of sbatch, then those of the command line: the last one wins."""
    (tmp_path / "sbatch").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    job = tmp_path / "my job.env"
    job.write_text(REQUIRED + f"OUTPUT='{tmp_path}/my run' SAMPLER_NODES=3 SAMPLER=(s.py) SBATCH_ARGS=(--time=1:00)")
    script = SCRIPTS / "train_and_sample.sbatch"
    words = shell(SCRIPTS / "submit.sh", script, job, "--time=9:00", cwd=tmp_path).stdout.splitlines()
    assert words == [
        f"--chdir={SCRIPTS.parent.parent}", f"--output={tmp_path}/my run/logs/job-%j.log", "--nodes=5",
        "--ntasks-per-node=8", "--gpus-per-node=8", "--time=1:00", "--time=9:00", str(script), str(job),
    ]  # fmt: skip


def test_directives_stand_before_the_first_command() -> None:
    """Slurm ignores those behind it."""
    for script in SCRIPTS.glob("*.sbatch"):
        lines = script.read_text().splitlines()
        directives = [number for number, line in enumerate(lines) if line.startswith("#SBATCH")]
        assert directives == list(range(1, len(directives) + 1))


def test_a_folder_that_is_not_shared_is_named_with_its_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", "n7")
    for content in (None, "another job's word\n"):
        if content is not None:
            (tmp_path / "canary").write_text(content)
        process = shell(SCRIPTS / "canary.sh", tmp_path / "canary", "word")
        assert process.returncode == 1
        assert f"node n7 does not see {tmp_path}/canary" in process.stderr
    (tmp_path / "canary").write_text("word\n")
    assert shell(SCRIPTS / "canary.sh", tmp_path / "canary", "word").returncode == 0
    assert (tmp_path / "canary.n7").exists()


def test_a_rank_learns_its_place_from_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = {"PROCID": 11, "LOCALID": 3, "STEP_NUM_TASKS": 32, "STEP_TASKS_PER_NODE": "8(x4)"}
    for name, value in place.items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))
    monkeypatch.setenv("LOGS", str(tmp_path))
    names = "$RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE"
    assert shell(SCRIPTS / "rank.sh", "bash", "-c", f"echo {names}").stdout.split() == ["11", "3", "32", "8"]
    assert shell(SCRIPTS / "rank.sh", "bash", "-c", "exit 3").returncode == 3
    assert not (tmp_path / "refused").exists()
    assert shell(SCRIPTS / "rank.sh", "bash", "-c", "exit 2").returncode == 2
    assert (tmp_path / "refused").exists()


def validate_trainer_flags(words: list[str], ranks: int) -> dict[str, Any]:
    """As a rank of a job of ``ranks`` sees them. Runs in a worker of ``run_ranks(..., megatron=True)``."""
    from megatron.training.arguments import parse_and_validate_args

    from megatron_sc.training.arguments import add_arguments
    from megatron_sc.training.config_files import expand_argv
    from megatron_sc.training.plugin import ScoreCentering

    environment = mock.patch.dict(os.environ, RANK="0", WORLD_SIZE=str(ranks))
    with environment, mock.patch.object(sys, "argv", ["train", *expand_argv(words)]):
        args = parse_and_validate_args(extra_args_provider=add_arguments)
    ScoreCentering.from_args(args)
    names = ("prompts_per_step", "samples_per_prompt", "true_vocab_size", "seq_length", "max_staleness")
    return {name: getattr(args, name) for name in names}


def test_the_example_is_a_job_that_megatron_and_the_sampler_accept(examples: None) -> None:
    """Megatron's own checks and the plugin's, for as many ranks as job.env says."""
    arrays = ("MODEL_ARGS", "PARALLEL_ARGS", "OPTIMIZER_ARGS", "ROLLOUT_ARGS", "SC_ARGS")
    words = [word.replace("configs/", f"{SCRIPTS.parent.parent}/configs/") for word in flags_of(JOB, *arrays)]
    nodes, gpus = (int(flags_of(JOB, name)[0]) for name in ("NODES", "GPUS_PER_NODE"))
    (found,) = run_ranks(
        validate_trainer_flags, 1, [*words, "--rollout-path", "/shared/rollouts"], nodes * gpus, megatron=True
    )
    trainer = SimpleNamespace(**found)

    script, *flags = flags_of(JOB, "SAMPLER")
    sampler = importlib.import_module(Path(script).stem).parse(["--rollouts", "r", "--weights", "w", *flags])
    assert sampler.groups_per_step == trainer.prompts_per_step
    assert sampler.samples_per_prompt == trainer.samples_per_prompt
    assert sampler.true_vocab_size == trainer.true_vocab_size
    assert sampler.ahead <= trainer.max_staleness
    assert sampler.serve[-2:] == ["--max-model-len", str(trainer.seq_length)]


def test_transformers_records_the_distribution_that_tokens_were_drawn_from(examples: None, tmp_path: Path) -> None:
    """Prompts of several lengths, responses that end early, a temperature; against the model's own forward pass."""
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**QWEN3, initializer_range=0.3))
    model.generation_config = GenerationConfig(eos_token_id=ENDS)
    model.save_pretrained(tmp_path)
    sample_transformers = importlib.import_module("sample_transformers")
    flags = "--rollouts r --weights w --prompts p --groups-per-step 3 --samples-per-prompt 8 --max-tokens 6"
    engine = sample_transformers.TransformersEngine(
        sample_transformers.parse(
            f"{flags} --true-vocab-size 30 --head-size 8 --temperature 0.7 --dtype float32".split()
        )
    )
    engine.load(tmp_path)
    prompts = [[1, 2, 4, 5], [9], [8, 6, 10]]
    groups = engine.generate(prompts, version=5)
    responses = [response for group in groups for response in group]
    assert [response.prompt_ids.tolist() for response in responses] == [prompt for prompt in prompts for _ in range(8)]
    assert len({tuple(response.response_ids.tolist()) for response in responses}) > 8
    for response in responses:
        ids = response.response_ids
        ended = [place for place, token in enumerate(ids.tolist()) if token in ENDS]
        assert ended in ([], [len(ids) - 1])
        assert response.finish_reason == ("stop" if ended else "length")
        assert len(ids) == 6 or ended
        assert response.weight_version.tolist() == [5] * len(ids)
        with torch.no_grad():
            logits = model(torch.tensor([[*response.prompt_ids.tolist(), *ids.tolist()]])).logits[0].double()
        start = len(response.prompt_ids) - 1
        logq = (logits[start : start + len(ids)] / 0.7).log_softmax(-1).numpy()
        np.testing.assert_allclose(response.sampled_logprobs, logq[range(len(ids)), ids], atol=1e-4)
        assert response.head is not None
        assert response.head.sizes.tolist() == [8] * len(ids)
        head = np.sort(logq, axis=1)[:, :-9:-1]
        np.testing.assert_allclose(response.head.logprobs.reshape(-1, 8), head, atol=1e-4)
        at_head = np.take_along_axis(logq, response.head.ids.reshape(-1, 8), axis=1)
        np.testing.assert_allclose(at_head, head, atol=1e-4)
        assert response.log_tail_mass is not None
        np.testing.assert_allclose(response.log_tail_mass, np.log(1 - np.exp(head).sum(axis=1)), atol=1e-3)
    assert {response.finish_reason for response in responses} == {"stop", "length"}


class Vllm(BaseHTTPRequestHandler):
    """What sample_vllm.py asks of a vLLM server, answered in the format of vLLM 0.33 from a fixed q."""

    asked: list[tuple[str, Any]] = []  # noqa: RUF012  # of all instances: one is made a request
    q = np.array([0.4, 0.3, 0.2, 0.06, 0.04])

    def do_POST(self) -> None:  # the base class's name
        """Answer a request."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append((self.path, body))
        reply = self._completion(body) if self.path == "/v1/completions" else {}
        content = json.dumps(reply).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _completion(self, body: dict[str, Any]) -> dict[str, Any]:
        rng = np.random.default_rng(sum(body["prompt"]))
        choices = []
        for index in range(body["n"]):
            tokens = rng.choice(5, size=3, p=self.q).tolist()
            rows = [[token, *range(body["logprobs"])] for token in tokens]  # the sampled one, then the k most likely
            top = [{f"token_id:{token}": float(np.log(self.q[token])) for token in row} for row in rows]
            logprobs = {
                "tokens": [f"token_id:{token}" for token in tokens],
                "token_logprobs": [float(np.log(self.q[token])) for token in tokens],
                "top_logprobs": top,
                "text_offset": [0, 1, 2],
            }
            choices.append(
                {
                    "index": index, "text": "", "finish_reason": "length", "token_ids": tokens, "logprobs": logprobs,
                    "prompt_token_ids": body["prompt"],
                }
            )  # fmt: skip
        return {"id": "cmpl-1", "object": "text_completion", "created": 0, "model": "policy", "choices": choices}

    def log_message(self, *_: Any) -> None:
        """Be quiet."""


@pytest.fixture
def vllm() -> Iterator[ThreadingHTTPServer]:
    Vllm.asked.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Vllm)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_the_vllm_client_fills_the_buffer_and_hands_on_new_weights(
    examples: None, vllm: ThreadingHTTPServer, tmp_path: Path
) -> None:
    """Weights are published twice; the loop stops once both versions have sampled."""
    sample_vllm = importlib.import_module("sample_vllm")
    sampling_loop = importlib.import_module("sampling_loop")
    weights = tmp_path / "weights"
    publish(weights, 0)
    (tmp_path / "prompts.jsonl").write_text('{"prompt_ids": [1, 2], "answer_ids": [0, 1, 2]}\n')
    arguments = sample_vllm.parse(
        f"--rollouts {tmp_path}/buffer --weights {weights} --prompts {tmp_path}/prompts.jsonl --groups-per-step 2 "
        f"--samples-per-prompt 3 --ahead 1 --max-tokens 3 --true-vocab-size 5 --head-size 3 "
        f"--port {vllm.server_address[1]}".split()
    )
    engine = sample_vllm.VllmEngine(arguments)
    engine._server = FAKE_PROCESS  # runs already
    stopping = threading.Event()
    loop = threading.Thread(target=sampling_loop.sample, args=(engine, arguments, stopping))
    loop.start()
    try:
        read_groups(tmp_path / "buffer", 2)
        publish(weights, 1)
        groups = read_groups(tmp_path / "buffer", 4)
    finally:
        stopping.set()
        loop.join()
    versions = [int(rollout.weight_version[0]) for group in groups for rollout in group]
    assert versions == [0] * 6 + [1] * 6
    for rollout in (rollout for group in groups for rollout in group):
        np.testing.assert_allclose(rollout.sampled_logprobs, np.log(Vllm.q[rollout.response_ids]), rtol=1e-6)
        assert rollout.head_ids is not None
        np.testing.assert_array_equal(rollout.head_ids, [[0, 1, 2]] * 3)
        assert rollout.reward == pytest.approx(np.mean(rollout.response_ids == [0, 1, 2]))
    paths = [path for path, _ in Vllm.asked]
    reload = paths.index("/collective_rpc", 1)
    assert paths[reload + 1] == "/reset_prefix_cache"
    assert Vllm.asked[reload][1] == {
        "method": "reload_weights",
        "kwargs": {"weights_path": str(sampling_loop.latest(weights).path)},
    }


def test_the_vllm_server_is_started_awaited_and_ended(
    examples: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A web server with a page /health stands in for it."""
    sample_vllm = importlib.import_module("sample_vllm")
    port = free_port()
    (tmp_path / "health").touch()
    (tmp_path / "vllm").write_text(
        f'#!/bin/sh\nprintf "%s\\n" "$VLLM_SERVER_DEV_MODE" "$@" >{tmp_path}/words\n'
        f"exec {sys.executable} -m http.server --bind 127.0.0.1 --directory {tmp_path} {port}\n"
    )
    (tmp_path / "vllm").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    flags = "--rollouts r --weights w --prompts p --groups-per-step 2 --max-tokens 3 --true-vocab-size 5 --head-size 3"
    serve = "--tensor-parallel-size 4 --quantization fp8"
    engine = sample_vllm.VllmEngine(sample_vllm.parse(f"{flags} --port {port} -- {serve}".split()))
    engine.load(Path("/weights/7"))
    words = (tmp_path / "words").read_text().split()
    assert (
        words
        == (
            f"1 serve /weights/7 --served-model-name policy --host 127.0.0.1 --port {port} "
            f"--logprobs-mode processed_logprobs --max-logprobs 3 {serve}"
        ).split()
    )
    assert engine.fingerprint().quantization == "fp8"
    assert engine._server.poll() is None
    engine.close()
    assert engine._server.poll() is not None

    (tmp_path / "vllm").write_text("#!/bin/sh\nexit 3\n")
    with pytest.raises(RuntimeError, match="vllm serve exited with code 3"):
        sample_vllm.VllmEngine(engine._arguments).load(Path("/weights/7"))


FAKE_PROCESS: Any = object()


def publish(root: Path, version: int) -> None:
    """An empty version: the server that would load it is none."""
    from megatron_sc.weights.versions import begin, commit

    commit(begin(root, version), keep=2)


def read_groups(path: Path, count: int) -> list[list[Any]]:
    """Wait for so many groups."""
    deadline = threading.Event()
    for _ in range(2400):
        if (path / "manifest.json").exists():  # the ledger is made before it
            with RolloutReader(path) as reader:
                try:
                    return [group.rollouts() for group in reader.take(count, 0)]
                except Exception as error:
                    if "left" not in str(error):
                        raise
        deadline.wait(0.05)
    raise AssertionError(f"no {count} groups in {path}")


def test_the_sampler_names_a_bad_line_of_prompts(examples: None, tmp_path: Path) -> None:
    read_prompts = importlib.import_module("sampling_loop").read_prompts
    path = tmp_path / "prompts.jsonl"
    for text, message in (
        ('{"prompt_ids": [1]}\n{"prompt": "two"}', "line 2: needs prompt_ids; or prompt, and --tokenizer"),
        ('{"prompt_ids": []}', "line 1: the prompt is empty"),
        ("", "no prompts"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            read_prompts(path, None)


def test_reward_of_the_example(examples: None) -> None:
    match = importlib.import_module("sampling_loop").match
    assert match({"answer_ids": [1, 2, 3]}, [1, 9, 3, 4], None) == 0.5
    assert match({"answer": 42}, [7], "so it is 42\n") == 1
    assert match({"answer": 42}, [7], "so it is 421") == 0
    with pytest.raises(ValueError, match="--tokenizer"):
        match({"answer": 42}, [7], None)
