"""Random programs of convolutions, transposed ones and what may be around them."""

import numpy as np
import pytest
import tensorflow as tf
from remapping import plain, rule_counts, taped, values
from transposing import ADDITIONS, BIASES, as_stock, batched, raw, scaled

from tf_fused_ops.function import function

ACTS = (tf.nn.relu, tf.tanh, tf.nn.silu, tf.nn.elu, tf.nn.gelu, tf.identity, tf.exp)


class Program:
    """A random program.

    Attributes:
        steps: What the program does.
        shapes: Those of its arguments: an image, and filters and biases in the order of their use.
    """

    def __init__(self, seed):
        self.random = np.random.default_rng(seed)
        self.steps, self.images, self.shapes = [], [(3, 4, 3)], [(2, 3, 4, 3)]
        for _ in range(self.random.integers(2, 6)):
            self.add_layer()
        self.known_batch = self.choose(True, False)

    def choose(self, *options):
        return options[self.random.integers(len(options))]

    def add_layer(self):
        source = self.choose(*range(len(self.images)))
        *size, inner = self.images[source]
        up, outer = self.choose(True, True, True, False), self.choose(2, 3, 5)
        stride, window = self.choose((1, 1), (1, 3), (2, 3), (2, 4), (3, 5))
        if up:
            image = [n * stride - self.choose(*range(stride)) for n in size]
        else:
            image = [-(-n // stride) for n in size]
        if max(image) > 14:
            return
        made, channels = (*image, outer), (outer, inner) if up else (inner, outer)
        alike = [i for i, other in enumerate(self.images) if other == made]
        self.steps.append(
            {
                "up": up,
                "source": source,
                "made": made,
                "stride": stride,
                "filters": self.place((window, window, *channels)),
                "bias": self.place((outer,)) if self.choose(True, True, True, False) else None,
                "bias form": self.choose(*BIASES),
                "side": self.choose(*alike, None),
                "sum": self.choose(*ADDITIONS),
                "act": self.choose(*range(len(ACTS))),
                "sizes": self.choose("constants", "batch", "of the side", "two"),
                "leak": self.choose(*[None] * 5, "product", "sum", "shape"),
            }
        )
        self.images.append(made)

    def place(self, shape):
        """Returns the place of an argument: a new one, or an old one of the same shape."""
        old = [i for i, other in enumerate(self.shapes) if other == shape and i]
        if old and self.random.integers(2):
            return self.choose(*old)
        self.shapes.append(shape)
        return len(self.shapes) - 1

    def product(self, step, x, w, side):
        if not step["up"]:
            return tf.nn.conv2d(x, w, step["stride"], "SAME")
        shape = {
            "constants": [2, *step["made"]] if self.known_batch else batched(x, step["made"]),
            "batch": batched(x, step["made"]),
            "of the side": batched(x, step["made"]) if side is None else tf.shape(side),
            "two": step["made"][:2],
        }[step["sizes"]]
        return raw(shape, x, w, step["stride"])

    def __call__(self, *args):
        made, leaked = [args[0]], []
        for step in self.steps:
            side = None if step["side"] is None else made[step["side"]]
            z = self.product(step, made[step["source"]], args[step["filters"]], side)
            if step["leak"] == "product":
                leaked.append(tf.reduce_sum(z))
            if step["bias"] is not None:
                z = BIASES[step["bias form"]](z, args[step["bias"]])
            if side is not None:
                z = ADDITIONS[step["sum"]](z, side)
            if step["leak"] == "sum":
                leaked.append(tf.reduce_max(z))
            if step["leak"] == "shape":
                leaked.append(tf.cast(tf.reduce_sum(tf.shape(z)), z.dtype))
            act = ACTS[step["act"]]
            made.append(tf.tanh(z) * act(tf.clip_by_value(z, -2, 2)) if act is tf.exp else act(z))
        return made[1:], leaked

    def loss(self, *args):
        outputs, leaked = self(*args)
        return sum(tf.reduce_mean(tf.sin(y)) for y in outputs) + 0.01 * sum(leaked)


@pytest.mark.parametrize("seed", range(8))
def test_random_program(seed):
    """In a function, with its gradients in it, and with a tape around it."""
    program = Program(seed)
    print(*program.steps, sep="\n")
    x, *others = values(*program.shapes)
    args = [x, *(v / 3 if len(v.shape) == 4 else v for v in others)]
    known = [x.shape if program.known_batch else (None, *x.shape[1:]), *program.shapes[1:]]
    signature = [tf.TensorSpec(shape) for shape in known]
    # At least those fuse that have a bias, if nothing else reads what it is added to.
    least = sum(
        step["up"]
        and step["bias"] is not None
        and step["leak"] != "product"
        and step["sizes"] != "two"
        for step in program.steps
    )
    for code in (program, lambda *args: taped(program.loss, args)):
        compiled = as_stock(lambda *args, code=code: code(*args), args, 4096, signature)
        rules = rule_counts(compiled)
        assert sum(n for rule, n in rules.items() if "transpose" in rule) >= least
    compiled = function(lambda *a: program.loss(*a), input_signature=signature)
    with plain():
        results = [taped(f, args) for f in (compiled, program.loss)]
    scaled(*results, units=4096)
