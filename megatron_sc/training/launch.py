"""Run an unmodified pretrain_gpt.py of Megatron-LM with the plugin's flags.

    torchrun --nproc-per-node 8 -m megatron_sc.launch PATH/pretrain_gpt.py <flags> --loss-correction score_centering

The script runs as ``python PATH/pretrain_gpt.py`` would: it is ``__main__``, and its folder comes first in
``sys.path``. So the Megatron beside the script (a checkout) is used where there is one, and the installed wheel
otherwise: the choice is the script's, as without the launcher.

Two functions of Megatron are wrapped before the script starts: its parser gains the plugin's flags, and ``pretrain``
trains from rollouts when ``--loss-correction`` is given. Without the flag everything is passed on untouched.
"""

from __future__ import annotations

import functools
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from . import cpu

USAGE = "usage: python -m megatron_sc.launch PATH/pretrain_gpt.py [flags of the script and of the plugin]"


def main(argv: Sequence[str] | None = None) -> None:
    """Run the script named first in ``argv`` with the rest as its arguments.

    Args:
        argv: Without the program's name; None: ``sys.argv[1:]``.

    Raises:
        SystemExit: with status 2 and a message, when no script is named or it is not a file.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0].startswith("-"):
        _refuse("name the training script first" + (f", before {arguments[0]}" if arguments else ""))
    script = Path(arguments[0])
    if not script.is_file():
        _refuse(f"{script} is not a file; give the path of a pretrain_gpt.py in a Megatron-LM checkout")
    sys.argv = arguments
    sys.path[0] = str(script.resolve().parent)
    cpu.install()  # before Megatron is imported
    wrap_megatron()
    runpy.run_path(arguments[0], run_name="__main__")


def wrap_megatron() -> None:
    """Give Megatron's parser the plugin's flags, and its ``pretrain`` the plugin; read ``--sc-config`` files."""
    import megatron.training
    from megatron.training import arguments

    from .arguments import add_arguments
    from .config_files import expand_argv

    sys.argv[1:] = expand_argv(sys.argv[1:])
    stock_arguments, stock_pretrain = arguments.add_megatron_arguments, megatron.training.pretrain

    @functools.wraps(stock_arguments)
    def add_megatron_arguments(parser: Any) -> Any:
        return add_arguments(stock_arguments(parser))

    arguments.add_megatron_arguments = add_megatron_arguments
    megatron.training.pretrain = centering_pretrain(stock_pretrain)


def centering_pretrain(stock_pretrain: Callable[..., None]) -> Callable[..., None]:
    """Wrap Megatron's ``pretrain``: under ``--loss-correction`` it trains from rollouts.

    Args:
        stock_pretrain: what is called, with its arguments unchanged, where the flag is absent.
    """

    @functools.wraps(stock_pretrain)
    def pretrain(
        full_config: Any, datasets_provider: Any, model_type: Any, forward_step_func: Any, *args: Any, **kwargs: Any
    ) -> None:
        from megatron.training import get_args

        if get_args().loss_correction is None:
            for flag, given in (
                ("--publish-weights", get_args().publish_weights),
                ("--load-hf-weights", get_args().load_hf_weights),
            ):
                if given:
                    raise ValueError(f"{flag} needs --loss-correction: without that the launcher leaves Megatron alone")
            stock_pretrain(full_config, datasets_provider, model_type, forward_step_func, *args, **kwargs)
            return
        from .loop import hooked_training_loop
        from .plugin import ScoreCentering

        plugin = ScoreCentering.from_args(get_args())
        with hooked_training_loop(get_args().metrics_jsonl):
            stock_pretrain(full_config, plugin.datasets_provider, model_type, plugin.forward_step, *args, **kwargs)

    return pretrain


def _refuse(reason: str) -> None:
    """Exit as argparse does."""
    print(f"{USAGE}\nmegatron_sc.launch: error: {reason}", file=sys.stderr)
    raise SystemExit(2)
