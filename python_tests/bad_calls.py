"""What wrong calls are made of: shapes that are right but for one, and the errors that are due."""

import tensorflow as tf

ERRORS = (ValueError, tf.errors.InvalidArgumentError)
CONV = {"x": (2, 5, 5, 3), "filters": (3, 3, 3, 4), "bias": (4,)}
# With strides of 2 to images of 5x5.
CONV_TRANSPOSE = {"x": (2, 3, 3, 3), "filters": (3, 3, 4, 3), "bias": (4,)}
MATMUL = {"a": (2, 5, 3), "b": (3, 4), "bias": (4,)}
QUANTIZED_MATMUL = {"a": (2, 5, 3), "b": (3, 4), "b_scale": (4,), "bias": (4,)}
# With 4 bits, two of which follow each other along n.
WEIGHT_ONLY_MATMUL = {
    **{"a": (2, 5, 6), "b": (6, 2), "scale": (3, 4), "zero": (3, 4)},
    **{"group": (6,), "bias": (4,)},
}
BATCH_NORM = {"x": (2, 5, 3), **dict.fromkeys(("scale", "offset", "mean", "variance"), (3,))}
LAYER_NORM = {"x": (2, 5, 3), "scale": (3,), "offset": (3,)}
GROUP_NORM = {"x": (2, 5, 6), "scale": (6,), "offset": (6,)}
PRELU = {"x": (2, 5, 3), "alpha": (5, 3)}
SOFTMAX = {"x": (2, 5, 3)}
CROSS_ENTROPY = {"logits": (2, 5, 3), "labels": (2, 5, 3)}
ATTENTION = {"query": (2, 5, 3, 4), "key": (2, 6, 3, 4), "value": (2, 6, 3, 7)}
UPDATE_CACHE = {"cache": (2, 3, 2, 6, 4, 5), "key": (2, 1, 4, 5), "value": (2, 1, 4, 5)}


def dtype_of(op, name):
    """The dtype of an argument where it depends on the op."""
    if op.startswith("weight_only") and name == "group":
        return tf.int32
    return tf.int8 if op.startswith(("quantized", "weight_only")) and name == "b" else tf.float32
