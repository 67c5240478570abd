"""A mismatch and its attribution as tables for a terminal and as a figure."""

from __future__ import annotations

import math
from collections.abc import Mapping

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich import box
from rich.bar import Bar
from rich.table import Table

from .mismatch import TAIL_QUANTILES, Attribution, Mismatch

BAR_WIDTH = 30


def mismatch_table(samplers: Mapping[str, Mismatch]) -> Table:
    """One column a sampler, one row a quantity."""
    table = Table(title="Sampler q against trainer p, on the sampler's responses", box=box.SIMPLE)
    table.add_column("")
    for name in samplers:
        table.add_column(name, justify="right")
    rows: list[tuple[str, str, str]] = [
        ("positions", "positions", "d"),
        ("KL(q || p)", "kl", ".3e"),
        ("  from the head alone", "head_kl", ".3e"),
        ("  k3 estimate", "k3_kl", ".3e"),
        ("|log p - log q|, mean", "log_ratio_abs", ".4f"),
        ("|log p - log q|, max", "log_ratio_abs_max", ".4f"),
        ("|q - p|_1 on the head", "drift_head", ".4f"),
        ("|q - p|_1 on the tail", "drift_tail", ".2e"),
        ("sampled outside the head", "outside_head", ".2%"),
    ]
    for label, field, form in rows:
        table.add_row(label, *(_number(getattr(mismatch, field), form) for mismatch in samplers.values()))
    for i, quantile in enumerate(TAIL_QUANTILES):
        label = "tail mass q / p, max" if quantile == 1 else f"tail mass q / p, {quantile:.0%}"
        table.add_row(label, *(_number(mismatch.tail_ratio[i], ".3f") for mismatch in samplers.values()))
    return table


def _number(value: float, form: str) -> str:
    return "unknown" if math.isnan(value) else format(value, form)


def attribution_table(name: str, attribution: Attribution) -> Table:
    """One row a part: its KL alone, as a bar, and that of all parts up to it."""
    table = Table(title=f"{name}: KL(q || p), one part at a time", box=box.SIMPLE)
    for column, justify in (("part", "left"), ("alone", "right"), ("", "left"), ("with all above", "right")):
        table.add_column(column, justify=justify)  # type: ignore[arg-type]
    longest = max([*attribution.alone.values(), attribution.total, 1e-300])
    for part, kl in attribution.alone.items():
        bar = Bar(longest, 0, max(kl, 0.0), width=BAR_WIDTH)
        table.add_row(part, f"{kl:.3e}", bar, f"{attribution.up_to[part]:.3e}")
    table.add_section()
    table.add_row("all", f"{attribution.total:.3e}", Bar(longest, 0, max(attribution.total, 0.0), width=BAR_WIDTH), "")
    table.add_row("residual: all - sum of alone", f"{attribution.residual:+.3e}", "", "")
    return table


def attribution_figure(samplers: Mapping[str, Attribution]) -> Figure:
    """Bars of each part alone, and of the whole, one panel a sampler."""
    rows = max(len(attribution.alone) for attribution in samplers.values()) + 2
    figure = Figure(figsize=(4.2 * len(samplers), 0.45 * rows + 1.2), layout="constrained")
    panels = figure.subplots(1, len(samplers), squeeze=False)[0]
    for axes, (name, attribution) in zip(panels, samplers.items(), strict=True):
        labels = [*attribution.alone, "all", "residual"]
        values = [*attribution.alone.values(), attribution.total, attribution.residual]
        colors = ["#0072B2"] * len(attribution.alone) + ["#000000", "#999999"]
        axes.barh(range(len(labels)), values, color=colors)
        axes.set_yticks(range(len(labels)), labels)
        axes.invert_yaxis()
        axes.axvline(0, color="#000000", linewidth=0.6)
        axes.xaxis.set_major_locator(MaxNLocator(4))
        axes.ticklabel_format(axis="x", style="sci", scilimits=(-2, 3))
        axes.set_xlabel("KL(q || p), nats a token")
        axes.set_title(name)
    return figure
