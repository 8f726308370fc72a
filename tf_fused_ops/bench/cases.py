"""What the ops are run on: kinds of cases, and the named ones that the benchmark times.

NumPy only, for processes without TensorFlow. The tests take their kinds of cases from here.
"""

import dataclasses

import numpy as np

MODES = ("forward", "step")
# A value that float32 holds exactly: the attribute is a float.
ALPHA = 0.25
# Likewise; batch norm's, added to the variance.
EPSILON = 2.0**-10


def _text(value):
    if isinstance(value, tuple):
        return "x".join(_text(v) for v in value) or "scalar"
    if isinstance(value, bool):
        return str(int(value))
    return str(value)


class Case:
    """A row of the table; its id names every field, so that one line reproduces a failure.

    Attributes:
        modes: Those of `MODES` in which the benchmark times it.
    """

    modes = MODES

    def __str__(self):
        fields = dataclasses.asdict(self)
        return ",".join(f"{name}={_text(value)}" for name, value in fields.items())

    def rule(self):
        """The name of the remapper's rule that fuses it."""
        return self.family if self.act == "none" else f"{self.family}_{self.act}"


def _with_sums(family, case):
    """The family of rules for a chain with the summands of a case."""
    return family + "_bias" * case.bias + "_add" * case.side


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
    scale: bool = False
    groups: int = 1

    @property
    def family(self):
        """The family of its rule."""
        return _with_sums("conv2d", self)

    def _extent(self, i):
        return (self.kernel[i] - 1) * self.dilations[i] + 1

    def output_image(self):
        """(height, width) of the output; negative where the kernel does not fit."""
        return tuple(
            (self.image[i] + sum(pads) - self._extent(i)) // self.strides[i] + 1
            for i, pads in enumerate(self.pads())
        )

    def pads(self):
        """((top, bottom), (left, right))."""
        if self.padding == "VALID":
            return ((0, 0), (0, 0))
        if self.padding != "SAME":
            return self.padding
        pads = []
        for i in range(2):
            covered = (-(-self.image[i] // self.strides[i]) - 1) * self.strides[i] + self._extent(i)
            total = max(covered - self.image[i], 0)
            pads.append((total // 2, total - total // 2))
        return tuple(pads)

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
        attributes = {
            "strides": self.ordered(1, self.strides, 1),
            "dilations": self.ordered(1, self.dilations, 1),
            "padding": padding,
            "data_format": self.layout,
            "activation": self.act,
            "alpha": ALPHA,
        }
        return attributes | ({"scale": self.factors()} if self.scale else {})

    def factors(self):
        """A scale: a factor per channel, negatives and zeros among them, exact in every dtype."""
        return np.arange(self.cout) % 13 / 4 - 1.0

    def title(self):
        """What it is, for people."""
        times = "x".join
        window = times(map(str, self.kernel))
        if max(self.strides) > 1:
            window += f" s{max(self.strides)}"
        if max(self.dilations) > 1:
            window += f" d{max(self.dilations)}"
        if self.groups > 1:
            window += f" g{self.groups}"
        sizes = times(map(str, (self.batch, *self.image)))
        layout = "" if self.layout == "NHWC" else f" {self.layout}"
        return f"conv {window} {self.cin}→{self.cout}, {sizes}{layout}, {self.act}"

    def inputs(self, seed=0):
        """float64 arrays x, filters, bias, side input, dy; None for those that the case lacks."""
        rng = np.random.default_rng(seed)
        x = rng.normal(size=self.ordered(self.batch, self.image, self.cin))
        depth = self.cin // self.groups
        taps = max(1, self.kernel[0] * self.kernel[1] * depth)
        filters = rng.normal(size=(*self.kernel, depth, self.cout)) / np.sqrt(taps)
        y_shape = self.ordered(self.batch, self.output_image(), self.cout)
        bias = rng.normal(size=self.cout) if self.bias else None
        side = rng.normal(size=y_shape) if self.side else None
        return x, filters, bias, side, rng.normal(size=y_shape)


@dataclasses.dataclass(frozen=True)
class ConvTransposeCase(Case):
    """A transposed convolution: `image` is that of y, and the convolution of it makes x's."""

    batch: int = 2
    image: tuple = (5, 6)
    cin: int = 3
    cout: int = 4
    kernel: tuple = (3, 3)
    strides: tuple = (2, 2)
    dilations: tuple = (1, 1)
    # As a ConvCase has it.
    padding: object = "SAME"
    layout: str = "NHWC"
    bias: bool = True
    side: bool = False
    act: str = "relu"
    dtype: str = "float32"

    @property
    def family(self):
        """The family of its rule."""
        return _with_sums("conv2d_transpose", self)

    def convolution(self):
        """That which leads from y to x."""
        fields = dataclasses.asdict(self) | {"cin": self.cout, "cout": self.cin}
        return ConvCase(**fields)

    def output_shape(self):
        """The shape of y."""
        return self.convolution().ordered(self.batch, self.image, self.cout)

    def attributes(self):
        """Keyword arguments for `conv2d_transpose_bias_act` and for its reference."""
        return self.convolution().attributes()

    def title(self):
        """What it is, for people."""
        times = "x".join
        window = f"{times(map(str, self.kernel))} s{max(self.strides)}"
        sizes = times(map(str, (self.batch, *self.convolution().output_image())))
        return f"transposed conv {window} {self.cin}→{self.cout}, {sizes}, {self.act}"

    def inputs(self, seed=0):
        """float64 arrays x, filters, bias, side input, dy; None for those that the case lacks."""
        rng = np.random.default_rng(seed)
        conv = self.convolution()
        x = rng.normal(size=conv.ordered(self.batch, conv.output_image(), self.cin))
        # As many taps as meet a pixel of y.
        taps = np.prod(self.kernel) * self.cin / np.prod(self.strides)
        filters = rng.normal(size=(*self.kernel, self.cout, self.cin)) / np.sqrt(max(1, taps))
        bias = rng.normal(size=self.cout) if self.bias else None
        side = rng.normal(size=self.output_shape()) if self.side else None
        return x, filters, bias, side, rng.normal(size=self.output_shape())


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

    @property
    def family(self):
        """The family of its rule."""
        return _with_sums("batch_matmul" if self.lead else "matmul", self)

    def attributes(self):
        """Keyword arguments for `matmul_bias_act` and for `reference.matmul_bias_act`."""
        return {
            "transpose_a": self.ta,
            "transpose_b": self.tb,
            "activation": self.act,
            "alpha": ALPHA,
        }

    def title(self):
        """What it is, for people."""
        sizes = "x".join(map(str, (*self.lead, self.m, self.k, self.n)))
        return f"matmul {sizes}, {self.act.replace('_', ' ')}"

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

    @property
    def family(self):
        """The family of its rule."""
        return "batch_norm" + "_add" * self.side

    def shape(self):
        """The shape of x."""
        if self.layout == "NHWC":
            return (*self.sizes, self.channels)
        return (self.sizes[0], self.channels, *self.sizes[1:])

    def attributes(self):
        """Keyword arguments for `batch_norm_act` and for `reference.batch_norm_act`."""
        return {
            "epsilon": EPSILON,
            "momentum": 0.75,
            "training": self.training,
            "unbiased": self.unbiased,
            "data_format": self.layout,
            "activation": self.act,
            "alpha": ALPHA,
        }

    def title(self):
        """What it is, for people."""
        sizes = "x".join(map(str, self.shape()))
        layout = "" if self.layout == "NHWC" else f" {self.layout}"
        return f"batch norm{' + add' if self.side else ''}, {sizes}{layout}, {self.act}"

    def inputs(self, seed=0):
        """float64 arrays x, scale, offset, mean, variance, side input or None, dy."""
        rng = np.random.default_rng(seed)
        x = rng.normal(size=self.shape()) * 2 + 1
        scale, offset, mean = rng.normal(size=(3, self.channels))
        variance = rng.uniform(0.5, 2, size=self.channels)
        side = rng.normal(size=self.shape()) if self.side else None
        return x, scale, offset, mean, variance, side, rng.normal(size=self.shape())


@dataclasses.dataclass(frozen=True)
class RuleCase(Case):
    """A chain of a family of the remapper's rules, in stock code.

    `shapes` are those of its inputs, `result` that of y; `macs` counts multiply-accumulates.
    `alone` says that the forward pass has to stay, so that the backward pass is fused alone;
    `joins` that the rule joins what another one has fused, in the forward pass alone;
    `trained` that it is fused in training alone; `inferred` that stock ops compute its gradients.
    """

    family: str
    shapes: tuple
    result: tuple
    macs: int = 0
    act: str = "relu"
    alone: bool = False
    joins: bool = False
    trained: bool = False
    inferred: bool = False
    dtype: str = "float32"

    @property
    def modes(self):
        """Those of `MODES` in which anything is fused."""
        return MODES[self.alone or self.trained : 1 if self.joins or self.inferred else None]

    def rule(self):
        """The name of the remapper's rule that fuses it."""
        return super().rule() + "_grad" * self.alone

    def title(self):
        """What it is, for people."""
        tensors = [shape for shape in self.shapes if len(shape) > 1]
        sizes = ", ".join("x".join(map(str, shape)) for shape in tensors)
        family = f"{self.family}{'_grad' * self.alone}".replace("_", " ")
        return f"{family}, {sizes}, {self.act.replace('_', ' ')}"

    def inputs(self, seed=0):
        """float64 arrays: the inputs, then dy. Vectors are positive, as a variance has to be."""
        rng = np.random.default_rng(seed)
        for shape in (*self.shapes, self.result):
            if len(shape) == 1:
                yield rng.uniform(0.5, 1.5, size=shape)
            else:
                yield rng.normal(size=shape) / np.sqrt(max(1, np.prod(shape[:-1]) / shape[0]))


@dataclasses.dataclass(frozen=True)
class RecurrentCase(Case):
    """A recurrent layer of Keras that returns the outputs of all steps; `cell` is its rule."""

    cell: str = "lstm"
    batch: int = 2
    steps: int = 3
    features: int = 4
    units: int = 5
    dtype: str = "float32"

    @property
    def gates(self):
        """How many times `units` the columns of the kernels are."""
        return {"lstm": 4, "gru": 3, "simple_rnn": 1}[self.cell]

    def rule(self):
        """The name of the remapper's rule that fuses it."""
        return self.cell

    def title(self):
        """What it is, for people."""
        cell = self.cell.replace("_", " ")
        return f"{cell} {self.features}→{self.units}, {self.batch}x{self.steps}"

    def inputs(self, seed=0):
        """float64 arrays x, kernel, recurrent kernel, bias, of a GRU's products two, and dy."""
        rng = np.random.default_rng(seed)
        columns = self.gates * self.units
        x = rng.normal(size=(self.batch, self.steps, self.features))
        kernels = (
            rng.normal(size=(rows, columns)) / np.sqrt(rows) for rows in (self.features, self.units)
        )
        bias = rng.normal(size=(2, columns) if self.cell == "gru" else columns)
        return x, *kernels, bias, rng.normal(size=(self.batch, self.steps, self.units))


@dataclasses.dataclass(frozen=True)
class QuantizedCase(Case):
    """A dense layer of Keras after `quantize("int8")`: rows of k numbers, and int8 b [k, n]."""

    modes = MODES[:1]

    m: int = 5
    k: int = 4
    n: int = 3
    bias: bool = True
    act: str = "none"
    dtype: str = "float32"

    @property
    def family(self):
        """The family of its rule."""
        return "quantized_matmul" + "_bias" * self.bias

    def title(self):
        """What it is, for people."""
        return f"quantized {self.m}x{self.k}x{self.n}, {self.act.replace('_', ' ')}"

    def inputs(self, seed=0):
        """float64 arrays a, of int8 b, the scale of b's columns, bias if it has one, dy."""
        rng = np.random.default_rng(seed)
        a = rng.normal(size=(self.m, self.k))
        b = rng.integers(-127, 128, size=(self.k, self.n), dtype=np.int8)
        scale = 73 * np.sqrt(max(1, self.k)) * rng.uniform(0.5, 1.5, size=self.n)
        vectors = [rng.normal(size=self.n)] * self.bias
        return a, b, scale, *vectors, rng.normal(size=(self.m, self.n))


@dataclasses.dataclass(frozen=True)
class WeightOnlyCase(Case):
    """A dense layer of Keras of which the weights alone are quantized: rows of k numbers, and b
    [k, n] of 4 bits, two in a byte, with scales and zeros for every `group` of the k, or of 8 bits
    with one scale a column. `form` is how it is spelled: a `matmul`, of rows in two batches a
    `dense` layer by `tensordot` or a `batch_matmul`, of `heads` two columns wide by `matmul` and
    `reshape` or by `einsum`; or the `numbers` alone."""

    modes = MODES[:1]

    m: int = 5
    k: int = 4
    n: int = 3
    bits: int = 4
    group: int = 2
    form: str = "matmul"
    bias: bool = True
    act: str = "none"
    dtype: str = "float32"

    @property
    def family(self):
        """The family of its rule."""
        if self.form == "numbers":
            return "dequantized_weights"
        return f"weight_only_{self.form}" + "_bias" * self.bias

    @property
    def groups(self):
        """How many groups the k fall into."""
        return -(-self.k // self.group)

    def title(self):
        """What it is, for people."""
        act = self.act.replace("_", " ")
        form = "" if self.form == "matmul" else f" {self.form.replace('_', ' ')}"
        return f"{self.bits}-bit weights{form} {self.m}x{self.k}x{self.n}, {act}"

    def inputs(self, seed=0):
        """float64 array a, of int8 b, scales; with 4 bits int8 zeros and the int32 number of each
        row's group; bias if it has one, dy."""
        rng = np.random.default_rng(seed)
        a = rng.normal(size=(self.m, self.k))
        columns = self.n if self.bits == 8 else -(-self.n // 2)
        b = rng.integers(-127, 128, size=(self.k, columns), dtype=np.int8)
        # Few digits, so that products with zeros have no more than bfloat16.
        scale = rng.choice([1, 1.25, 1.5, 1.75], (self.groups, self.n)) / 2 ** round(
            np.log2(4 * np.sqrt(self.k))
        )
        vectors = [rng.normal(size=self.n)] * self.bias
        dy = rng.normal(size=(self.m, self.n))
        if self.bits == 8:
            return a, b, 1024 / scale[0], *vectors, dy
        zero = rng.integers(-7, 8, size=(self.groups, self.n), dtype=np.int8)
        return a, b, scale, zero, np.arange(self.k, dtype=np.int32) // self.group, *vectors, dy


@dataclasses.dataclass(frozen=True)
class DecoderCase(Case):
    """The last `steps` of `length` positions that a decoder generates with a cache of keys and
    values, as KerasHub's Llama: `key_heads` are those of keys and values, `hidden` is the width of
    the gated layers. A step takes in the sum of x and of what the one before has put out, so that
    differences in rounding do not grow from step to step."""

    modes = MODES[:1]

    batch: int = 2
    layers: int = 2
    width: int = 24
    heads: int = 4
    key_heads: int = 2
    hidden: int = 40
    length: int = 9
    steps: int = 4
    dtype: str = "float32"

    @property
    def depth(self):
        """The size of a head."""
        return self.width // self.heads

    def matrices(self):
        """The shapes of a layer's: for query, key, value and output; gate, what it lets pass, and
        down."""
        keys = (self.width, self.key_heads * self.depth)
        square, up = (self.width, self.width), (self.width, self.hidden)
        return square, keys, keys, square, up, up, up[::-1]

    def by_layer(self, weights):
        """The two scales and the matrices of each layer."""
        count = len(weights) // self.layers
        return [weights[i : i + count] for i in range(0, len(weights), count)]

    def title(self):
        """What it is, for people."""
        return (
            f"decoder {self.layers} layers of {self.width}, {self.heads}/{self.key_heads} heads, "
            f"batch {self.batch}, {self.length} positions"
        )

    def inputs(self, seed=0):
        """float64 arrays x [batch, 1, width], cache [batch, layers, 2, length, key heads, depth],
        the scale of what is put out, two scales and the matrices of each layer, dy."""
        rng = np.random.default_rng(seed)
        x, dy = rng.normal(size=(2, self.batch, 1, self.width))
        slots = (self.batch, self.layers, 2, self.length)
        cache = rng.normal(size=(*slots, self.key_heads, self.depth))
        first, *scales = rng.uniform(0.5, 1.5, size=(1 + 2 * self.layers, self.width))
        weights = []
        for pair in zip(scales[::2], scales[1::2], strict=True):
            weights += pair
            weights += (rng.normal(size=s) / np.sqrt(s[0]) for s in self.matrices())
        return x, cache, first, *weights, dy


@dataclasses.dataclass(frozen=True)
class ApplicationCase(Case):
    """A model of `keras.applications` with random weights: images of `size` squared, SGD with
    momentum.

    `macs` and `weights` are the multiply-accumulates for one image, and the numbers, of its
    convolutions and dense layers.
    """

    name: str = "ResNet50"
    macs: int = 1_969_356_800
    weights: int = 25_502_912
    batch: int = 16
    size: int = 160
    dtype: str = "float32"

    classes = 1000

    def title(self):
        """What it is, for people."""
        return f"Keras {self.name}, {self.batch}x{self.size}x{self.size}"
