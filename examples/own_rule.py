"""A rule of one's own: a dense layer with a threshold in the place of a bias.

Run it with `python examples/own_rule.py`.
"""

import argparse
from typing import ClassVar

import numpy as np
import tensorflow as tf

import tf_fused_ops as tfo
from tf_fused_ops.remapper import Fused, Rule


class ThresholdedDense(Rule):
    """relu(matmul(x, w) - threshold), which is the fused product with a negative bias."""

    family = "thresholded_dense"
    anchor = "MatMul"
    operands: ClassVar = {"x": (2,), "w": (2,), "threshold": (1,)}
    differentiable = ("x", "w", "threshold")
    fused_ops = ("TfFusedOps>MatMulBiasAct", "TfFusedOps>MatMulBiasActGrad")

    def stock(self, attrs, x, w, threshold):
        return {"y": tf.nn.relu(tf.matmul(x, w) - threshold)}

    def check(self, match):
        units, size = match.operands["w"].shape[1], match.operands["threshold"].shape[0]
        if size is None or size != units:
            return f"a threshold of {size} elements may broadcast to {units} units"
        return None

    def fuse(self, match, training):
        x, w, threshold = (match.operands[name] for name in self.operands)
        y = tfo.matmul_bias_act(x, w, -threshold, "relu", name=match.fused_name())
        return Fused({"y": y})


def train(compiler, steps):
    """Trains a layer and its thresholds from a fixed seed; returns the losses and the step."""
    rng = np.random.default_rng(0)
    x, target = (tf.constant(rng.standard_normal(s), tf.float32) for s in ((64, 32), (64, 16)))
    w = tf.Variable(tf.constant(rng.standard_normal((32, 16)) / 6, tf.float32))
    threshold = tf.Variable(tf.zeros([16]))

    @compiler
    def step():
        with tf.GradientTape() as tape:
            y = tf.nn.relu(tf.matmul(x, w) - threshold)
            loss = tf.reduce_mean((y - target) ** 2)
        for variable, gradient in zip(
            (w, threshold), tape.gradient(loss, (w, threshold)), strict=True
        ):
            variable.assign_sub(0.5 * gradient)
        return loss

    return [float(step()) for _ in range(steps)], step


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer steps")
    steps = 50 if parser.parse_args().quick else 500
    options = tfo.RemapOptions(rules=[ThresholdedDense()])
    stock, _ = train(tf.function, steps)
    fused, step = train(tfo.function(remap=options), steps)
    print(step.remap_reports[-1])
    print(f"loss {fused[0]:.4f} -> {fused[-1]:.4f}; stock {stock[-1]:.4f}")

    fused_by = {fusion.rule: fusion.gradients for fusion in step.remap_reports[-1].fused}
    assert fused_by["thresholded_dense"] == 1
    np.testing.assert_allclose(fused, stock, rtol=1e-4)


if __name__ == "__main__":
    main()
