"""The shapes and attributes on which tests and benchmarks run the ops."""

import dataclasses
import itertools

import numpy as np

CHANNELS = (1, 3, 17, 31, 33, 64, 100)
ACTIVATIONS = (
    "none",
    "relu",
    "relu6",
    "elu",
    "leaky_relu",
    "sigmoid",
    "tanh",
    "silu",
    "hard_swish",
    "mish",
    "gelu_tanh",
    "gelu_erf",
)
DTYPES = ("float32", "float16", "bfloat16", "float64")
LAYOUTS = ("NHWC", "NCHW")
# A value that float32 holds exactly: the attribute is a float.
ALPHA = 0.25
# Where an activation or its slope jumps; finite differences must stay away from there.
KINKS = {
    "relu": (0.0,),
    "relu6": (0.0, 6.0),
    "elu": (0.0,),
    "leaky_relu": (0.0,),
    "hard_swish": (-3.0, 3.0),
}


def pairwise(factors, allowed=lambda row: True, seed=0):
    """Rows that hold every allowed pair of values of any two factors at least once.

    Args:
        factors: A dict from name to the sequence of its values.
        allowed: Tells whether a row, a dict from name to value, may occur.
        seed: Seed of the search.

    Returns:
        A list of dicts.
    """
    names, rng = list(factors), np.random.default_rng(seed)
    missing = {
        (a, i, b, j)
        for a, b in itertools.combinations(names, 2)
        for i in range(len(factors[a]))
        for j in range(len(factors[b]))
    }

    def covered(index):
        return {(a, index[a], b, index[b]) for a, b in itertools.combinations(names, 2)}

    rows = []
    while missing:
        a, i, b, j = min(missing)
        candidates = []
        for _ in range(60):
            index = {name: int(rng.integers(len(values))) for name, values in factors.items()}
            index |= {a: i, b: j}
            if allowed({name: factors[name][k] for name, k in index.items()}):
                candidates.append((len(covered(index) & missing), index))
        if not candidates:
            missing.discard((a, i, b, j))
            continue
        index = max(candidates, key=lambda candidate: candidate[0])[1]
        missing -= covered(index)
        rows.append({name: factors[name][k] for name, k in index.items()})
    return rows


def _text(value):
    if isinstance(value, tuple):
        return "x".join(_text(v) for v in value) or "scalar"
    if isinstance(value, bool):
        return str(int(value))
    return str(value)


class Case:
    """A row of the table; its id names every field, so that one line reproduces a failure."""

    def __str__(self):
        fields = dataclasses.asdict(self)
        return ",".join(f"{name}={_text(value)}" for name, value in fields.items())


@dataclasses.dataclass(frozen=True)
class ConvCase(Case):
    """A convolution: `image`, `kernel`, `strides`, `dilations` are (height, width)."""

    batch: int = 2
    image: tuple = (5, 6)
    cin: int = 3
    cout: int = 4
    kernel: tuple = (3, 3)
    strides: tuple = (1, 1)
    dilations: tuple = (1, 1)
    # "SAME", "VALID" or ((top, bottom), (left, right)).
    padding: object = "SAME"
    layout: str = "NHWC"
    bias: bool = True
    side: bool = False
    act: str = "relu"
    dtype: str = "float32"

    def output_image(self):
        """(height, width) of the output; negative where the kernel does not fit."""
        sizes = []
        for i in range(2):
            extent = (self.kernel[i] - 1) * self.dilations[i] + 1
            if self.padding == "SAME":
                sizes.append(-(-self.image[i] // self.strides[i]))
            else:
                pads = (0, 0) if self.padding == "VALID" else self.padding[i]
                sizes.append((self.image[i] + sum(pads) - extent) // self.strides[i] + 1)
        return tuple(sizes)

    def ordered(self, batch, image, channels):
        """A shape or a list of attributes in the order of the layout."""
        if self.layout == "NHWC":
            return [batch, *image, channels]
        return [batch, channels, *image]

    def attributes(self):
        """Keyword arguments for `conv2d_bias_act` and for `reference.conv2d_bias_act`."""
        padding = self.padding
        if not isinstance(padding, str):
            padding = self.ordered([0, 0], [list(pair) for pair in padding], [0, 0])
        return {
            "strides": self.ordered(1, self.strides, 1),
            "dilations": self.ordered(1, self.dilations, 1),
            "padding": padding,
            "data_format": self.layout,
            "activation": self.act,
            "alpha": ALPHA,
        }

    def inputs(self, seed=0):
        """float64 arrays x, filters, bias, side input, dy; None for those that the case lacks."""
        rng = np.random.default_rng(seed)
        x = rng.normal(size=self.ordered(self.batch, self.image, self.cin))
        taps = max(1, self.kernel[0] * self.kernel[1] * self.cin)
        filters = rng.normal(size=(*self.kernel, self.cin, self.cout)) / np.sqrt(taps)
        y_shape = self.ordered(self.batch, self.output_image(), self.cout)
        bias = rng.normal(size=self.cout) if self.bias else None
        side = rng.normal(size=y_shape) if self.side else None
        return x, filters, bias, side, rng.normal(size=y_shape)


def conv_cases():
    """Pairwise over sizes, layouts, paddings, optional inputs, activations and dtypes."""
    factors = {
        "act": ACTIVATIONS,
        "cin": CHANNELS,
        "cout": CHANNELS,
        "dtype": DTYPES,
        "image": ((1, 1), (2, 7), (5, 6), (9, 4), (13, 13)),
        "kernel": ((1, 1), (3, 3), (2, 3), (5, 5), (7, 1)),
        "strides": ((1, 1), (2, 2), (3, 1), (4, 5)),
        "padding": ("SAME", "VALID", ((1, 2), (3, 0)), ((0, 0), (4, 4))),
        "dilations": ((1, 1), (2, 1), (2, 3)),
        "batch": (1, 3, 0),
        "layout": LAYOUTS,
        "bias": (True, False),
        "side": (False, True),
    }
    rows = pairwise(factors, lambda row: min(ConvCase(**row).output_image()) > 0)
    return [ConvCase(**row) for row in rows]


@dataclasses.dataclass(frozen=True)
class MatMulCase(Case):
    """A product of a [*lead, m, k] and b [k, n]."""

    lead: tuple = ()
    m: int = 5
    k: int = 4
    n: int = 3
    ta: bool = False
    tb: bool = False
    bias: bool = True
    side: bool = False
    act: str = "gelu_erf"
    dtype: str = "float32"

    def attributes(self):
        """Keyword arguments for `matmul_bias_act` and for `reference.matmul_bias_act`."""
        return {
            "transpose_a": self.ta,
            "transpose_b": self.tb,
            "activation": self.act,
            "alpha": ALPHA,
        }

    def inputs(self, seed=0):
        """float64 arrays a, b, bias, side input, dy; None for those that the case lacks."""
        rng = np.random.default_rng(seed)
        a = rng.normal(size=(*self.lead, *((self.k, self.m) if self.ta else (self.m, self.k))))
        b = rng.normal(size=(self.n, self.k) if self.tb else (self.k, self.n))
        b /= np.sqrt(max(1, self.k))
        y_shape = (*self.lead, self.m, self.n)
        bias = rng.normal(size=self.n) if self.bias else None
        side = rng.normal(size=y_shape) if self.side else None
        return a, b, bias, side, rng.normal(size=y_shape)


def matmul_cases():
    """Pairwise over sizes, transposes, leading dimensions, activations and dtypes."""
    factors = {
        "act": ACTIVATIONS,
        "k": (*CHANNELS, 300, 0),
        "n": (*CHANNELS, 129),
        "m": (1, 2, 7, 17, 64, 0),
        "dtype": DTYPES,
        "lead": ((), (1,), (3,), (2, 3), (0,)),
        "ta": (False, True),
        "tb": (False, True),
        "bias": (True, False),
        "side": (False, True),
    }
    return [MatMulCase(**row) for row in pairwise(factors)]


@dataclasses.dataclass(frozen=True)
class BatchNormCase(Case):
    """A batch normalization: `sizes` are all dimensions but the channels."""

    sizes: tuple = (2, 3, 4)
    channels: int = 3
    layout: str = "NHWC"
    training: bool = True
    unbiased: bool = True
    side: bool = False
    act: str = "relu"
    dtype: str = "float32"

    def shape(self):
        """The shape of x."""
        if self.layout == "NHWC":
            return (*self.sizes, self.channels)
        return (self.sizes[0], self.channels, *self.sizes[1:])

    def attributes(self):
        """Keyword arguments for `batch_norm_act` and for `reference.batch_norm_act`."""
        return {
            # Both are exact in float32, as the attributes are floats.
            "epsilon": 2.0**-10,
            "momentum": 0.75,
            "training": self.training,
            "unbiased": self.unbiased,
            "data_format": self.layout,
            "activation": self.act,
            "alpha": ALPHA,
        }

    def inputs(self, seed=0):
        """float64 arrays x, scale, offset, mean, variance, side input or None, dy."""
        rng = np.random.default_rng(seed)
        x = rng.normal(size=self.shape()) * 2 + 1
        scale, offset, mean = rng.normal(size=(3, self.channels))
        variance = rng.uniform(0.5, 2, size=self.channels)
        side = rng.normal(size=self.shape()) if self.side else None
        return x, scale, offset, mean, variance, side, rng.normal(size=self.shape())


def batch_norm_cases():
    """Pairwise over ranks, channels, layouts, modes, activations and dtypes."""
    factors = {
        "act": ACTIVATIONS,
        "channels": CHANNELS,
        "dtype": DTYPES,
        "sizes": ((7,), (1,), (4, 5), (1, 1, 1), (3, 6, 5), (2, 9, 13), (0, 3, 3), (2, 3, 2, 3)),
        "layout": LAYOUTS,
        "training": (True, False),
        "unbiased": (True, False),
        "side": (False, True),
    }
    return [BatchNormCase(**row) for row in pairwise(factors)]


def away_from_kinks(make, argument, activation, distance=0.01, attempts=2000):
    """Finds inputs whose pre-activations stay away from the activation's kinks.

    Args:
        make: Takes a seed, returns the inputs.
        argument: Takes the inputs, returns the pre-activations.
        activation: The activation's name.
        distance: The least distance from a kink.
        attempts: How many seeds to try.

    Returns:
        The inputs.
    """
    for seed in range(attempts):
        inputs = make(seed)
        z = argument(inputs)
        if all(
            np.abs(z - kink).min(initial=np.inf) > distance for kink in KINKS.get(activation, ())
        ):
            return inputs
    raise AssertionError(f"no inputs away from the kinks of {activation}")
