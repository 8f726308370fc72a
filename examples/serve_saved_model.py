"""A SavedModel with fused ops, and one of stock ops for where tf_fused_ops is not installed.

Run it with `python examples/serve_saved_model.py`. TensorFlow Serving is in docs/serving.md.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import keras
import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import tf_fused_ops as tfo

# What a server does, here with files for requests and answers.
SERVER = """
import sys
import numpy as np
import tensorflow as tf

library, folder, request, answer = sys.argv[1:]
if library != "-":
    __import__(library)
serve = tf.saved_model.load(folder).signatures["serving_default"]
(output,) = serve(tf.constant(np.load(request))).values()
np.save(answer, output)
nodes = [n.op for f in serve.graph.as_graph_def().library.function for n in f.node_def]
print(sorted({op for op in nodes if op.startswith("TfFusedOps>")}))
"""


def trained_model(epochs):
    """Returns a small network in fused layers that has learnt the digits, and the test data."""
    keras.utils.set_random_seed(0)
    images, labels = load_digits(return_X_y=True)
    images = (images.reshape(-1, 8, 8, 1) / 16).astype("float32")
    train_x, test_x, train_y, test_y = train_test_split(images, labels, random_state=0)
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            tfo.layers.FusedConv2D(16, 3, padding="same", use_bias=False),
            tfo.layers.FusedBatchNormalization(activation="relu"),
            tfo.layers.FusedConv2D(32, 3, strides=2, padding="same", activation="silu"),
            keras.layers.Flatten(),
            tfo.layers.FusedDense(64, activation="gelu"),
            tfo.layers.FusedDense(10, activation="softmax"),
        ]
    )
    model.compile(keras.optimizers.Adam(3e-3), "sparse_categorical_crossentropy")
    model.fit(train_x, train_y, batch_size=64, epochs=epochs, verbose=0)
    return model, test_x, test_y


def served(folder, images, library):
    """Returns what a new process computes that imports `library`, or nothing of ours ("-")."""
    request, answer = folder.parent / "request.npy", folder.parent / f"{folder.name}.npy"
    np.save(request, images)
    subprocess.run(
        [sys.executable, "-c", SERVER, library, str(folder), str(request), str(answer)], check=True
    )
    return np.load(answer)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="train for fewer epochs")
    args = parser.parse_args()
    model, images, labels = trained_model(epochs=3 if args.quick else 10)
    with tempfile.TemporaryDirectory() as name:
        fused, portable = Path(name, "fused"), Path(name, "portable")
        model.export(str(fused), verbose=False)
        command = [sys.executable, "-m", "tf_fused_ops", "convert", str(fused), str(portable)]
        subprocess.run([*command, "--portable"], check=True)
        results = {
            "model.predict": model.predict(images, verbose=0),
            "fused": served(fused, images, "tf_fused_ops"),
            "portable": served(portable, images, "-"),
        }
    for name, probabilities in results.items():
        accuracy = np.mean(probabilities.argmax(axis=1) == labels)
        print(f"{name:<13} accuracy {accuracy:.4f}")
        np.testing.assert_allclose(probabilities, results["model.predict"], atol=1e-4)
    assert accuracy > 0.8, "the network should have learnt the digits"


if __name__ == "__main__":
    main()
