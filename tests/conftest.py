"""One import name for the helpers beside the tests, and the tests that need a Megatron-LM checkout or Slurm."""

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # ``tests.distributed``, also in its workers

from tests.slurm_cluster import missing_programs


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers where their rules are."""
    config.addinivalue_line(
        "markers", "checkout: needs a Megatron-LM checkout; run them with MEGATRON_LM=PATH make test"
    )
    config.addinivalue_line("markers", "slurm: needs Slurm and munge, which the test starts for itself")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests marked ``checkout``, where MEGATRON_LM names none, and ``slurm``, where it is not installed."""
    absent = {"checkout"} if "MEGATRON_LM" not in os.environ else set()
    absent |= {"slurm"} if missing_programs() else set()
    unavailable = [item for item in items if any(item.get_closest_marker(name) for name in absent)]
    if unavailable:
        config.hook.pytest_deselected(items=unavailable)
        items[:] = [item for item in items if item not in unavailable]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say that the tests on Slurm were left out, and what would run them."""
    if missing := missing_programs():
        terminalreporter.line(
            f"Tests marked slurm were left out: {', '.join(missing)} not found. "
            "Debian: apt-get install munge slurmctld slurmd slurm-client"
        )
