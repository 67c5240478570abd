"""One import name for the helpers beside the tests, and the tests that need a Megatron-LM checkout."""

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # ``tests.distributed``, also in its workers


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests marked ``checkout``, where MEGATRON_LM does not name a checkout of Megatron-LM."""
    if "MEGATRON_LM" not in os.environ:
        unavailable = [item for item in items if item.get_closest_marker("checkout")]
        config.hook.pytest_deselected(items=unavailable)
        items[:] = [item for item in items if item not in unavailable]


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker where its rule is."""
    config.addinivalue_line(
        "markers", "checkout: needs a Megatron-LM checkout; run them with MEGATRON_LM=PATH make test"
    )
