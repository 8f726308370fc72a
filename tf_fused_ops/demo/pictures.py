"""The demo's two pictures: loss curves, and a graph before and after fusing."""

import matplotlib
import numpy as np

matplotlib.use("Agg")

from matplotlib import pyplot as plt

from tf_fused_ops.demo import graphs

STOCK_COLOUR = "#4c78a8"
FUSED_COLOUR = "#f58518"


def draw_losses(stock, fused, path):
    """Draws both loss curves, and their difference, over the training steps.

    Args:
        stock: losses of the stock run, [steps].
        fused: losses of the fused run, [steps].
        path: of the .png or .svg file.
    """
    figure, (top, bottom) = plt.subplots(
        2, 1, figsize=(8, 6), sharex=True, height_ratios=[3, 1], layout="constrained"
    )
    top.plot(stock, color=STOCK_COLOUR, linewidth=4, alpha=0.5, label="tf.function")
    top.plot(fused, color=FUSED_COLOUR, linewidth=1, label="tf_fused_ops.function")
    top.set_yscale("log")
    top.set_ylabel("cross entropy")
    top.set_title("The same network, trained on the same digits")
    top.legend()
    bottom.plot(np.maximum(abs(fused - stock), 1e-8), color="black", linewidth=0.8)
    bottom.set_yscale("log")
    bottom.set_ylabel("|difference|")
    bottom.set_xlabel("training step")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _positions(nodes):
    """Places each node below all it reads; returns {name: (column, row)}."""
    rows = {}
    columns = {}
    width = {}
    for name, (_, read) in nodes.items():
        row = 1 + max((rows[source] for source in read), default=-1)
        rows[name] = row
        columns[name] = width.get(row, 0)
        width[row] = columns[name] + 1
    return {name: (columns[name] - (width[rows[name]] - 1) / 2, rows[name]) for name in nodes}


def _draw_graph(axes, nodes, title):
    positions = _positions(nodes)
    for name, (op_type, read) in nodes.items():
        x, y = positions[name]
        for source in read:
            axes.annotate(
                "", (x, y - 0.3), (positions[source][0], positions[source][1] + 0.3),
                arrowprops={"arrowstyle": "->", "color": "#888888"},
            )  # fmt: skip
        colour = FUSED_COLOUR if graphs.is_fused(op_type) else STOCK_COLOUR
        axes.text(
            x, y, graphs.short_name(op_type), ha="center", va="center", fontsize=8, color="white",
            bbox={"boxstyle": "round", "facecolor": colour, "edgecolor": "none"},
        )  # fmt: skip
    axes.set_title(f"{title}: {len(nodes)} ops")
    xs = [x for x, _ in positions.values()]
    ys = [y for _, y in positions.values()]
    axes.set_xlim(min(xs) - 1, max(xs) + 1)
    axes.set_ylim(max(ys) + 1, -1)
    axes.axis("off")


def draw_graphs(before, after, path):
    """Draws the computing nodes of two concrete functions side by side, fused ops in orange.

    Args:
        before: ConcreteFunction of the stock program.
        after: ConcreteFunction of the fused program.
        path: of the .png or .svg file.
    """
    both = [graphs.computing_nodes(function) for function in (before, after)]
    rows = max(row for nodes in both for _, row in _positions(nodes).values())
    figure, axes = plt.subplots(1, 2, figsize=(9, 1 + 0.5 * rows), layout="constrained")
    for part, nodes, title in zip(axes, both, ("before", "after"), strict=True):
        _draw_graph(part, nodes, title)
    figure.savefig(path, dpi=120)
    plt.close(figure)
