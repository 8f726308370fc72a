"""Draws what the peers reach under the machine's roofs (Williams, Waterman, Patterson 2009)."""

import numpy as np

from tf_fused_ops.bench.report import MODE_TITLES, OURS, hardware
from tf_fused_ops.bench.workers import PEERS

_COLOURS = {
    "stock": "#425066",
    "xla": "#7c8ba1",
    "torch": "#b9622d",
    "torch_compile": "#e0a983",
    OURS: "#ff8f00",
}


_GROUPS = ("contraction", "off_track", "large")


def draw(report, path):
    """Draws achieved operations a second against operations a byte, one panel for each mode.

    Args:
        report: What `report.collect` returns.
        path: Of the picture; its ending tells the format.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 7), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(MODE_TITLES), sharey=True)
    for axes, (mode, title) in zip(panels, MODE_TITLES.items(), strict=True):
        cases = [c for c in report["cases"] if c["mode"] == mode and c["group"] in _GROUPS]
        _panel(axes, [case for case in cases if case["macs"]], report["roofs"])
        axes.set_title(title)
    panels[0].set_ylabel("GFLOP/s")
    panels[0].set_ylim(bottom=panels[0].get_ylim()[0] / 4)  # room for the names
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    figure.suptitle(hardware(report))
    figure.savefig(path)


def _panel(axes, cases, roofs):
    operations, bandwidth = roofs["operations"], roofs["bytes"]
    ridge = operations / bandwidth
    at = {case["name"]: 2 * case["macs"] / case["bytes"] for case in cases}
    xs = np.geomspace(min([*at.values(), ridge]) / 2, max([*at.values(), ridge]) * 2, 200)
    axes.loglog(xs, np.minimum(operations, xs * bandwidth) / 1e9, color="black", label="limit")
    for peer, title in PEERS.items():
        points = [
            (at[case["name"]], 2e-6 * case["macs"] / case["peers"][peer]["ms"])
            for case in cases
            if case["peers"].get(peer, {"ms": None})["ms"] is not None
        ]
        if points:
            marker = {"marker": "o", "s": 45, "zorder": 3} if peer == OURS else {"marker": "x"}
            axes.scatter(*zip(*points, strict=True), color=_COLOURS[peer], label=title, **marker)
    # Names stand along the foot, each below its points, side by side where those coincide.
    left = 0.0
    for name in sorted(at, key=at.get):
        share = np.log(at[name] / xs[0]) / np.log(xs[-1] / xs[0])
        left = max(share, left + 0.028)
        axes.annotate(
            name,
            (at[name], 0),
            (left, 0.02),
            xycoords=("data", "axes fraction"),
            textcoords="axes fraction",
            rotation=90,
            ha="center",
            fontsize=7,
        )
        axes.axvline(at[name], color="#dddddd", lw=0.5, zorder=0)
    axes.set_xlabel("operations a byte")
    axes.set_xlim(xs[0], xs[-1])
