"""A picture of how much is reused over the size. Needs matplotlib, which omlxd itself does not: `omlxd[plot]`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

HOW_TO_GET_IT = "a plot needs matplotlib: pip install 'omlxd[plot]' (in a checkout: pip install '.[plot]')"
FORMATS = (".png", ".svg", ".pdf")


@dataclass(frozen=True, slots=True)
class Axis:
    """What stands below the curves: places, and their names where the size is no number that says something."""

    label: str
    at: Sequence[float]
    names: Sequence[str]


def missing() -> str | None:
    """How to get what a plot needs; None when it is there."""
    return None if find_spec("matplotlib") else HOW_TO_GET_IT


def draw(path: Path, title: str, axis: Axis, curves: Mapping[str, Sequence[float]], *, label: str) -> None:
    """Write one line for each of `curves`, all over `axis`. OSError where the file cannot be written."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    marks = "osD^vP*X"
    for number, (name, values) in enumerate(curves.items()):
        axes.plot(axis.at, values, marker=marks[number % len(marks)], markersize=5, linewidth=1.6, label=name)
    if len(axis.at) > 1 and min(axis.at) > 0 and max(axis.at) / min(axis.at) > 8:
        axes.set_xscale("log")
    axes.set_xticks(axis.at, axis.names)
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel(axis.label)
    axes.set_ylabel(label)
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend()
    try:
        figure.savefig(path, dpi=144)
    finally:
        pyplot.close(figure)
