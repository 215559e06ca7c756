"""Draws docs/figures/*.png from the committed JSON lines."""

import argparse
from collections.abc import Callable
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.ticker import FuncFormatter, NullLocator

from benchmarks import figure_data, inputs
from benchmarks.figure_data import Data

FOLDER = inputs.ROOT / "docs" / "figures"
SIZE, DPI = (8, 4.5), 200  # 1600 x 900 pixels, twice README's width

# Okabe and Ito's palette, told apart without red-green vision; a marker of its own besides.
STYLES: dict[str, tuple[str, str]] = {
    "index_topk": ("#0072B2", "o"),
    "index_scores+top_k": ("#009E73", "s"),
    "index_scores": ("#56B4E9", "^"),
    "jnp": ("#D55E00", "D"),
    "top_k": ("#0072B2", "o"),
    "lax.top_k": ("#D55E00", "D"),
    "torch.topk": ("#CC79A7", "v"),
    "flashinfer.top_k": ("#E69F00", "P"),
    "control:tensor": ("#444444", "x"),
    "control:score": ("#999999", "+"),
}
FLOORS = ("arithmetic floor", "one read of x")
FP8 = "FP8, H = 64, D = 128, K = 2048, one H200"


def style(name: str) -> dict[str, Any]:
    """The look of a series; a second order of an implementation is drawn hollow."""
    if name in FLOORS:
        return {"color": "black", "linestyle": "--", "linewidth": 1.5}
    implementation = name.partition(", ")[0]
    color, marker = STYLES[implementation]
    hollow = {"markerfacecolor": "white"} if name == "top_k, any" else {}
    return {"color": color, "marker": marker, "linewidth": 2, "markersize": 6, **hollow}


def short(count: float) -> str:
    """131072 as 128K."""
    return f"{count / 1024:g}K" if count >= 1024 else f"{count:g}"


def lines(data: Data, title: str, x: str, y: str, log_y: bool = True) -> plt.Figure:
    """Series against a count on a logarithmic axis."""
    figure, axes = plt.subplots(figsize=SIZE, layout="constrained")
    for name, points in data["series"].items():
        if points:
            axes.plot(*zip(*points, strict=True), label=name, **style(name))
    axes.set_xscale("log", base=2)
    counts = sorted({at for points in data["series"].values() for at, _ in points})
    counts = [count for count in counts if count & (count - 1) == 0]  # 160K would touch 128K
    axes.set_xticks(counts, [short(count) for count in counts])
    axes.xaxis.set_minor_locator(NullLocator())
    if log_y:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    else:
        axes.set_ylim(bottom=0)
    axes.set(xlabel=x, ylabel=y)
    axes.grid(which="major", color="#DDDDDD")
    axes.set_axisbelow(True)
    figure.suptitle(title, fontsize=12)
    figure.legend(loc="outside right center", frameon=False)
    return figure


def times(ratio: float) -> str:
    """Two significant digits, three near 1."""
    return f"{ratio:.2f}" if ratio < 2 else f"{ratio:.2g}" if ratio < 99 else f"{ratio:.0f}"


def speedup(data: Data) -> plt.Figure:
    """Bars, one panel an operation."""
    panels = data["panels"]
    figure, all_axes = plt.subplots(1, len(panels), figsize=SIZE, layout="constrained")
    for axes, (ours, others) in zip(all_axes, panels.items(), strict=True):
        counts = sorted({n for points in others.values() for n, _ in points})
        width = 0.8 / max(1, len(others))
        for i, (name, points) in enumerate(others.items()):
            at = [counts.index(n) + (i - (len(others) - 1) / 2) * width for n, _ in points]
            heights = [height for _, height in points]
            # From 1, so that a bar below it says slower.
            above = [height - 1 for height in heights]
            bars = axes.bar(at, above, width, 1, label=name, color=STYLES[name][0])
            for bar, height in zip(bars, heights, strict=True):
                axes.annotate(
                    times(height),
                    (bar.get_x() + bar.get_width() / 2, height),
                    xytext=(0, 3 if height >= 1 else -3),
                    textcoords="offset points",
                    ha="center",
                    va="bottom" if height >= 1 else "top",
                    fontsize=7 if height < 2 else 8.5,  # a bar's width
                )
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}x"))
        axes.yaxis.set_minor_formatter(lambda value, _: "")
        axes.axhline(1, color="black", linewidth=1)
        axes.set_xticks(range(len(counts)), [short(n) for n in counts])
        axes.set(xlabel="N", title=f"{ours}, times faster than")
        low, high = axes.get_ylim()
        axes.set_ylim(low / 1.2 if low < 1 else 1, high * (high / low) ** 0.35)
        if others:
            axes.legend(frameon=False, loc="upper left")
    return figure


def timeline(data: Data) -> plt.Figure:
    """One band a call, one bar a kernel."""
    calls = data["calls"]
    figure, axes = plt.subplots(figsize=SIZE, layout="constrained")
    end = max((stop for call in calls.values() for _, _, stop in call), default=1)
    row, ticks = 0.0, []
    for name, call in calls.items():
        ticks.append((row + (len(call) - 1) / 2, name))
        color = STYLES[name.partition(", ")[0]][0]
        for kernel, start, stop in call:
            axes.barh(row, stop - start, left=start, height=0.8, color=color)
            inside, after = stop - start > 0.4 * end, stop < 0.6 * end
            axes.annotate(
                f"{kernel}  {stop - start:.1f} us",
                (stop if after and not inside else start, row),
                xytext=(6 if inside or after else -6, 0),
                textcoords="offset points",
                ha="left" if inside or after else "right",
                va="center",
                color="white" if inside else "black",
                fontsize=10,
            )
            row += 1
        row += 0.4
    axes.set_yticks([at for at, _ in ticks], [name.replace(", ", ",\n") for _, name in ticks])
    axes.invert_yaxis()
    axes.grid(axis="x", color="#DDDDDD")
    axes.set_axisbelow(True)
    axes.set(xlabel="us since the first kernel's start", xlim=(0, 1.02 * end))
    shape = figure_data.TIMELINE_SHAPE
    title = f"Kernels of one call, Q = {shape['q']}, N = {shape['n']}; {FP8}"
    figure.suptitle(title, fontsize=12)
    return figure


DRAW: dict[str, Callable[[Data], plt.Figure]] = {
    "latency": lambda data: lines(data, f"Device time, Q = 4096, causal; {FP8}", "N", "ms"),
    "queries": lambda data: lines(data, f"Device time, N = 131072, causal; {FP8}", "Q", "ms"),
    "peak": lambda data: lines(
        data,
        "Share of the FP8 tensor peak at the measured clock, Q = 4096, one H200",
        "N",
        "%",
        log_y=False,
    ),
    "top_k": lambda data: lines(
        data, "Device time of top-k, 4096 rows of float32, k = 2048, one H200", "N", "ms"
    ),
    "speedup": speedup,
    "timeline": timeline,
}


def main(arguments: list[str]) -> int:
    """Runs `python -m benchmarks figures`."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks figures", description=__doc__)
    parser.parse_args(arguments)
    FOLDER.mkdir(parents=True, exist_ok=True)
    plt.rcParams.update({"font.size": 11, "axes.spines.top": False, "axes.spines.right": False})
    for name, shown in figure_data.FIGURES.items():
        data = shown()
        figure = DRAW[name](data)
        path = FOLDER / f"{name}.png"
        metadata = {"Software": None, "Data": figure_data.digest(data)}
        figure.savefig(path, dpi=DPI, metadata=metadata)
        plt.close(figure)
        print(f"wrote {path}")
    return 0
