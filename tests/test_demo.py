"""The demo: its settings, its command lines, and what it does with processes that finish, fail or are interrupted."""

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

DEMO = Path(__file__).parents[1] / "examples" / "demo.py"


def load_demo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("megatron_sc_demo", DEMO)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


demo = load_demo()

# Stands for a training run: it writes metrics, and waits, fails or hangs as the environment says.
CHILD = """
import argparse, json, os, sys, time
parser = argparse.ArgumentParser(allow_abbrev=False)
for flag in ("--metrics-jsonl", "--save", "--load", "--importance-weight"):
    parser.add_argument(flag)
parser.add_argument("--train-iters", type=int)
options, _ = parser.parse_known_args()
if options.save:
    os.makedirs(options.save)
if options.load and not os.path.isdir(options.load):
    sys.exit("no checkpoint")
print("port", os.environ["MASTER_PORT"], "threads", os.environ["OMP_NUM_THREADS"], flush=True)
with open(options.metrics_jsonl, "w") as file:
    for step in range(10, options.train_iters + 1, 10):
        for record in ({"split": "train", "drift_l1": 0.3, "reward": 0.5}, {"split": "valid", "accuracy": step / 100}):
            file.write(json.dumps({"step": step, **record}) + "\\n")
        file.flush()
        if options.importance_weight == os.environ.get("FAIL"):
            sys.exit("out of luck")
        if options.load and "HANG" in os.environ:
            time.sleep(60)
"""

# Runs the demo with the child above in place of Megatron.
DRIVER = """
import importlib.util, pathlib, sys
spec = importlib.util.spec_from_file_location("megatron_sc_demo", sys.argv[1])
demo = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = demo
spec.loader.exec_module(demo)
demo.SCRIPT = pathlib.Path(sys.argv[2])
sys.exit(demo.main(sys.argv[3:]))
"""


def start_demo(folder: Path, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    (folder / "child.py").write_text(CHILD)
    command = [sys.executable, "-c", DRIVER, str(DEMO), str(folder / "child.py"), "--output", str(folder / "out")]
    return subprocess.Popen(
        [*command, *arguments],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # A job in the background ignores SIGINT, and so would the demo that it starts.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def run_from(folder: Path, name: str, code: str, *arguments: str) -> object:
    return demo.Run(
        name, name, "", [sys.executable, "-c", code, *arguments], 100, folder / f"{name}.log", folder / f"{name}.jsonl"
    )


def flag(argv: list[str], name: str) -> str:
    return argv[argv.index(name) + 1]


def test_the_methods_are_those_of_the_comparison() -> None:
    rows = {m.name: (m.correction, m.weight, m.advantage) for m in demo.METHODS}
    assert rows == {
        "plain": ("none", "none", "none"),
        "is": ("none", "is", "none"),
        "tis": ("none", "tis", "none"),
        "mis": ("none", "mis", "none"),
        "score-centering": ("score_centering", "none", "none"),
        "tis-score-centering": ("score_centering", "tis", "none"),
        "plain-group": ("none", "none", "group"),
        "score-centering-group": ("score_centering", "none", "group"),
    }


def test_two_methods_differ_in_their_own_flags_only(tmp_path: Path) -> None:
    plain, centered = (demo.method_argv(m, tmp_path, 200, 1) for m in (demo.METHODS[0], demo.METHODS[5]))
    different = {plain[i - 1] for i in range(len(plain)) if plain[i] != centered[i]}
    assert len(plain) == len(centered)
    assert different == {"--metrics-jsonl", "--loss-correction", "--importance-weight"}


def test_every_method_continues_from_the_warm_start_with_the_given_seed_and_steps(tmp_path: Path) -> None:
    warm_start = demo.warm_start_argv(tmp_path, 7)
    assert flag(warm_start, "--train-iters") == flag(warm_start, "--save-interval") == str(demo.WARM_START_STEPS)
    for method in demo.METHODS:
        argv = demo.method_argv(method, tmp_path, 50, 7)
        assert flag(argv, "--load") == flag(warm_start, "--save")
        assert (flag(argv, "--seed"), flag(argv, "--sampler-seed"), flag(argv, "--train-iters")) == ("7", "7", "50")
        assert {"--finetune", "--exit-on-missing-checkpoint"} <= set(argv)


def test_megatron_knows_every_flag_that_is_not_ours(tmp_path: Path) -> None:
    # In a process of its own: other tests must be able to prepare torch before Megatron is imported.
    code = (
        "import argparse, json, sys; from megatron.training.arguments import add_megatron_arguments;"
        "parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False));"
        "print(json.dumps(parser.parse_known_args(sys.argv[1:])[1]))"
    )
    argv = demo.warm_start_argv(tmp_path, 1)[2:] + demo.method_argv(demo.METHODS[-1], tmp_path, 5, 1)[2:]
    output = subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True, check=True).stdout
    unknown = json.loads(output.splitlines()[-1])
    assert {word for word in unknown if word.startswith("--")} == {
        *("--task", "--reward-mode", "--prompts-per-step", "--samples-per-prompt"),
        *("--sampler", "--sampler-noise", "--sampler-seed", "--head-size"),
        *("--loss-correction", "--importance-weight", "--advantage", "--metrics-jsonl"),
    }


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--methods", "plain,nonsense"], "unknown nonsense"),
        (["--methods", ","], "choose from plain, is"),
        (["--seed", "0"], "--seed"),
        (["--steps", "-3"], "--steps"),
    ],
)
def test_wrong_arguments_are_refused_by_name(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        demo.parse_arguments(arguments)
    assert complaint in capsys.readouterr().err


def test_chosen_methods_keep_their_order_and_are_taken_once() -> None:
    options = demo.parse_arguments(["--methods", "tis, plain,tis"])
    assert [m.name for m in options.methods] == ["tis", "plain"]


def test_clear_removes_what_a_demo_left_and_nothing_else(tmp_path: Path) -> None:
    output = tmp_path / "runs" / "demo"
    demo.clear(output)  # makes it
    (output / "warm-start" / "iter_0000060").mkdir(parents=True)
    for name in ("plain.log", "tis.jsonl", "metrics.jsonl", "demo.png", "notes.txt", "other.log"):
        (output / name).write_text("x")
    demo.clear(output)
    assert sorted(path.name for path in output.iterdir()) == ["notes.txt", "other.log"]


def test_the_reading_sorts_methods_by_what_happened_and_states_the_limits() -> None:
    chosen = demo.METHODS[:2] + demo.METHODS[-1:]
    summaries = [
        demo.Summary(m.name, 200, a, None, None, None, 0) for m, a in zip(chosen, (0.1, 1.0, None), strict=True)
    ]
    text = demo.reading(summaries, chosen)
    assert "With all-positive reward survived: IS 1.00." in text
    assert "With all-positive reward collapsed or fell behind: Policy gradient 0.10." in text
    assert "With group-centered reward collapsed or fell behind: Score centering -." in text
    assert "at this size IS and MIS survive on some seeds and not on others, and with group-centered reward" in text


def test_at_most_the_given_number_runs_at_a_time_and_all_get_their_turn(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; here = Path(sys.argv[1]); mine = here / f'{sys.argv[2]}.alive';"
        "mine.touch(); (here / f'{sys.argv[2]}.saw').write_text(str(len(list(here.glob('*.alive')))));"
        "time.sleep(0.6); mine.unlink()"
    )
    runs = [run_from(tmp_path, f"r{i}", code, str(tmp_path), f"r{i}") for i in range(5)]
    demo.run_all(runs, 2, lambda runs: None)
    assert [run.state for run in runs] == ["done"] * 5
    assert max(int(path.read_text()) for path in tmp_path.glob("*.saw")) == 2


def test_a_failing_run_stops_the_others_and_their_children(tmp_path: Path) -> None:
    hang = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"
    fail = "import sys, time; time.sleep(1); sys.exit('out of luck')"
    runs = [run_from(tmp_path, "hangs", hang), run_from(tmp_path, "fails", fail), run_from(tmp_path, "waits", hang)]
    started = time.monotonic()
    with pytest.raises(demo.RunFailedError, match="fails failed with exit code 1") as failure:
        demo.run_all(runs, 2, lambda runs: None)
    assert time.monotonic() - started < 20
    assert runs[0].returncode == -signal.SIGTERM
    assert runs[2].state == "waiting"
    with pytest.raises(ProcessLookupError):
        wait_until_gone(runs[0].process.pid)
    text = demo.failure_text(failure.value.run)
    assert "out of luck" in text
    assert str(tmp_path / "fails.log") in text


def test_a_run_that_ignores_a_polite_request_is_killed(tmp_path: Path) -> None:
    stubborn = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
    )
    run = run_from(tmp_path, "stubborn", stubborn)
    run.start()
    while "up" not in run.log.read_text().splitlines():
        time.sleep(0.05)
    demo.stop_all([run], patience=0.5)
    assert run.returncode == -signal.SIGKILL


def wait_until_gone(group: int) -> None:
    """Raises ProcessLookupError once no process of the group is left, returns if one outlives ten seconds."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        os.killpg(group, 0)
        time.sleep(0.05)


def test_time_left_counts_waiting_runs_by_the_speed_of_the_others(tmp_path: Path) -> None:
    runs = [run_from(tmp_path, f"r{i}", "") for i in range(4)]
    assert demo.total_seconds_left(runs, 2) is None
    runs[0].process = argparse.Namespace(returncode=None)
    runs[0].first_step, runs[0].step, runs[0].seconds = (10, 5.0), 30, 15.0  # 0.5 s a step, 70 steps to go
    assert runs[0].seconds_left() == pytest.approx(35.0)
    # One run takes 50 s: (35 + 3 * 50) / 2
    assert demo.total_seconds_left(runs, 2) == pytest.approx(92.5)
    runs[0].process.returncode = 0
    assert runs[0].seconds_left() == 0.0
    assert demo.total_seconds_left(runs, 4) == pytest.approx(15.0)


def test_ports_differ_and_lie_below_the_ephemeral_range() -> None:
    ports = [int(demo._environment()["MASTER_PORT"]) for _ in range(3)]
    assert len(set(ports)) == 3
    assert all(20000 <= port < 30000 for port in ports)


def test_a_finished_demo_leaves_metrics_picture_and_logs(tmp_path: Path) -> None:
    process = start_demo(tmp_path, "--methods", "plain,score-centering", "--steps", "30", "--jobs", "2")
    text, _ = process.communicate(timeout=120)
    assert process.returncode == 0, text
    output = tmp_path / "out"
    records = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert [r["method"] for r in records] == ["warm-start"] * (demo.WARM_START_STEPS // 5) + ["plain"] * 6 + [
        "score-centering"
    ] * 6
    assert (output / "demo.png").stat().st_size > 10_000
    ports = {
        (output / f"{name}.log").read_text().split("port ")[1] for name in ("warm-start", "plain", "score-centering")
    }
    assert len(ports) == 3
    assert all(port.endswith("threads 1\n") for port in ports)
    rows = [line.split() for line in text.splitlines()]
    assert ["Score", "centering", "all-positive", "0.30", "0.30", ">", "0.30", "0.50"] in [r[:8] for r in rows]
    assert f"After the warm start: {demo.WARM_START_STEPS / 100:.2f}" in text


def test_a_failed_run_shows_its_log_and_fails_the_demo(tmp_path: Path) -> None:
    process = start_demo(tmp_path, "--methods", "plain,mis", "--steps", "30", FAIL="mis")
    text, _ = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "out of luck" in text
    assert f"MIS (mis) failed with exit code 1. Log: {tmp_path / 'out' / 'mis.log'}" in text
    assert '"method": "mis"' in (tmp_path / "out" / "metrics.jsonl").read_text()
    assert not (tmp_path / "out" / "demo.png").exists()


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_stops_its_runs_and_keeps_their_files(tmp_path: Path, signum: signal.Signals) -> None:
    process = start_demo(tmp_path, "--methods", "plain,tis", "--steps", "30", "--jobs", "2", HANG="1")
    output = tmp_path / "out"
    deadline = time.monotonic() + 60
    while not all((output / f"{name}.jsonl").exists() for name in ("plain", "tis")) and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(0.5)
    process.send_signal(signum)
    text, _ = process.communicate(timeout=180)
    assert process.returncode == 130
    assert "Interrupted" in text
    assert '"method": "tis"' in (output / "metrics.jsonl").read_text()
    child = str(tmp_path / "child.py").encode()
    assert not [path for path in Path("/proc").glob("[0-9]*/cmdline") if child in read_or_nothing(path)]


def read_or_nothing(path: Path) -> bytes:
    """A process may end between being listed and being read."""
    try:
        return path.read_bytes()
    except OSError:
        return b""
