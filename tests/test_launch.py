"""The launcher: an unmodified training script gains the plugin's flags, and stays stock Megatron without them."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from megatron_sc.training.launch import main
from tests.distributed import run_megatron
from tests.tiny_model import DENSE

# What Megatron-LM's pretrain_gpt.py does, without its datasets and its model options.
STAND_IN = """
import sys
import torch
from helper_beside_the_script import DATA_SEED  # the script's folder must come first in sys.path
from megatron.core.enums import ModelType
from megatron.training import pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args

def datasets_provider(sizes, vp_stage=None):
    tokens = torch.randint(32, (2, 17), generator=torch.Generator().manual_seed(DATA_SEED))
    return iter(lambda: tokens, None), iter(lambda: tokens, None), None

def loss_func(output):
    loss = output.float().sum()
    count = torch.tensor(output.numel(), dtype=torch.int)
    return loss, count, {"lm loss": torch.stack([loss.detach(), count.float()])}

def forward_step(data_iterator, model):
    tokens = next(data_iterator)
    return model(tokens[:, :-1], torch.arange(16).expand(2, -1), None, labels=tokens[:, 1:]), loss_func

if __name__ == "__main__":
    datasets_provider.is_distributed = True
    args = parse_and_validate_args(args_defaults={"tokenizer_type": "NullTokenizer"})
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    pretrain(config, datasets_provider, ModelType.encoder_or_decoder, forward_step, store=None)
    print("argv", sys.argv[0])
"""
# Runs a script on the CPU with nothing of ours but the backend: what the launcher is compared with.
BACKEND_ONLY = """
import runpy, sys
from megatron_sc.training import cpu
sys.argv = sys.argv[1:]
sys.path[0] = sys.argv[0].rpartition("/")[0]
cpu.install()
from megatron.training import arguments
stock = arguments.add_megatron_arguments
def add_megatron_arguments(parser):
    parser = stock(parser)
    cpu.set_parser_defaults(parser)
    return parser
arguments.add_megatron_arguments = add_megatron_arguments
if __name__ == "__main__":
    runpy.run_path(sys.argv[0], run_name="__main__")
"""
ROLLOUTS = shlex.split("""
    --loss-correction score_centering --prompts-per-step 2 --samples-per-prompt 4 --head-size 8
    --task reverse --reward-mode signed --advantage none --sampler gaussian --sampler-noise 0.5
""")
STEPS = ["--train-iters", "3"]


@pytest.fixture
def stand_in(tmp_path: Path) -> Path:
    """A script with a neighbor that it imports, and a runner that installs the CPU backend only."""
    (tmp_path / "helper_beside_the_script.py").write_text("DATA_SEED = 5\n")
    (tmp_path / "backend_only.py").write_text(BACKEND_ONLY)
    script = tmp_path / "train.py"
    script.write_text(STAND_IN)
    return script


def launch(*argv: Any) -> str:
    (output,) = run_megatron(["-m", "megatron_sc.launch", *map(str, argv)], 1, timeout=200)
    return output


def printed_steps(output: str) -> list[str]:
    """Megatron's line of each step, without what depends on time."""
    lines = re.findall(r"iteration +\d+/.*", output)
    return [re.sub(r"elapsed time per iteration \(ms\): [\d.]+", "", line) for line in lines]


def test_without_the_flag_it_is_stock_megatron(stand_in: Path) -> None:
    argv = [*DENSE, *STEPS]
    with ThreadPoolExecutor() as pool:
        stock = pool.submit(run_megatron, [stand_in.with_name("backend_only.py"), stand_in, *argv], 1, 200)
        launched = pool.submit(launch, stand_in, *argv)
    steps = printed_steps(launched.result())
    assert len(steps) == 3
    assert "lm loss: 3." in steps[0]
    assert steps == printed_steps(stock.result()[0])
    assert f"argv {stand_in}" in launched.result()


def test_with_the_flag_it_trains_from_rollouts(stand_in: Path, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    output = launch(stand_in, *DENSE, *STEPS, *ROLLOUTS, "--metrics-jsonl", path)
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [record["step"] for record in records] == [1, 2, 3]
    assert all(has_trained(record) for record in records)
    assert "lm loss" not in output


def has_trained(record: dict[str, Any]) -> bool:
    """The embedded sampler answered, and its rollouts moved the weights."""
    return record["split"] == "train" and -1 <= record["reward"] <= 1 and record["grad_norm"] > 0


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "name the training script first"),
        (["--loss-correction", "none"], "name the training script first, before --loss-correction"),
        (["nowhere/pretrain_gpt.py", "--num-layers", "2"], "nowhere/pretrain_gpt.py is not a file"),
    ],
)
def test_a_wrong_script_is_refused(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        main(argv)
    assert error.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.checkout
def test_pretrain_gpt_of_a_checkout_trains_from_rollouts(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    script = Path(os.environ["MEGATRON_LM"]) / "pretrain_gpt.py"
    launch(script, *DENSE, *STEPS, *ROLLOUTS, "--metrics-jsonl", path)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3]


@pytest.mark.checkout
def test_pretrain_gpt_of_a_checkout_is_stock_without_the_flag(tmp_path: Path) -> None:
    """With the wheel's Megatron: the checkout's own would need pybind11 for its datasets."""
    for script in Path(os.environ["MEGATRON_LM"]).glob("*.py"):
        shutil.copy(script, tmp_path)
    (tmp_path / "backend_only.py").write_text(BACKEND_ONLY)
    stock_data = [flag for flag in DENSE if flag not in ("--dataloader-type", "external", "--calculate-per-token-loss")]
    argv = [tmp_path / "pretrain_gpt.py", *stock_data, "--mock-data", *STEPS]
    with ThreadPoolExecutor() as pool:
        stock = pool.submit(run_megatron, [tmp_path / "backend_only.py", *argv], 1, 200)
        launched = pool.submit(launch, *argv)
    steps = printed_steps(launched.result())
    assert len(steps) == 3
    assert steps == printed_steps(stock.result()[0])
