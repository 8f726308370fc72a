"""Speed of a training step of a transformer's encoder in Keras: stock TensorFlow, XLA and ours.

    python cuda/benchmark/encoder.py [--policy mixed_bfloat16] [--batch 16] [--tokens 512]
                                     [--width 768] [--layers 4] [--dropout 0.1] [--peers stock,ours]

Every peer is timed in a process of its own, one after another; all take the same steps of Adam from
the same weights, whose losses are shown. Runs on the first GPU, or on the processor without one.
"""

import argparse
import statistics
import subprocess
import sys
import time

PEERS = ("stock", "xla", "ours")
HEAD = 64  # the depth of an attention head
CLASSES = 1000
ROUNDS, STEPS = 5, 10


def encoder(arguments):
    """The model: post-normalized layers of attention and a dense network with GELU."""
    import keras

    layers, width, rate = keras.layers, arguments.width, arguments.dropout
    x = inputs = keras.Input((arguments.tokens, width))
    for _ in range(arguments.layers):
        y = layers.MultiHeadAttention(width // HEAD, HEAD, dropout=rate)(x, x)
        x = layers.LayerNormalization()(x + layers.Dropout(rate)(y))
        y = layers.Dense(width)(layers.Dense(4 * width, activation="gelu")(x))
        x = layers.LayerNormalization()(x + layers.Dropout(rate)(y))
    return keras.Model(inputs, layers.Dense(CLASSES)(x))


def train(arguments):
    """Times the steps of one peer; prints the losses of the first ones and milliseconds."""
    import keras
    import tensorflow as tf

    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy(arguments.policy)
    model = encoder(arguments)
    optimizer = keras.optimizers.Adam(1e-4)
    optimizer.build(model.trainable_variables)
    tokens = (arguments.batch, arguments.tokens)
    inputs = tf.random.normal([*tokens, arguments.width])
    labels = tf.random.uniform(tokens, 0, CLASSES, tf.int64)

    def step(inputs, labels):
        with tf.GradientTape() as tape:
            logits = tf.cast(model(inputs, training=True), tf.float32)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
            loss = tf.reduce_mean(losses)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    if arguments.one == "ours":
        import tf_fused_ops as tfo

        run = tfo.function(step)
    else:
        run = tf.function(step, jit_compile=arguments.one == "xla")
    words = ["losses", *(f"{float(run(inputs, labels)):.4f}" for _ in range(3))]
    if arguments.one == "ours":
        fused = run.remap_reports[-1].counts()
        words += ["fused", ", ".join(f"{count} {rule}" for rule, count in fused.items())]
    print(*words)
    times = []
    for _ in range(ROUNDS):
        before = time.perf_counter()
        for _ in range(STEPS):
            loss = run(inputs, labels)
        float(loss)
        times.append((time.perf_counter() - before) / STEPS)
    print(f"{1e3 * statistics.median(times):.2f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--policy", default="mixed_bfloat16", help="Keras's dtype policy")
    for name, value in (("batch", 16), ("tokens", 512), ("width", 768), ("layers", 4)):
        parser.add_argument(f"--{name}", type=int, default=value, help=f"default: {value}")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--peers", default=",".join(PEERS), help="with commas between them")
    parser.add_argument("--one", choices=PEERS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        train(arguments)
        return
    measured = {}
    for peer in arguments.peers.split(","):
        command = [sys.executable, __file__, *sys.argv[1:], "--one", peer]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["no word"])[-1]
            print(f"{peer}: failed: {reason}")
            continue
        words, milliseconds = done.stdout.strip().splitlines()[-2:]
        measured[peer] = float(milliseconds)
        print(f"{peer}: {milliseconds} ms a step, {words}")
    if "ours" in measured:
        for peer, value in measured.items():
            if peer != "ours":
                print(f"ours is {value / measured['ours']:.2f}x as fast as {peer}")


if __name__ == "__main__":
    main()
