"""Recurrent layers: numbers and gradients of every order, masks, shapes, what is kept."""

import dataclasses
import functools

import cases
import keras
import numpy as np
import pytest
import tensorflow as tf
from cases import RecurrentOpCase
from gradient_problems import assert_all_close, gradients_of, problem, second_order, weights_for
from hypothesis import given
from hypothesis import strategies as st
from memo import remembered
from tolerances import assert_as_exact

from tf_fused_ops import _library, gru, lstm, simple_rnn
from tf_fused_ops.ops import reference

CELLS = {"rnn": simple_rnn, "gru": gru, "lstm": lstm}
LAYERS = {"rnn": keras.layers.SimpleRNN, "gru": keras.layers.GRU, "lstm": keras.layers.LSTM}
STATES = ("h", "c")


def states_of(case):
    return STATES if case.cell == "lstm" else STATES[:1]


def used(case, y, last):
    """What a case asks for."""
    return {"both": [y, *last], "y": [y], "last": list(last)}[case.used]


def fused(case, mask, **inputs):
    states = [inputs.pop(name) for name in STATES if name in inputs]
    if states:
        inputs["initial_state"] = states if case.cell == "lstm" else states[0]
    y, last = CELLS[case.cell](**inputs, mask=mask, **case.attributes())
    return used(case, y, tf.nest.flatten(last))


def stock_step(cell, act, x, p, h, c=None):
    if cell == "rnn":
        return [act(x + p)]
    if cell == "gru":
        (xz, xr, xn), (pz, pr, pn) = tf.split(x, 3, -1), tf.split(p, 3, -1)
        z = tf.sigmoid(xz + pz)
        return [z * h + (1 - z) * act(xn + tf.sigmoid(xr + pr) * pn)]
    i, f, g, o = tf.split(x + p, 4, -1)
    c = tf.sigmoid(f) * c + tf.sigmoid(i) * act(g)
    return [tf.sigmoid(o) * act(c), c]


def stock(case, mask, x, kernel, recurrent_kernel, bias=None, recurrent_bias=None, **states):
    """As people write it, step by step."""
    act = {"tanh": tf.tanh, "relu": tf.nn.relu}[case.act]
    (batch, steps, _), units = x.shape, recurrent_kernel.shape[0]
    zeros = tf.zeros([batch, units], x.dtype)
    states = list(states.values()) or [zeros] * (2 if case.cell == "lstm" else 1)
    x = tf.matmul(x, kernel) + (0 if bias is None else bias)
    outputs, y = [None] * steps, zeros
    for t in range(steps)[:: -1 if case.backwards else 1]:
        p = states[0] @ recurrent_kernel + (0 if recurrent_bias is None else recurrent_bias)
        new = stock_step(case.cell, act, x[:, t], p, *states)
        keep = tf.ones([batch, 1], tf.bool) if mask is None else mask[:, t, None]
        y = outputs[t] = tf.where(keep, new[0], y)
        states = [tf.where(keep, a, b) for a, b in zip(new, states, strict=True)]
    return used(case, tf.stack(outputs, 1) if outputs else zeros[:, None][:, :0], states)


def run(function, case, inputs, dys, mask):
    """Returns by name the outputs of a function and the gradients of its inputs."""
    inputs, dys = {k: tf.constant(v) for k, v in inputs.items()}, list(map(tf.constant, dys))
    outputs = [f"output {i}" for i in range(len(dys))]

    def positional(*values):
        return function(case, mask, **dict(zip(inputs, values, strict=True)))

    found = dict(zip(outputs, positional(*inputs.values()), strict=True))
    gradients = gradients_of(positional, list(inputs.values()), dys)
    for (name, value), gradient in zip(inputs.items(), gradients, strict=True):
        # Without steps nothing but states is used.
        found[f"{name}_grad"] = tf.zeros_like(value) if gradient is None else gradient
    return {k: tf.convert_to_tensor(v) for k, v in found.items()}


def tensors(case, seed=0):
    values, dys = case.inputs(seed)
    return {k: rounded(v, case.dtype) for k, v in values.items()}, [
        rounded(v, case.dtype) for v in dys
    ]


def rounded(value, dtype):
    return tf.cast(tf.constant(value), dtype).numpy()


@remembered
def expected(case, seed):
    """Stock TensorFlow in the dtype of a case, and in float64."""
    inputs, dys = tensors(case, seed)
    wide = {k: v.astype(np.float64) for k, v in inputs.items()}
    mask = case.mask(seed)
    return run(stock, case, inputs, dys, mask), run(
        stock, case, wide, [dy.astype(np.float64) for dy in dys], mask
    )


def check(case, seed=0):
    found = run(fused, case, *tensors(case, seed), case.mask(seed))
    narrow, wide = expected(case, seed)
    for name, value in found.items():
        assert value.dtype == case.dtype
        assert_as_exact(name, value, narrow[name], wide[name], case.dtype)


@pytest.mark.parametrize("case", cases.recurrent_cases(), ids=str)
def test_forward_and_gradient(case, isa):
    check(case)
    assert _library.isa() == isa


@given(
    case=st.builds(
        RecurrentOpCase,
        cell=st.sampled_from(list(CELLS)),
        shape=st.tuples(*(st.integers(1, n) for n in (20, 9, 20, 150))),
        backwards=st.booleans(),
        masked=st.booleans(),
        bias=st.booleans(),
        states=st.booleans(),
        used=st.sampled_from(["both", "y", "last"]),
        dtype=st.sampled_from(cases.DTYPES),
    ),
    seed=st.integers(0, 1000),
)
def test_random_cases(case, seed):
    check(case, seed)


def by_keras(case, mask, inputs, dys):
    """What `run` returns, by a layer of Keras."""
    layer = LAYERS[case.cell](
        case.shape[-1],
        activation=case.act,
        use_bias=case.bias,
        return_sequences=True,
        return_state=True,
        go_backwards=case.backwards,
        dtype=case.dtype,
    )
    layer.build(case.shape[:3])
    weights = {k: inputs[k] for k in ("kernel", "recurrent_kernel", "bias") if k in inputs}
    if "recurrent_bias" in inputs:
        weights["bias"] = np.stack([inputs["bias"], inputs["recurrent_bias"]])
    layer.set_weights(list(weights.values()))
    free = {k: tf.constant(v) for k, v in inputs.items() if k in ("x", *STATES)}
    states = [free[name] for name in STATES if name in free]
    with tf.GradientTape() as tape:
        tape.watch(free)
        y, *last = layer(free["x"], initial_state=states or None, mask=mask)
        # Keras has the outputs in the order in which it computes them.
        y = y[:, ::-1] if case.backwards else y
    variables = {k: v.value for k, v in zip(weights, layer.trainable_weights, strict=True)}
    gradients = tape.gradient([y, *last], free | variables, output_gradients=dys)
    found = {f"output {i}": value for i, value in enumerate([y, *last])}
    found |= {f"{name}_grad": value for name, value in gradients.items()}
    if "recurrent_bias" in inputs:
        found["bias_grad"], found["recurrent_bias_grad"] = found["bias_grad"]
    return found


KERAS = {
    "cell": tuple(CELLS),
    "shape": ((7, 6, 3, 5), (10, 7, 2, 9)),
    "act": ("tanh", "relu"),
    "backwards": (False, True),
    "masked": (True, False),
    "bias": (True, False),
    "states": (True, False),
}


@pytest.mark.parametrize(
    "case", [RecurrentOpCase(**row, dtype="float64") for row in cases.pairwise(KERAS)], ids=str
)
def test_against_keras(case):
    inputs, dys = tensors(case)
    found = run(fused, case, inputs, dys, case.mask())
    theirs = by_keras(case, case.mask(), inputs, dys)
    assert found.keys() == theirs.keys()
    assert_all_close(found.values(), (theirs[name] for name in found), 64)


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("batch", [7, 70])
def test_masked_steps_are_not_read(batch, cell, backwards, dtype, isa):
    """Nor are gradients of outputs before any step that counts; the kernel's, a product, are."""
    shape = (batch, 6, 3, 19)
    case = RecurrentOpCase(cell=cell, shape=shape, backwards=backwards, dtype=dtype)
    (inputs, (dy, *dlast)), mask = tensors(case), case.mask()
    clean = run(fused, case, inputs, [dy, *dlast], mask)
    nan = np.array(np.nan, dy.dtype)
    inputs["x"] = np.where(mask[..., None], inputs["x"], nan)
    order = slice(None, None, -1 if backwards else 1)
    seen = np.maximum.accumulate(mask[:, order], 1)[:, order]
    assert not seen.all() and not mask.all(1).any() and not mask.any(1).all()
    found = run(fused, case, inputs, [np.where(seen[..., None], dy, nan), *dlast], mask)
    for name in found.keys() - {"kernel_grad"}:
        np.testing.assert_array_equal(found[name], clean[name], name)
        assert np.isfinite(tf.cast(found[name], tf.float64)).all(), name
    y, x_grad = (tf.cast(found[name], tf.float64).numpy() for name in ("output 0", "x_grad"))
    assert not y[~seen].any() and not x_grad[~mask].any()
    # A state that no step changes is the one given, as is its gradient.
    h, rows = found["output 1"].numpy(), ~mask.any(1)
    np.testing.assert_array_equal(h[rows], inputs["h"][rows])
    np.testing.assert_array_equal(found["h_grad"].numpy()[rows], dlast[0][rows])


def test_special_numbers(isa):
    """They stay in their rows, and in the steps that follow."""
    case = RecurrentOpCase(shape=(9, 5, 3, 17), masked=False)
    inputs, dys = tensors(case)
    clean = run(fused, case, inputs, dys, None)
    inputs["x"] = inputs["x"].copy()
    inputs["x"][4, 2, 1] = np.nan
    found = run(fused, case, inputs, dys, None)
    rows = np.arange(9) != 4
    for name in ("output 0", "output 1", "output 2", "x_grad", "h_grad", "c_grad"):
        np.testing.assert_array_equal(found[name].numpy()[rows], clean[name].numpy()[rows])
    y, other = found["output 0"].numpy()[4], clean["output 0"].numpy()[4]
    np.testing.assert_array_equal(y[:2], other[:2])
    assert np.isnan(y[2:]).all()


@pytest.mark.parametrize("act", ["tanh", "relu"])
@pytest.mark.parametrize("cell", CELLS)
def test_saturation(cell, act, isa):
    """Large numbers, of either sign, lead to no NaN."""
    case = RecurrentOpCase(cell=cell, shape=(3, 4, 1, 9), act=act, masked=False, dtype="float64")
    inputs, dys = tensors(case)
    inputs["kernel"] = 1e5 * np.sign(inputs["kernel"])
    found, theirs = (run(function, case, inputs, dys, None) for function in (fused, stock))
    for name, value in found.items():
        np.testing.assert_allclose(value, theirs[name], rtol=1e-9, atol=1e-9, err_msg=name)


def test_outputs_that_nobody_uses():
    """Each alone has stock's gradients, in functions too."""
    case = RecurrentOpCase(shape=(3, 4, 2, 5), backwards=True, dtype="float64")
    inputs, dys = tensors(case)
    values = [tf.constant(v) for v in inputs.values()]

    def only(function, i):
        return lambda *v: function(case, case.mask(), **dict(zip(inputs, v, strict=True)))[i]

    for i, dy in enumerate(dys):
        theirs = gradients_of(only(stock, i), values, dy)
        for ours in (only(fused, i), tf.function(only(fused, i))):
            assert_all_close(gradients_of(ours, values, dy), theirs)


@pytest.mark.parametrize("form", CELLS)
def test_against_finite_differences(form):
    ours, _, inputs, _ = problem(form, "tanh")
    theory, numbers = tf.test.compute_gradient(ours, inputs, delta=1e-4)
    for i, (value, other) in enumerate(zip(theory, numbers, strict=True)):
        np.testing.assert_allclose(value, other, atol=2e-6, rtol=1e-5, err_msg=f"input {i}")


@pytest.mark.parametrize("act", ["tanh", "relu"])
@pytest.mark.parametrize("form", CELLS)
def test_second_order(form, act):
    ours, theirs, inputs, dy = problem(form, act)
    weights = weights_for(inputs)
    wanted = second_order(theirs, inputs, dy, weights)
    assert_all_close(second_order(ours, inputs, dy, weights), wanted)
    in_function = tf.function(second_order, autograph=False)
    assert_all_close(in_function(ours, inputs, dy, weights), wanted)


@pytest.mark.parametrize("form", CELLS)
def test_second_order_against_finite_differences(form):
    ours, _, inputs, dy = problem(form, "tanh")
    theory, numbers = tf.test.compute_gradient(
        lambda *v: gradients_of(ours, list(v[:-1]), v[-1])[0], [*inputs, dy], delta=1e-4
    )
    for value, other in zip(theory, numbers, strict=True):
        np.testing.assert_allclose(value, other, atol=1e-5, rtol=1e-5)


def raw_inputs(case):
    """Returns x, with the inputs' product in it, kernel, states, bias and dys."""
    inputs, dys = tensors(case)
    inputs = {k: tf.constant(v) for k, v in inputs.items()}
    x = inputs["x"] @ inputs["kernel"] + (inputs["bias"] if case.bias else 0)
    states = [inputs[name] for name in STATES if name in inputs]
    bias = [inputs["recurrent_bias"]] if "recurrent_bias" in inputs else []
    return x, inputs["recurrent_kernel"], states, bias, list(map(tf.constant, dys))


def raw(x, kernel, states, bias, mask, **options):
    y, last, saved = _library.ops.tf_fused_ops_recurrent(
        x=x, kernel=kernel, states=states, bias=bias, mask=mask, **options
    )
    return [y, *last, saved]


def options_of(case):
    return {"cell": case.cell, "activation": case.act, "backwards": case.backwards}


REFERENCE = {
    "cell": tuple(CELLS),
    "act": ("tanh", "relu"),
    "backwards": (False, True),
    "masked": (True, False),
    "bias": (True, False),
    "shape": ((7, 6, 3, 5), (3, 0, 2, 5)),
}


@pytest.mark.parametrize(
    "case", [RecurrentOpCase(**row, dtype="float64") for row in cases.pairwise(REFERENCE)], ids=str
)
def test_reference(case):
    """What graphs without the package compute, which agrees with automatic differentiation."""
    x, kernel, states, bias, (dy, *dlast) = raw_inputs(case)
    mask = [] if case.mask() is None else [tf.constant(case.mask())]
    options = options_of(case)
    y, *last, saved = raw(x, kernel, states, bias, mask, save=True, **options)
    optional = (bias or [None])[0], (mask or [None])[0]
    values = reference.recurrent(x, kernel, states, *optional, **options)
    assert_all_close([y, *last, saved], values, 64)

    dx, dproduct, dstates = _library.ops.tf_fused_ops_recurrent_grad(
        dy=dy, dlast=dlast, kernel=kernel, y=y, saved=saved, states=states, mask=mask, **options
    )
    found = reference.recurrent_grad(dy, dlast, kernel, y, saved, states, *mask, **options)
    assert_all_close(found, [dx, dproduct, *dstates], 64)

    def outputs(x, *states):
        return reference.recurrent(x, kernel, states, *optional, **options)[:-1]

    theirs = gradients_of(outputs, [x, *states], [dy, *dlast])
    # Without steps nothing but states is used.
    theirs[0] = tf.zeros_like(x) if theirs[0] is None else theirs[0]
    assert_all_close([found[0], *found[2:]], theirs, 64)


@pytest.mark.parametrize("cell", CELLS)
def test_what_the_op_keeps_has_gradients(cell):
    """They are stock's."""
    case = RecurrentOpCase(cell=cell, dtype="float64")
    x, kernel, states, bias, _ = raw_inputs(case)
    mask, options = tf.constant(case.mask()), options_of(case)

    def total(outputs):
        return tf.add_n([tf.reduce_sum(value**2) for value in outputs])

    def ours(x, kernel, *rest):
        states, bias = rest[: len(states_of(case))], rest[len(states_of(case)) :]
        return total(raw(x, kernel, states, bias, [mask], save=True, **options))

    def theirs(x, kernel, *rest):
        states, bias = rest[: len(states_of(case))], rest[len(states_of(case)) :]
        bias = bias[0] if bias else None
        return total(reference.recurrent(x, kernel, states, bias, mask, **options))

    inputs, one = [x, kernel, *states, *bias], tf.constant(1.0, tf.float64)
    assert_all_close(gradients_of(ours, inputs, one), gradients_of(theirs, inputs, one))


def recurrent_ops(graph):
    return [op for op in graph.get_operations() if op.type == "TfFusedOps>Recurrent"]


@pytest.mark.parametrize("cell", CELLS)
def test_kept_only_for_a_gradient(cell):
    case = RecurrentOpCase(cell=cell)
    inputs = {k: tf.constant(v) for k, v in tensors(case)[0].items()}

    def forward(inputs):
        return fused(case, case.mask(), **inputs)

    def step(inputs):
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            y = forward(inputs)
        return tape.gradient(y, inputs)

    for function, saves in ((forward, False), (step, True)):
        graph = tf.function(function).get_concrete_function(inputs).graph
        (op,) = recurrent_ops(graph)
        assert op.get_attr("save") == saves

    x, kernel, states, bias, _ = raw_inputs(case)
    sizes = [
        tf.size(raw(x, kernel, states, bias, [], save=save, **options_of(case))[-1])
        for save in (False, True)
    ]
    batch, steps, _, units = case.shape
    assert sizes == [0, {"rnn": 0, "gru": 4, "lstm": 5}[cell] * batch * steps * units]


@pytest.mark.parametrize("watched", [False, True])
def test_kept_by_ops_that_run_eagerly(watched, monkeypatch):
    """What a tape does not record keeps nothing; what it does runs once."""
    saves, ops = [], _library.ops
    original = ops.tf_fused_ops_recurrent

    def spy(*args, save=False, **kwargs):
        saves.append(save)
        return original(*args, save=save, **kwargs)

    monkeypatch.setattr(ops, "tf_fused_ops_recurrent", spy)
    case = RecurrentOpCase()
    inputs = {k: tf.constant(v) for k, v in tensors(case)[0].items()}
    with tf.GradientTape() as tape:
        if watched:
            tape.watch(inputs)
        y = fused(case, case.mask(), **inputs)
    if watched:
        tape.gradient(y, inputs)
    assert saves == [watched]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("cell", CELLS)
def test_unknown_sizes(cell, dtype):
    """One trace serves all."""
    case = RecurrentOpCase(cell=cell, dtype=dtype, used="both")
    first, second = (dataclasses.replace(case, shape=s) for s in ((3, 4, 2, 5), (9, 7, 2, 5)))
    inputs = tensors(first)[0]
    specs = {k: tf.TensorSpec(v.shape, dtype) for k, v in inputs.items()}
    specs |= {"x": tf.TensorSpec([None, None, 2], dtype)}
    specs |= {k: tf.TensorSpec([None, None], dtype) for k in STATES if k in specs}
    dys = [tf.TensorSpec([None, None, 5], dtype), *[tf.TensorSpec([None, 5], dtype)] * 2]
    dys = dys[: 1 + len(states_of(case))]
    signature = [specs, dys, tf.TensorSpec([None, None], tf.bool)]

    @tf.function(input_signature=signature, autograph=False)
    def traced(inputs, dys, mask):
        values = list(inputs.values())

        def positional(*values):
            return fused(case, mask, **dict(zip(inputs, values, strict=True)))

        y = positional(*values)
        assert y[0].shape.as_list() == [None, None, 5] and y[1].shape.as_list() == [None, 5]
        return [*y, *gradients_of(positional, values, dys)]

    for sized in (first, second):
        values, dys = tensors(sized)
        theirs = run(fused, sized, values, dys, sized.mask())
        found = traced(values, dys, sized.mask())
        for value, other in zip(found, theirs.values(), strict=True):
            np.testing.assert_array_equal(value, other)


@pytest.mark.parametrize("cell", CELLS)
def test_shapes_in_graphs(cell):
    """What is known of one tensor is known of all."""
    gates, parts = {"rnn": (1, 0), "gru": (3, 4), "lstm": (4, 5)}[cell]
    count = 1 + (cell == "lstm")
    known = {}

    def trace(x, kernel, state, mask):
        specs = (*(tf.TensorSpec(shape) for shape in (x, kernel, state)), tf.TensorSpec(mask, bool))

        def traced(x, kernel, state, mask):
            states, options = [state] * count, {"cell": cell}
            outputs = raw(x, kernel, states, [], [mask], save=True, **options)
            y, *last, saved = outputs
            gradients = _library.ops.tf_fused_ops_recurrent_grad(
                *(y, last, kernel, y, saved, states, [mask]), **options
            )
            known["outputs"] = [value.shape.as_list() for value in outputs]
            known["gradients"] = [v.shape.as_list() for v in tf.nest.flatten(gradients)]
            known["not saved"] = raw(x, kernel, states, [], [], **options)[-1].shape.rank

        tf.function(traced, autograph=False).get_concrete_function(*specs)

    def check_known(batch, steps, units, gate_units):
        assert known["outputs"] == [
            *([batch, steps, units], *[[batch, units]] * count),
            [batch, steps, None if units is None and parts else parts * (units or 0)],
        ]
        products = [batch, steps, gate_units] if cell == "gru" else [0]
        assert known["gradients"] == [
            *([batch, steps, gate_units], products, *[[batch, units]] * count)
        ]
        assert known["not saved"] is None

    columns = 5 * gates
    for shapes, sizes in {
        (None, (5, columns), None, None): (None, None, 5, columns),
        ((None, 3, columns), None, None, (2, None)): (2, 3, 5, columns),
        ((None, None, None), (None, columns), (4, None), (None, 6)): (4, 6, 5, columns),
        ((2, None, None), (None, None), (None, 5), None): (2, None, 5, columns),
        ((None, 3, None), None, None, (2, 3)): (2, 3, None, None),
    }.items():
        trace(*shapes)
        check_known(*sizes)


def test_in_a_loop():
    """Layers one after the other with the same weights, in a loop that a tape records."""
    case = RecurrentOpCase(shape=(3, 4, 5, 5), states=False, used="y", dtype="float64")
    inputs, (dy,) = tensors(case)
    values = [tf.constant(v) for v in inputs.values()]

    def rounds(function, loop):
        def body(x, *weights):
            return function(case, case.mask(), x, *weights)[0]

        def in_loop(x, *weights):
            return tf.while_loop(
                lambda i, _: i < 3, lambda i, x: (i + 1, body(x, *weights)), (0, x)
            )[1]

        def one_by_one(x, *weights):
            return functools.reduce(lambda x, _: body(x, *weights), range(3), x)

        return in_loop if loop else one_by_one

    def layer(case, mask, *values):
        return fused(case, mask, **dict(zip(inputs, values, strict=True)))

    theirs = gradients_of(rounds(stock, False), values, dy)
    ours = rounds(layer, True)
    assert_all_close(gradients_of(tf.function(ours), values, dy), theirs)
    in_function = tf.function(lambda *v: gradients_of(ours, list(v), dy))
    assert_all_close(in_function(*values), theirs)


@pytest.mark.parametrize("shape", [(0, 2**57, 4), (2**33, 3, 0)])
def test_huge_but_empty(shape):
    batch, _, units = shape
    values = {"x": tf.zeros(shape), "kernel": tf.zeros([units] * 2)}
    values["states"] = [tf.zeros([batch, units])]
    forward = _library.ops.tf_fused_ops_recurrent(**values, bias=[], mask=[], cell="rnn")
    assert forward.y.shape == shape
    assert forward.last[0].shape == (batch, units)


@pytest.mark.parametrize("cell", CELLS)
def test_gradients_without_units(cell):
    case = RecurrentOpCase(cell=cell, shape=(3, 4, 2, 1))
    inputs = {k: v[..., :0] for k, v in tensors(case)[0].items() if k != "x"}
    inputs |= {"x": tensors(case)[0]["x"], "recurrent_kernel": inputs["recurrent_kernel"][:0]}
    dys = [np.zeros((3, 4, 0), "float32"), *[np.zeros((3, 0), "float32")] * len(states_of(case))]
    found = run(fused, case, inputs, dys, case.mask())
    assert not np.any(found["x_grad"]) and found["recurrent_kernel_grad"].shape == (0, 0)
