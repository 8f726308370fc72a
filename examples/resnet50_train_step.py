"""A training step of ResNet50, stock and fused, side by side.

Run it with `python examples/resnet50_train_step.py`. Times of stock and fused steps alternate, so
that whatever else runs on the machine slows both.
"""

import argparse
import statistics
import time

import keras
import numpy as np
import tensorflow as tf

import tf_fused_ops as tfo

CLASSES = 10


def make_step(compiler, size):
    """Returns a compiled training step of a new ResNet50 from a fixed seed.

    Args:
        compiler: `tf.function` or `tfo.function`.
        size: Height and width of the images.
    """
    keras.utils.set_random_seed(0)
    model = keras.applications.ResNet50(weights=None, classes=CLASSES, input_shape=(size, size, 3))
    optimizer = keras.optimizers.SGD(1e-2, momentum=0.9)
    optimizer.build(model.trainable_variables)

    @compiler
    def step(images, labels):
        with tf.GradientTape() as tape:
            probabilities = model(images, training=True)
            losses = keras.losses.sparse_categorical_crossentropy(labels, probabilities)
            loss = tf.reduce_mean(losses)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    return step


def timed(step, *args):
    """Runs a step and returns (loss, seconds)."""
    start = time.perf_counter()
    loss = float(step(*args))
    return loss, time.perf_counter() - start


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--size", type=int, default=128, help="height and width of the images")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="small images, one step")
    args = parser.parse_args()
    if args.quick:
        # Of smaller ones four pixels would make the last statistics, which rounding decides.
        args.size, args.batch, args.steps = 64, 4, 1

    rng = np.random.default_rng(0)
    images = tf.constant(rng.standard_normal((args.batch, args.size, args.size, 3)), tf.float32)
    labels = tf.constant(rng.integers(0, CLASSES, args.batch))
    steps = {
        name: make_step(compiler, args.size)
        for name, compiler in (("stock", tf.function), ("fused", tfo.function))
    }
    # The first call also traces.
    first = {name: timed(step, images, labels)[0] for name, step in steps.items()}
    seconds = {name: [] for name in steps}
    for _ in range(args.steps):
        for name, step in steps.items():
            seconds[name].append(timed(step, images, labels)[1])

    report = steps["fused"].remap_reports[-1]
    for rule, count in sorted(report.counts().items()):
        print(f"{count:4} {rule}")
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    for name, median in medians.items():
        print(f"{name}: first loss {first[name]:.6f}, {median:.3f} s a step")
    print(f"speed-up {medians['stock'] / medians['fused']:.2f}")

    trained = [fusion for fusion in report.fused if fusion.gradients]
    layers = [fusion for fusion in trained if fusion.rule != "sparse_cross_entropy"]
    assert len(layers) == 107, "every convolution, batch norm and dense layer, with its gradient"
    counts = report.counts()
    assert counts["conv2d_moments"] == 53, "convolutions take the moments for batch norm"
    assert counts["momentum"] == 214, "every variable is updated by one op"
    np.testing.assert_allclose(first["fused"], first["stock"], rtol=1e-3)


if __name__ == "__main__":
    main()
