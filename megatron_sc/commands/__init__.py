"""Subcommands of ``megatron-sc``, one module each: ``add`` adds its parser, ``run`` returns the exit status.

A module imports at its top only what parsing needs; torch, pyarrow and the like are imported when it runs.
"""

from typing import Any

Subcommands = Any
"""What ``add`` gets: the class has no public name in argparse."""
