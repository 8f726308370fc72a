"""Backward passes whose forward pass is elsewhere: in another function, or not of stock ops."""

import pytest
import tensorflow as tf
from remapping import asked_for, assert_same, check, op_counts, plain, reasons, rule_counts, values
from test_remapper_backward import NEIGHBOURS
from test_remapper_graph_def import counts, run
from test_remapper_rules import CONV_CASES, attrs, operands, row_id

from tf_fused_ops.function import function
from tf_fused_ops.remapper import RemapOptions, remap, rules

# Their gradients read nothing of the forward pass but the output or the argument.
ACTIVATIONS = ("none", "relu", "relu6", "elu", "selu", "leaky_relu", "sigmoid", "tanh")
ROWS = [
    rule
    for rule in rules.RULES
    if rule.gradient_ops
    and rule.activation.name in ACTIVATIONS
    and rule.spelling is rule.activation.spellings[0]
]
RELU = next(rule for rule in ROWS if rule.name == "conv2d_bias_relu")
STOCK_GRADIENTS = {"Conv2DBackpropInput", "Conv2DBackpropFilter", "BiasAddGrad", "ReluGrad"}


def arguments(rule, **changes):
    """Returns dy, a pre-activation of the same shape, and example operands by name."""
    named = operands(rule)
    y = rule.stock(attrs(rule, **changes), **named)["y"]
    return values(y.shape, y.shape, seed=1), named


def step_of(rule, names, finish=lambda z, dz, gradients, dy: gradients(), **changes):
    """Returns a function of dy, the pre-activation and the operands, which computes gradients; of
    the forward pass nothing is left but, for some activations, the output."""

    def step(dy, z, *args):
        named = dict(zip(names, args, strict=True))
        sources = [named[name] for name in rule.differentiable]
        with tf.GradientTape(persistent=True) as tape:
            tape.watch([z, *sources])
            y = rule.activate(z, attrs(rule, **changes))
            linear = type(rule)().stock(attrs(rule, **changes), **named)["y"]
        dz = dy if y is z else tape.gradient(y, z, output_gradients=dy)
        return finish(z, dz, lambda: tape.gradient(linear, sources, output_gradients=dz), dy)

    return step


@pytest.mark.parametrize("unknown_batch", [False, True])
@pytest.mark.parametrize("bias_op", ["BiasAdd", "AddV2"])
@pytest.mark.parametrize("rule", ROWS, ids=row_id)
def test_gradients_alone(rule, bias_op, unknown_batch):
    (dy, z), named = arguments(rule)
    step = step_of(rule, named, bias_op=bias_op)
    unknown = [0, 1, 2] if unknown_batch else []
    compiled = check(
        step, [dy, z, *named.values()], {f"{rule.name}_grad": 1}, gradients=1, unknown_batch=unknown
    )
    assert not op_counts(compiled.get_concrete_function()).keys() & STOCK_GRADIENTS


@pytest.mark.parametrize("name", CONV_CASES)
def test_convolution_attributes_are_kept(name):
    (dy, z), named = arguments(RELU, **CONV_CASES[name])
    step = step_of(RELU, named, **CONV_CASES[name])
    check(step, [dy, z, *named.values()], {"conv2d_bias_relu_grad": 1}, gradients=1)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.5, -0.5])
def test_leaky_slope_is_kept(alpha):
    rule = next(r for r in ROWS if r.name == "conv2d_bias_leaky_relu")
    (dy, z), named = arguments(rule)
    step = step_of(rule, named, alpha=alpha)
    check(step, [dy, z, *named.values()], {f"{rule.name}_grad": 1}, gradients=1)


@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16"])
def test_other_dtypes(dtype):
    (dy, z), named = arguments(RELU)
    args = [tf.cast(value, dtype) for value in (dy, z, *named.values())]
    check(step_of(RELU, named), args, {"conv2d_bias_relu_grad": 1}, gradients=1)


@pytest.mark.parametrize("wanted", ["x", "w", "xw", "wb", "xb"])
def test_subset_of_gradients(wanted):
    (dy, z), named = arguments(RELU)

    def step(dy, z, *args):
        _, *gradients = step_of(RELU, named, lambda *found: (0, *found[2]()))(dy, z, *args)
        return [gradients["xwb".index(letter)] for letter in wanted]

    rule = "conv2d_bias_relu_grad" if "b" in wanted else "conv2d_relu_grad"
    compiled = check(step, [dy, z, *named.values()], {rule: 1}, gradients=1)
    named = {"input": "x", "filters": "w", "bias": "b", "side_input": "none"}
    found = asked_for(compiled.get_concrete_function(), "TfFusedOps>Conv2DBiasActGrad", named)
    assert found == {name: letter in wanted for name, letter in named.items()}


@pytest.mark.parametrize("neighbour", NEIGHBOURS)
@pytest.mark.parametrize("activation", ["relu", "leaky_relu"])
@pytest.mark.parametrize("family", ["conv2d", "conv2d_bias"])
def test_must_not_fuse(family, activation, neighbour):
    rule = next(r for r in ROWS if r.name == f"{family}_{activation}")
    finish, reason = NEIGHBOURS[neighbour]
    (dy, z), named = arguments(rule)
    step = step_of(rule, named, finish)
    with plain():
        expected = tf.function(step)(dy, z, *named.values())
        compiled = function(step)
        found = compiled(dy, z, *named.values())
    assert_same(found, expected)
    assert f"{rule.name}_grad" not in rule_counts(compiled)
    assert reason in reasons(compiled)[f"{rule.name}_grad"]


def gradient_ops(dz, x, w, **other):
    """The gradients of a convolution as autodiff takes them, but for the other arguments of that by
    the input."""
    sizes, filter_sizes = tf.raw_ops.ShapeN(input=[x, w])
    shared = {"out_backprop": dz, "strides": [1, 1, 1, 1], "padding": "SAME"}
    by_input = {"input_sizes": sizes, "filter": w} | shared | other
    return (
        tf.raw_ops.Conv2DBackpropFilter(input=x, filter_sizes=filter_sizes, **shared),
        tf.raw_ops.Conv2DBackpropInput(**by_input),
        tf.raw_ops.BiasAddGrad(out_backprop=dz),
    )


def relu_gradients(dy, features, x, w):
    return gradient_ops(tf.raw_ops.ReluGrad(gradients=dy, features=features), x, w)


# Arguments of the gradient by the input that are not those of the other gradients.
OTHERS = {
    "filters": lambda dz, x, w: {"filter": 2.0 * w},
    "sizes": lambda dz, x, w: {"input_sizes": tf.shape(2.0 * x)},
    "gradient": lambda dz, x, w: {"out_backprop": 2.0 * dz},
    "dilations": lambda dz, x, w: {"dilations": [1, 2, 2, 1]},
}


@pytest.mark.parametrize("name", OTHERS)
def test_gradients_of_two_convolutions(name):
    def step(dy, y, x, w):
        dz = tf.raw_ops.ReluGrad(gradients=dy, features=y)
        return gradient_ops(dz, x, w, **OTHERS[name](dz, x, w))

    args = values((2, 6, 5, 4), (2, 6, 5, 4), (2, 6, 5, 3), (3, 3, 3, 4))
    compiled = function(step)
    assert_same(compiled(*args), tf.function(step)(*args))
    assert "conv2d_bias_relu_grad" not in rule_counts(compiled)
    assert "is also used by" in reasons(compiled)["conv2d_bias_relu_grad"]
    assert op_counts(compiled.get_concrete_function(*args))["Conv2DBackpropInput"] == 1


def test_slope_of_the_pre_activation():
    """ReluGrad may read the argument, and the gradient op along with it."""
    args = values((2, 6, 5, 4), (2, 6, 5, 4), (2, 6, 5, 3), (3, 3, 3, 4))
    check(relu_gradients, args, {"conv2d_bias_relu_grad": 1}, gradients=1)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "gelu_erf", "mish", "hard_swish"])
def test_inner_values_prove_nothing(activation):
    """What reads tanh(z) and z would compute something else if one were not that of the other."""
    rule = next(r for r in rules.RULES if r.name == f"conv2d_bias_{activation}")
    (dy, z), named = arguments(rule)
    args = [dy, z, *named.values()]
    # Nothing reads the forward pass of SiLU, whose own gradient begins anew.
    alone = {} if activation == "silu" else {f"act_{activation}": 1}
    fused = {"conv2d_bias_grad": 1} | alone
    check(step_of(rule, named), args, fused, gradients=len(fused))


def test_grouped_convolution():
    args = values((2, 6, 5, 4), (2, 6, 5, 4), (2, 6, 5, 6), (3, 3, 3, 4))
    check(relu_gradients, args, {"conv2d_bias_relu_grad": 1}, gradients=1)


def test_shapes_that_do_not_fit():
    """A graph that cannot run is left alone."""
    args = values((2, 6, 5, 4), (2, 6, 5, 4), (2, 6, 5, 7), (3, 3, 3, 4))
    compiled = function(relu_gradients)
    compiled.get_concrete_function(*args)
    assert rule_counts(compiled) == {}


def test_channels_first_with_a_sum():
    """The sum goes over the channels here, and is no gradient of a bias."""

    def step(dy, y, x, w):
        dz = tf.raw_ops.ReluGrad(gradients=dy, features=y)
        _, filter_sizes = tf.raw_ops.ShapeN(input=[x, w])
        conv = {"strides": [1, 1, 1, 1], "padding": "SAME", "data_format": "NCHW"}
        return (
            tf.raw_ops.Conv2DBackpropFilter(
                input=x, filter_sizes=filter_sizes, out_backprop=dz, **conv
            ),
            tf.reshape(tf.reduce_sum(dz, [0, 1, 2]), [4]),
        )

    args = values((2, 4, 6, 4), (2, 4, 6, 4), (2, 3, 6, 4), (3, 3, 3, 4))
    compiled = function(step)
    compiled.get_concrete_function(*args)
    assert "conv2d_bias_relu_grad" not in rule_counts(compiled)


def test_unknown_rank():
    args = values((2, 6, 5, 4), (2, 6, 5, 4), (2, 6, 5, 3), (3, 3, 3, 4))
    signature = [tf.TensorSpec(None)] * 4
    compiled = function(relu_gradients, input_signature=signature)
    assert_same(compiled(*args), tf.function(relu_gradients)(*args))
    assert rule_counts(compiled) == {}


def test_missing_kernel(monkeypatch):
    from tf_fused_ops.remapper import kernels

    monkeypatch.setattr(kernels, "has_kernel", lambda op_type, dtype, device: False)
    (dy, z), named = arguments(RELU)
    compiled = check(step_of(RELU, named), [dy, z, *named.values()], {})
    assert "has no float32 kernel on CPU" in reasons(compiled)["conv2d_bias_relu_grad"]


@pytest.mark.parametrize("entry", ["*_grad", "conv2d_bias_relu", "conv2d_bias_relu_grad"])
def test_switched_off(entry):
    (dy, z), named = arguments(RELU)
    compiled = function(step_of(RELU, named), remap=RemapOptions(disable=[entry]))
    compiled(dy, z, *named.values())
    assert "conv2d_bias_relu_grad" not in rule_counts(compiled)


def train_step(layer):
    """Returns a stock function that differentiates a layer which is a function of its own."""

    def step(x, w, b):
        with tf.GradientTape() as tape:
            tape.watch([x, w, b])
            y = layer(layer(x, w, b), w, b)
            loss = tf.reduce_sum(y * y)
        return loss, tape.gradient(loss, [x, w, b])

    return step


def layer_of(name):
    """Returns the stock code of a rule, which may be called with its own result, and arguments."""
    rule = next(rule for rule in rules.RULES if rule.name == name)
    conv = rule.family == "conv2d_bias"
    args = values(*([(2, 6, 5, 3), (3, 3, 3, 3), (3,)] if conv else [(6, 7), (7, 7), (7,)]))

    def layer(x, w, b):
        return rule.stock(attrs(rule), **dict(zip(rule.operands, (x, w, b), strict=True)))["y"]

    return layer, args


def remapped(concrete, args, graph_def):
    """Returns the RemapResult of a GraphDef that computes what it did before."""
    names = [tensor.name for tensor in concrete.outputs]
    inputs = dict(zip((t.name for t in concrete.inputs), args, strict=True))
    expected = run(graph_def, inputs, names)
    result = remap(graph_def, outputs=names)
    assert_same(run(result.graph_def, inputs, result.outputs), expected)
    return result


def gradient_counts(result):
    return {rule: n for rule, n in result.report.counts().items() if rule.endswith("_grad")}


PAIRS = [
    *(f"conv2d_bias_{activation}" for activation in ("relu", "leaky_relu", "tanh", "silu", "mish")),
    *(f"matmul_bias_{activation}" for activation in ("gelu_tanh", "gelu_erf", "silu", "mish")),
]


@pytest.mark.parametrize("name", PAIRS)
def test_function_of_a_library(name):
    """Forward and backward pass are two functions of a GraphDef."""
    result = remapped(*pair_of(name))
    assert gradient_counts(result) == {f"{name}_grad": 1}
    assert not counts(result.graph_def).keys() & STOCK_GRADIENTS
    left = [node.name for node in all_nodes(result.graph_def) if node.name.startswith("forward/")]
    assert all("_fused_grad" in name for name in left)
    assert remap(result.graph_def, outputs=result.outputs).report.fused == []


def all_nodes(graph_def):
    return [*graph_def.node, *(n for f in graph_def.library.function for n in f.node_def)]


def test_function_in_a_function():
    """What the inner functions hand over passes through the outer ones, and stays unknown."""
    layer, args = layer_of("conv2d_bias_silu")
    inner = tf.function(layer)
    outer = tf.function(lambda x, w, b: tf.sin(inner(x, w, b)))
    concrete = tf.function(train_step(outer)).get_concrete_function(*args)
    result = remapped(concrete, args, concrete.graph.as_graph_def())
    assert gradient_counts(result) == {"conv2d_bias_grad": 1}


def test_function_with_variables():
    layer, (x, w, b) = layer_of("matmul_bias_gelu_tanh")
    weights = [tf.Variable(w), tf.Variable(b)]
    inner = tf.function(lambda x: layer(x, *weights))

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(inner(inner(x)) ** 2)
        return loss, tape.gradient(loss, weights)

    result = remap(step.get_concrete_function(x))
    assert gradient_counts(result) == {"matmul_bias_gelu_tanh_grad": 1}


def backward_calls(graph_def):
    """Returns the calls of backward functions and the names of the function's arguments."""
    functions = {f.signature.name: f for f in graph_def.library.function}
    calls = [node for node in graph_def.node if node.op == "PartitionedCall"]
    calls = [call for call in calls if "__backward_" in call.attr["f"].func.name]
    (name,) = {call.attr["f"].func.name for call in calls}
    return calls, [argument.name for argument in functions[name].signature.input_arg]


def pair_of(name):
    """Returns a function that calls a layer, its arguments, and its GraphDef."""
    layer, args = layer_of(name)
    concrete = tf.function(train_step(tf.function(layer))).get_concrete_function(*args)
    return concrete, args, concrete.graph.as_graph_def()


def test_value_that_is_not_handed_over():
    """What is used of the backward pass may do without the pre-activation."""
    concrete, args, graph_def = pair_of("matmul_bias_gelu_erf")
    calls, names = backward_calls(graph_def)
    place = next(i for i, name in enumerate(names) if name.endswith("biasadd"))
    for call in calls:
        call.input[place] = call.input[0]
    result = remapped(concrete, args, graph_def)
    assert "matmul_bias_gelu_erf_grad" not in result.report.counts()
    told = {refusal.rule: refusal.reason for refusal in result.report.refused}
    assert "is not handed over to the gradient" in told["matmul_bias_gelu_erf_grad"]


def exchange(call):
    """Hands over two values in the wrong order."""
    call.input[1], call.input[2] = call.input[2], call.input[1]


def replace(call):
    """Hands over what is not a value of the forward function."""
    call.input[1] = call.input[0]


@pytest.mark.parametrize("change", [exchange, replace])
@pytest.mark.parametrize("count", [1, 2])
def test_other_values_than_autodiff_hands_over(change, count):
    """Only what every caller hands over is known."""
    concrete, args, graph_def = pair_of("matmul_bias_gelu_tanh")
    calls, _ = backward_calls(graph_def)
    assert len(calls) == 2
    for call in calls[:count]:
        change(call)
    assert gradient_counts(remapped(concrete, args, graph_def)) == {}


@pytest.mark.parametrize("name", PAIRS)
def test_nested_function(name):
    """A stock function inside a train step is fused as it is traced, its gradient included."""
    layer, args = layer_of(name)
    layer = tf.function(layer)
    compiled = function(train_step(layer))
    assert_same(compiled(*args), tf.function(train_step(layer))(*args))
    assert rule_counts(compiled) == {name: 1}
    found = op_counts(compiled.get_concrete_function(*args))
    assert found["TfFusedOps>Conv2DBiasActGrad"] + found["TfFusedOps>MatMulBiasActGrad"] > 0
    assert not found.keys() & STOCK_GRADIENTS
