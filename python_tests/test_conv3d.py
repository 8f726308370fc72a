"""Convolution of volumes + bias + activation: numbers and gradients."""

import dataclasses
import itertools

import cases
import numpy as np
import pytest
import tensorflow as tf
from conftest import ISAS
from gradient_problems import assert_all_close, gradients_of, second_order, weights_for
from hypothesis import given
from hypothesis import strategies as st
from memo import remembered
from test_conv import cast
from test_gradient_places import in_tape_inside_function, in_tape_outside_function
from tolerances import assert_as_exact

import tf_fused_ops as tfo
from tf_fused_ops import _library
from tf_fused_ops.ops import activations, conv3d, conv3d_bias_act, reference

NAMES = ("y", "pre_activation", "dx", "dfilters", "dbias", "dside")


@dataclasses.dataclass(frozen=True)
class Conv3DCase(cases.Case):
    """`volume`, `kernel`, `strides`, `dilations` are (depth, height, width)."""

    batch: int = 2
    volume: tuple = (4, 5, 6)
    cin: int = 3
    cout: int = 4
    kernel: tuple = (3, 3, 3)
    strides: tuple = (1, 1, 1)
    dilations: tuple = (1, 1, 1)
    padding: str = "SAME"
    bias: bool = True
    side: bool = False
    act: str = "relu"
    dtype: str = "float32"

    def output_volume(self):
        """(depth, height, width) of the output; not positive where the kernel does not fit."""
        if self.padding == "SAME":
            return tuple(-(-n // s) for n, s in zip(self.volume, self.strides, strict=True))
        rows = zip(self.volume, self.kernel, self.strides, self.dilations, strict=True)
        return tuple((n - (k - 1) * d - 1) // s + 1 for n, k, s, d in rows)

    def attributes(self):
        """Keyword arguments for the wrapper, the op and the reference."""
        return {
            "strides": [1, *self.strides, 1],
            "dilations": [1, *self.dilations, 1],
            "padding": self.padding,
            "activation": self.act,
            "alpha": cases.ALPHA,
        }

    def inputs(self, seed=0):
        """float64 arrays x, filters, bias, side input, None where one is missing, and dy."""
        rng = np.random.default_rng(seed)
        x = rng.normal(size=(self.batch, *self.volume, self.cin))
        filters = rng.normal(size=(*self.kernel, self.cin, self.cout))
        filters /= np.sqrt(max(1, np.prod(self.kernel) * self.cin))
        bias, y = rng.normal(size=self.cout), (self.batch, *self.output_volume(), self.cout)
        side, dy = rng.normal(size=y), rng.normal(size=y)
        return x, filters, bias if self.bias else None, side if self.side else None, dy


def windows(case):
    """For each tap of the filters the pixels of padded x under it; and the padding."""
    rows = [*zip(case.volume, case.kernel, case.strides, case.dilations, strict=True)]
    out = case.output_volume()
    ends = [(o - 1) * s + (k - 1) * d + 1 for (_, k, s, d), o in zip(rows, out, strict=True)]
    totals = [max(end - row[0], 0) for end, row in zip(ends, rows, strict=True)]
    slices = {
        tap: tuple(
            slice(i * d, i * d + (o - 1) * s + 1, s)
            for i, (_, _, s, d), o in zip(tap, rows, out, strict=True)
        )
        for tap in itertools.product(*map(range, case.kernel))
    }
    return slices, [(0, 0), *((n // 2, n - n // 2) for n in totals), (0, 0)]


def linear(case, x, filters):
    """The convolution by its definition, with gradients of every order."""
    slices, pads = windows(case)
    padded = tf.pad(x, pads)
    return tf.add_n(
        [tf.tensordot(padded[:, d, h, w], filters[tap], 1) for tap, (d, h, w) in slices.items()]
    )


def exact(case, x, filters, bias, side):
    z = linear(case, x, filters)
    z = z if bias is None else z + bias
    return reference.act(z if side is None else z + side, case.act, cases.ALPHA)


def exact_gradients(case, dy, x, filters, saved):
    dz = reference.act_grad(dy, saved, case.act, cases.ALPHA)
    found = gradients_of(lambda *v: linear(case, *v), [x, filters], dz)
    return *found, tf.reduce_sum(dz, [0, 1, 2, 3]), dz


def stock_is_right(case):
    """Stock TensorFlow shifts windows where SAME padding leaves pixels behind the last one."""
    rows = zip(case.volume, case.kernel, case.strides, case.dilations, strict=True)
    return case.padding == "VALID" or all((n - 1) % s <= (k - 1) * d for n, k, s, d in rows)


def fused(case, x, filters, bias, side):
    return conv3d_bias_act(x, filters, bias, side_input=side, **case.attributes())


def raw(case, x, filters, bias=None, side=None, **attributes):
    """y and the pre-activation as the op has them."""
    bias, side = ([] if v is None else [v] for v in (bias, side))
    return _library.ops.tf_fused_ops_conv3d_bias_act(
        input=x, filters=filters, bias=bias, side_input=side, **case.attributes(), **attributes
    )


def fused_gradients(case, dy, x, filters, saved, wanted=(True,) * 4):
    saved = [] if saved is None else [saved]
    return conv3d._gradient_op(dy, x, filters, saved, wanted, case.attributes())


def stock(case, x, filters, bias, side):
    return reference.conv3d_bias_act(x, filters, bias, side, **case.attributes())


def stock_gradients(case, dy, x, filters, saved):
    return reference.conv3d_bias_act_grad(dy, x, filters, saved, **case.attributes())


@remembered
def problem(case, seed):
    """The inputs of a case, what is saved; what is named in `NAMES`, exact and of stock code; and
    how large the sums are of which each may be a small one."""
    *operands, dy = cast(case.inputs(seed), case.dtype)
    *wide, wide_dy = cast([*operands, dy], "float64")
    plain = dataclasses.replace(case, act="none")
    right = [exact(case, *wide), exact(plain, *wide)]
    # The same saved tensor for all: next to a kink rounding decides the slope.
    saved = right[not activations.slope_from_value(case.act, cases.ALPHA)]
    (saved,) = cast([None if case.act == "none" else saved], case.dtype)
    (wide_saved,) = cast([saved], "float64")
    right += exact_gradients(case, wide_dy, *wide[:2], wide_saved)
    others = right
    if stock_is_right(case):
        others = [stock(case, *operands), stock(plain, *operands)]
        others += stock_gradients(case, dy, *operands[:2], saved)
    # Activations cut sums, and biases' gradients may cancel.
    sums = [np.abs(right[1]).max(), *[0] * 3, np.linalg.norm(wide_dy) / np.sqrt(case.cout), 0]
    return operands, dy, saved, right, others, sums


def check(case, seed=0):
    """Asserts that y and the gradients of a case are as exact as those of stock TensorFlow."""
    operands, dy, saved, right, others, sums = problem(case, seed)
    values = [fused(case, *operands), raw(case, *operands, save_pre_activation=True)[1]]
    values += fused_gradients(case, dy, *operands[:2], saved)
    for *row, scale in zip(NAMES, values, others, right, sums, strict=True):
        assert_as_exact(*row, case.dtype, scale)


def path(volume, kernel, cin, cout, **options):
    return Conv3DCase(volume=volume, kernel=kernel, cin=cin, cout=cout, **options)


PATHS = [
    path((7, 5, 9), (3, 3, 3), 3, 17, side=True),
    path((5, 7, 6), (3, 3, 3), 17, 33, strides=(2, 2, 2)),
    path((6, 5, 7), (3, 3, 3), 33, 1, strides=(1, 2, 3), padding="VALID"),
    path((9, 4, 5), (3, 3, 3), 1, 3, strides=(3, 1, 2), batch=3),
    # One plane, and windows that are larger than the volume.
    path((1, 7, 8), (3, 3, 3), 3, 17),
    path((1, 1, 1), (3, 3, 3), 17, 3, side=True),
    path((2, 1, 3), (5, 2, 4), 3, 5, strides=(2, 1, 1), batch=3),
    # Images alone, with planes as images and as lines of pixels.
    path((5, 7, 6), (1, 3, 3), 17, 3),
    path((5, 7, 6), (1, 3, 3), 3, 17, strides=(1, 2, 1), padding="VALID", batch=3),
    path((7, 3, 5), (3, 1, 1), 33, 17),
    path((7, 3, 5), (3, 1, 1), 3, 33, strides=(2, 1, 1), dilations=(2, 1, 1)),
    path((9, 3, 5), (4, 1, 1), 17, 1, strides=(3, 1, 1), padding="VALID", side=True),
    path((3, 5, 4), (1, 1, 1), 17, 33, side=True),
    # The same but for strides that skip planes or pixels.
    path((7, 5, 6), (1, 3, 3), 5, 7, strides=(2, 1, 1)),
    path((7, 5, 6), (3, 1, 1), 5, 7, strides=(1, 2, 3)),
    path((5, 7, 6), (1, 1, 1), 3, 17, strides=(2, 3, 1), batch=3),
    path((6, 7, 5), (2, 3, 2), 17, 5, strides=(2, 1, 2)),
    # Dilation, also of the depth, also with strides that do and do not divide it.
    path((9, 6, 7), (3, 3, 3), 3, 4, dilations=(2, 1, 1), batch=1),
    path((9, 8, 7), (3, 2, 3), 17, 3, dilations=(3, 2, 1), strides=(2, 1, 2)),
    path((9, 8, 7), (3, 3, 2), 3, 17, dilations=(2, 2, 3), strides=(4, 2, 1), padding="VALID"),
    path((8, 5, 6), (2, 3, 3), 1, 1, dilations=(4, 2, 2), strides=(2, 2, 2), batch=3),
    path((11, 2, 3), (3, 1, 2), 3, 5, dilations=(5, 1, 2), strides=(3, 2, 1)),
]


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("case", PATHS, ids=str)
def test_paths(case, dtype, isa):
    check(dataclasses.replace(case, dtype=dtype))
    assert _library.isa() == isa


# Images of 1.5 MiB, of which a few are gathered at a time.
MANY = path((11, 64, 64), (3, 1, 2), 32, 3, batch=1, act="silu")
# Small ones, the last of which are fewer than the ones before.
SMALL = path((701, 3, 8), (3, 2, 1), 33, 3, strides=(2, 1, 1), batch=3, side=True)


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("case", [MANY, SMALL], ids=str)
def test_more_planes_than_are_gathered_at_a_time(case, dtype, isa):
    check(dataclasses.replace(case, dtype=dtype, act="silu"))


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("act", cases.ACTIVATIONS)
def test_activations(act, dtype, isa):
    for kernel, bias, side in (((3, 3, 3), True, True), ((1, 2, 2), False, True)):
        check(path((3, 4, 3), kernel, 17, 33, act=act, dtype=dtype, bias=bias, side=side))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kernel", [(3, 3, 3), (1, 3, 3)], ids=str)
def test_optional_inputs(kernel, dtype, isa):
    for act, bias, side in itertools.product(["none", "mish"], [False, True], [False, True]):
        check(path((3, 4, 5), kernel, 5, 7, act=act, dtype=dtype, bias=bias, side=side))


def triples(low, high):
    return st.tuples(*[st.integers(low, high)] * 3)


RANDOM_CASES = st.builds(
    Conv3DCase,
    batch=st.integers(1, 3),
    volume=triples(1, 7),
    kernel=triples(1, 3),
    strides=triples(1, 4),
    dilations=triples(1, 3),
    padding=st.sampled_from(["SAME", "VALID"]),
    cin=st.integers(1, 35),
    cout=st.integers(1, 35),
    bias=st.booleans(),
    side=st.booleans(),
    act=st.sampled_from(cases.ACTIVATIONS),
    dtype=st.sampled_from(["float32", "float64"]),
)


@given(case=RANDOM_CASES, seed=st.integers(0, 1000))
def test_random_shapes(case, seed):
    if min(case.output_volume()) > 0:
        check(case, seed)


# Batch, volume, channels, kernel and padding; of windows that are larger than the volume by less
# than twice the stride nothing comes out.
EMPTY = [
    *((0, (4, 5, 6), 3, 4, (3, 3, 3), "SAME"), (0, (4, 5, 6), 3, 4, (1, 3, 3), "SAME")),
    *((2, (4, 5, 6), 0, 4, (3, 3, 3), "SAME"), (2, (4, 5, 6), 0, 4, (3, 1, 1), "SAME")),
    *((2, (4, 5, 6), 3, 0, (3, 3, 3), "SAME"), (2, (4, 5, 6), 0, 0, (1, 1, 1), "VALID")),
    *((2, (0, 5, 6), 3, 4, (3, 3, 3), "SAME"), (2, (0, 5, 6), 3, 4, (1, 3, 3), "SAME")),
    *((2, (4, 0, 6), 3, 4, (3, 3, 3), "SAME"), (2, (4, 5, 0), 3, 4, (3, 1, 1), "SAME")),
    *((2, (2, 5, 6), 3, 4, (3, 3, 3), "VALID"), (2, (4, 2, 6), 3, 4, (3, 3, 3), "VALID")),
    *((2, (2, 5, 6), 3, 4, (3, 1, 1), "VALID"), (0, (0, 0, 0), 0, 0, (3, 3, 3), "SAME")),
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("batch", "volume", "cin", "cout", "kernel", "padding"), EMPTY, ids=str)
def test_nothing_of_some_dimension(batch, volume, cin, cout, kernel, padding, dtype, isa):
    case = path(volume, kernel, cin, cout, batch=batch, padding=padding, dtype=dtype)
    x, filters = (tf.ones(v, dtype) for v in ((batch, *volume, cin), (*kernel, cin, cout)))
    bias = tf.range(-1, cout - 1, dtype=dtype)
    with tf.GradientTape() as tape:
        tape.watch([x, filters, bias])
        y = fused(case, x, filters, bias, None)
    sizes = [batch, *case.output_volume(), cout]
    np.testing.assert_array_equal(y, np.broadcast_to(tf.nn.relu(bias), sizes))
    assert 0 in (*sizes, cin)
    dx, dfilters, dbias = tape.gradient(y, [x, filters, bias])
    np.testing.assert_array_equal(dx, tf.zeros_like(x))
    np.testing.assert_array_equal(dfilters, tf.zeros_like(filters))
    np.testing.assert_array_equal(dbias, np.prod(sizes[:4]) * (bias.numpy() > 0))


def persistent(layer, inputs, dy):
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(inputs)
        y = layer(*inputs)
    first = tape.gradient(y, inputs, output_gradients=dy)
    again = [tape.gradient(y, value, output_gradients=dy) for value in inputs]
    assert_all_close(again, first, 16)
    return first


def in_fusing_function(layer, inputs, dy):
    return tfo.function(lambda *v: gradients_of(layer, list(v), dy))(*inputs)


PLACES = [persistent, in_tape_inside_function, in_tape_outside_function, in_fusing_function]
OPTIONAL = [(True, True), (False, False), (True, False), (False, True)]


@pytest.mark.parametrize("act", ["none", "relu", "silu"])
@pytest.mark.parametrize(("bias", "side"), OPTIONAL)
@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
def test_gradients_of_the_wrapper(place, bias, side, act):
    """Of all inputs that are there, and of each alone."""
    case = Conv3DCase(act=act, bias=bias, side=side, dtype="float64", strides=(1, 2, 1))
    *operands, dy = cast(case.inputs(), "float64")

    def gradients(layer, place, asked):
        def run(*given):
            values = dict(enumerate(operands)) | dict(zip(asked, given, strict=True))
            return layer(case, *values.values())

        return place(run, [operands[i] for i in asked], dy)

    there = [i for i, value in enumerate(operands) if value is not None]
    expected = gradients(exact, gradients_of, there)
    assert_all_close(gradients(fused, place, there), expected)
    for i, value in zip(there, expected, strict=True):
        assert_all_close(gradients(fused, place, [i]), [value])


@pytest.mark.parametrize("kernel", [(3, 3, 3), (1, 3, 3)], ids=str)
@pytest.mark.parametrize("wanted", [*itertools.product([False, True], repeat=4)], ids=str)
def test_only_what_is_asked_for_is_computed(wanted, kernel):
    for act in ("tanh", "none"):
        case = path((3, 4, 5), kernel, 5, 3, act=act)
        operands, dy, saved, *_ = problem(case, 0)
        every = fused_gradients(case, dy, *operands[:2], saved)
        some = fused_gradients(case, dy, *operands[:2], saved, wanted)
        for name, value, other, is_wanted in zip(NAMES[2:], every, some, wanted, strict=True):
            expected = value if is_wanted else np.zeros(0)
            np.testing.assert_array_equal(other, expected, err_msg=name)


SECOND_ORDER = [
    *(Conv3DCase(act=act) for act in ("none", "tanh", "silu", "gelu_tanh")),
    Conv3DCase(act="tanh", strides=(2, 1, 3), padding="VALID"),
    *(Conv3DCase(act="tanh", kernel=kernel) for kernel in ((1, 3, 3), (3, 1, 1))),
    Conv3DCase(act="silu", kernel=(2, 3, 2), dilations=(2, 1, 2), strides=(2, 2, 1)),
    # Windows that leave planes and pixels out.
    Conv3DCase(act="none", kernel=(1, 1, 1), strides=(2, 1, 3)),
    Conv3DCase(act="silu", kernel=(2, 1, 2), strides=(1, 3, 4)),
]


@pytest.mark.parametrize("case", SECOND_ORDER, ids=str)
def test_second_order(case):
    case = dataclasses.replace(case, side=True, dtype="float64", cin=2, cout=3)
    *inputs, dy = cast(case.inputs(), "float64")
    weights = weights_for(inputs)
    expected = second_order(lambda *v: exact(case, *v), inputs, dy, weights)
    for run in (second_order, tf.function(second_order, autograph=False)):
        assert_all_close(run(lambda *v: fused(case, *v), inputs, dy, weights), expected)


PROGRAM = """
import hashlib, sys
import numpy as np
import tensorflow as tf
from tf_fused_ops import _library
from tf_fused_ops.ops import conv3d_bias_act

rng = np.random.default_rng(0)
for isa in sys.argv[1:]:
    _library.set_isa(isa)
    for dtype in ("float32", "bfloat16", "float64"):
        for volume, kernel, strides in (
            ((1, 9, 40, 41, 33), (3, 3, 3), 1), ((3, 30, 9, 8, 65), (3, 3, 2), 2),
            ((2, 5, 20, 21, 17), (1, 3, 3), 1), ((2, 5, 20, 21, 17), (3, 1, 1), 1),
        ):
            shapes = volume, (*kernel, volume[-1], 35), (35,)
            inputs = [tf.cast(tf.constant(rng.normal(size=v)), dtype) for v in shapes]
            digests = []
            for _ in range(2):
                with tf.GradientTape() as tape:
                    tape.watch(inputs)
                    y = conv3d_bias_act(*inputs, strides=strides, activation="silu")
                values = [y, *tape.gradient(y, inputs, output_gradients=y)]
                bits = b"".join(v.numpy().tobytes() for v in values)
                digests.append(hashlib.sha256(bits).hexdigest())
            print(isa, *sorted({*digests}))
"""


def test_bitwise_equal_for_any_number_of_threads_and_from_run_to_run(run_python):
    first, second = (run_python(PROGRAM, *ISAS, threads=threads) for threads in (1, 2))
    assert [len(line.split()) for line in first.splitlines()] == [2] * 12 * len(ISAS), first
    assert second == first
