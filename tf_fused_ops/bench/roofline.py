"""Draws what the peers reach under the machine's roofs (Williams, Waterman, Patterson 2009)."""

import numpy as np

from tf_fused_ops.bench.report import MODE_TITLES, OURS
from tf_fused_ops.bench.workers import PEERS

_COLOURS = {
    "stock": "#425066",
    "xla": "#7c8ba1",
    "torch": "#b9622d",
    "torch_compile": "#e0a983",
    OURS: "#ff8f00",
}


def draw(report, path):
    """Draws achieved operations a second against operations a byte, one panel for each mode.

    Args:
        report: What `report.collect` returns.
        path: Of the picture; its ending tells the format.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 5), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(MODE_TITLES), sharey=True)
    for axes, (mode, title) in zip(panels, MODE_TITLES.items(), strict=True):
        cases = [c for c in report["cases"] if c["mode"] == mode and c["macs"]]
        _panel(axes, cases, report["roofs"])
        axes.set_title(title)
    panels[0].set_ylabel("GFLOP/s")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    hardware = report["machine"]
    figure.suptitle(
        f"{hardware['processor']}, {report['settings']['threads']} cores, "
        f"{hardware['instruction set']}, {report['settings']['dtype']}"
    )
    figure.savefig(path)


def _panel(axes, cases, roofs):
    ridge = roofs["operations"] / roofs["bytes"]
    intensities = [2 * case["macs"] / case["bytes"] for case in cases] or [ridge]
    xs = np.geomspace(min(*intensities, ridge) / 2, max(*intensities, ridge) * 2, 200)
    roof = np.minimum(roofs["operations"], xs * roofs["bytes"]) / 1e9
    axes.loglog(xs, roof, color="black", lw=1.5, label="measured roofs")
    for peer, title in PEERS.items():
        points = [
            (2 * case["macs"] / case["bytes"], 2e-6 * case["macs"] / case["peers"][peer]["ms"])
            for case in cases
            if case["peers"].get(peer, {"ms": None})["ms"] is not None
        ]
        if points:
            marker = {"marker": "o", "s": 45, "zorder": 3} if peer == OURS else {"marker": "x"}
            axes.scatter(*zip(*points, strict=True), color=_COLOURS[peer], label=title, **marker)
    axes.set_xlabel("operations a byte")
    axes.grid(which="both", lw=0.3)
