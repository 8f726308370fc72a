"""The demo's picture of loss curves."""

import matplotlib
import numpy as np

matplotlib.use("Agg")

from matplotlib import pyplot as plt

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
