"""What a case costs at least, and so how fast a machine can be at best."""

import functools
import math
from typing import NamedTuple

from tf_fused_ops.bench.cases import (
    ApplicationCase,
    BatchNormCase,
    ConvCase,
    ConvTransposeCase,
    DecoderCase,
    MatMulCase,
    QuantizedCase,
    RecurrentCase,
    RuleCase,
    WeightOnlyCase,
)

BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
SLOPE_FROM_VALUE = ("relu", "relu6", "elu", "selu", "leaky_relu", "sigmoid", "tanh")


class Work(NamedTuple):
    """Multiply-accumulates, and bytes read and written."""

    macs: int
    bytes: int

    def limit_seconds(self, roofs):
        """The least time on a machine: the larger of arithmetic's and memory's.

        Args:
            roofs: A `machine.Roofs`.
        """
        return max(2 * self.macs / roofs.operations, self.bytes / roofs.bytes)


class IntegerWork(Work):
    """Likewise, where the multiply-accumulates are of 8-bit integers."""

    def limit_seconds(self, roofs):
        """The least time on a machine, by memory alone where its rate of these is not known.

        Args:
            roofs: A `machine.Roofs`.
        """
        memory = self.bytes / roofs.bytes
        return max(2 * self.macs / roofs.integers, memory) if roofs.integers else memory


@functools.singledispatch
def work(case, mode):
    """The least `Work` of a case.

    The training step reads what the forward pass kept (x, w and y, or the pre-activation where the
    slope cannot be read off y) and returns y, dx, dw and db. Batch norm takes its statistics before
    it uses them, so it reads x twice, and x and dy twice in the backward pass. A recurrent layer
    keeps its gates and other states where the slopes cannot be read off y.

    Args:
        case: A case.
        mode: "forward" or "step".

    Returns:
        A `Work`.
    """
    raise TypeError(f"case: {type(case).__name__} has no known cost")


def _contraction(case, mode, macs, x, w, y):
    """The work of a product of which x, w and y are the numbers of elements."""
    if case.act == "none":
        slope = 0
    elif case.act in SLOPE_FROM_VALUE:
        slope = y
    else:
        slope = 2 * y  # the pre-activation, written and read
    return _passes(case, mode, macs, x + w, y, slope)


def _passes(case, mode, macs, inputs, y, slope):
    """The work of y from inputs; the slopes take so many elements, written or read."""
    size = BYTES[case.dtype]
    if mode == "forward":
        return Work(macs, size * (inputs + y))
    return Work(3 * macs, size * (3 * inputs + 2 * y + slope))


@work.register
def _(case: ConvCase, mode):
    height, width = case.output_image()
    pixels = case.batch * height * width
    filters = math.prod(case.kernel) * case.cin // case.groups * case.cout
    x = case.batch * math.prod(case.image) * case.cin
    return _contraction(case, mode, pixels * filters, x, filters, pixels * case.cout)


@work.register
def _(case: ConvTransposeCase, mode):
    filters = math.prod(case.kernel) * case.cin * case.cout
    pixels = case.batch * math.prod(case.convolution().output_image())
    y = math.prod(case.output_shape())
    return _contraction(case, mode, pixels * filters, pixels * case.cin, filters, y)


@work.register
def _(case: MatMulCase, mode):
    rows = math.prod(case.lead) * case.m
    return _contraction(
        case, mode, rows * case.k * case.n, rows * case.k, case.k * case.n, rows * case.n
    )


@work.register
def _(case: BatchNormCase, mode):
    tensor = math.prod(case.shape()) * BYTES[case.dtype]
    forward = (3 + case.side) * tensor
    backward = (5 + case.side) * tensor
    return Work(0, forward if mode == "forward" else forward + backward)


@work.register
def _(case: RuleCase, mode):
    inputs = sum(map(math.prod, case.shapes))
    return _contraction(case, mode, case.macs, inputs, 0, math.prod(case.result))


@work.register
def _(case: RecurrentCase, mode):
    rows, columns = case.batch * case.steps, case.gates * case.units
    weights = (case.features + case.units) * columns
    y = rows * case.units
    # For each element of y: an LSTM's gates and its other state; a GRU's, and the part of the
    # recurrent product that is reset.
    kept = {"lstm": 5, "gru": 4, "simple_rnn": 0}[case.cell]
    inputs = rows * case.features + weights
    return _passes(case, mode, rows * weights, inputs, y, (1 + 2 * kept) * y)


@work.register
def _(case: QuantizedCase, mode):
    numbers = case.m * case.k + case.m * case.n
    weights = case.k * case.n  # of a byte
    return IntegerWork(case.m * weights, BYTES[case.dtype] * numbers + weights)


@work.register
def _(case: WeightOnlyCase, mode):
    numbers = case.m * case.k + case.m * case.n
    weights = case.k * case.n
    scales = (4 + 1) * case.groups * case.n if case.bits == 4 else 4 * case.n
    read = weights * case.bits // 8 + scales
    if case.form == "numbers":
        return Work(0, BYTES[case.dtype] * weights + read)
    return Work(case.m * weights, BYTES[case.dtype] * numbers + read)


@work.register
def _(case: DecoderCase, mode):
    matrices = case.layers * sum(map(math.prod, case.matrices()))
    scales = (1 + 2 * case.layers) * case.width
    # What queries see, over all steps.
    positions = sum(range(case.length - case.steps + 1, case.length + 1))
    seen = case.batch * case.layers * 2 * positions * case.depth
    # A lower bound: each step reads the weights, and of the cache what it sees.
    numbers = case.steps * (matrices + scales) + seen * case.key_heads
    macs = case.steps * case.batch * matrices + seen * case.heads
    return Work(macs, BYTES[case.dtype] * numbers)


@work.register
def _(case: ApplicationCase, mode):
    images = case.batch * case.size**2 * 3
    # A lower bound: what the layers hand on is left out. The step reads weights and momentum and
    # writes both.
    passes = 1 if mode == "forward" else 4
    macs = case.batch * case.macs * (1 if mode == "forward" else 3)
    return Work(macs, BYTES[case.dtype] * (images + passes * case.weights))
