"""Backward passes that are fused although their forward pass stays as it is."""

import itertools

import pytest
import tensorflow as tf
from remapping import asked_for, assert_same, check, op_counts, plain, reasons, rule_counts, values
from test_remapper_graph_def import counts, run
from test_remapper_refusals import after, keep
from test_remapper_rules import attrs, operands, row_id

from tf_fused_ops.function import function
from tf_fused_ops.remapper import RemapOptions, remap, rules

# Every activation after these; the other chains take one whose gradient reads the output, and one
# whose gradient reads the pre-activation.
ALL_SPELLINGS = ("conv2d_bias", "matmul_bias")
ROWS = [
    rule
    for rule in rules.RULES
    if rule.backward_alone
    and rule.family != "act"
    and rule.activation.name != "none"
    and (
        rule.family in ALL_SPELLINGS
        or (
            rule.activation.name in ("relu", "gelu_tanh")
            and rule.spelling is rule.activation.spellings[0]
        )
    )
]
FAMILIES = {r.family: r for r in ROWS if r.activation.name == "gelu_tanh"}


def arguments(rule):
    """Returns dy and example operands by name."""
    named = operands(rule)
    y = rule.stock(attrs(rule), **named)["y"]
    return values(y.shape, seed=1)[0], named


def step_of(rule, names, finish):
    """Returns a function of dy and the operands: their gradients, and what `finish` makes of the
    pre-activation, its gradient and dy; `finish` may also change the gradients."""

    def step(dy, *args):
        named = dict(zip(names, args, strict=True))
        sources = [named[name] for name in rule.differentiable]
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(sources)
            z = type(rule)().stock(attrs(rule), **named)["y"]
            y = rule.activate(z, attrs(rule))
        dz = tape.gradient(y, z, output_gradients=dy)
        return finish(z, dz, lambda: tape.gradient(z, sources, output_gradients=dz), dy)

    return step


def compiled_as_stock(step, args):
    """Returns a function that was fused, if anything was, and computes what stock does."""
    with plain():
        expected = tf.function(step)(*args)
        compiled = function(step)
        found = compiled(*args)
    assert_same(found, expected)
    return compiled


def fetch_pre_activation(z, dz, gradients, dy):
    return z, gradients()


def forward_rules(rule):
    """What still fuses where the pre-activation is fetched: the chain up to it, if it is a row."""
    return {rule.family: 1} if any(r.name == rule.family for r in rules.RULES) else {}


@pytest.mark.parametrize("rule", ROWS, ids=row_id)
def test_fetched_pre_activation(rule):
    dy, named = arguments(rule)
    fused = forward_rules(rule) | {f"{rule.name}_grad": 1}
    step = step_of(rule, named, fetch_pre_activation)
    compiled = check(step, [dy, *named.values()], fused, gradients=1)
    assert "is an output of the graph" in reasons(compiled)[rule.name]


@pytest.mark.parametrize("family", [f for f in FAMILIES if not f.endswith("_add")])
def test_unknown_batch(family):
    rule = FAMILIES[family]
    dy, named = arguments(rule)
    step = step_of(rule, named, fetch_pre_activation)
    fused = forward_rules(rule) | {f"{rule.name}_grad": 1}
    check(step, [dy, *named.values()], fused, gradients=1, unknown_batch=[0, 1])


def gradients_elsewhere(z, dz, gradients, dy):
    with tf.device("CPU:0"):
        return z, gradients()


def keep_a_gradient(z, dz, gradients, dy):
    first, *others = gradients()
    return z, [keep(first), *others]


# What becomes of the gradient dz of the pre-activation z, and the reason that is reported.
NEIGHBOURS = {
    "fetched": (lambda z, dz, gradients, dy: (z, dz, gradients()), "is an output of the graph"),
    "used": (lambda z, dz, gradients, dy: (z, tf.exp(dz), gradients()), "is also used by Exp"),
    "control_edge": (
        lambda z, dz, gradients, dy: (z, after(dz, dy), gradients()),
        "has a control edge from",
    ),
    "kept": (keep_a_gradient, "is marked _grappler_do_not_remove"),
    "devices": (gradients_elsewhere, "the nodes are on different devices"),
}
# That of a side input is the gradient of the pre-activation.
ALLOWED = ("fetched", "used", "control_edge")
PAIRS = [
    (family, neighbour)
    for family, neighbour in itertools.product(FAMILIES, NEIGHBOURS)
    if not (family.endswith("_add") and neighbour in ALLOWED)
]


@pytest.mark.parametrize(("family", "neighbour"), PAIRS)
def test_must_not_fuse(family, neighbour):
    rule, (finish, reason) = FAMILIES[family], NEIGHBOURS[neighbour]
    dy, named = arguments(rule)
    step = step_of(rule, named, finish)
    compiled = compiled_as_stock(step, [dy, *named.values()])
    assert f"{rule.name}_grad" not in rule_counts(compiled)
    assert reason in reasons(compiled)[f"{rule.name}_grad"]


@pytest.mark.parametrize("rule", ROWS, ids=row_id)
def test_pre_activation_of_two_branches(rule):
    """Its gradient is a sum, of which the activation's is a part; others follow from the sum."""
    dy, named = arguments(rule)

    def step(dy, *args):
        given = dict(zip(named, args, strict=True))
        sources = [given[name] for name in rule.differentiable]
        with tf.GradientTape() as tape:
            tape.watch(sources)
            z = type(rule)().stock(attrs(rule), **given)["y"]
            branches = [rule.activate(z, attrs(rule)), tf.exp(0.1 * z)]
        return tape.gradient(branches, sources, output_gradients=[dy, 3 * dy])

    compiled = compiled_as_stock(step, [dy, *named.values()])
    assert f"{rule.name}_grad" not in rule_counts(compiled)


@pytest.mark.parametrize("family", [f for f in FAMILIES if f.endswith("_add")])
@pytest.mark.parametrize("neighbour", ALLOWED)
def test_gradient_of_a_side_input_may_be_used(family, neighbour):
    rule, (finish, _) = FAMILIES[family], NEIGHBOURS[neighbour]
    dy, named = arguments(rule)
    fused = forward_rules(rule) | {f"{rule.name}_grad": 1}
    check(step_of(rule, named, finish), [dy, *named.values()], fused, gradients=1)


@pytest.mark.parametrize("wanted", ["x", "w", "b", "xw", "wb", "xb"])
def test_subset_of_gradients(wanted):
    """The gradient op computes no more than what is used."""

    def step(x, w, b):
        named = {"x": x, "w": w, "b": b}
        sources = [named[name] for name in wanted]
        with tf.GradientTape() as tape:
            tape.watch(sources)
            z = tf.nn.bias_add(tf.nn.conv2d(x, w, 1, "SAME"), b)
            y = tf.nn.relu(z)
        return z, tape.gradient(y, sources)

    fused = {"conv2d_bias": 1, "conv2d_bias_relu_grad": 1}
    compiled = check(step, values((2, 6, 5, 3), (3, 3, 3, 4), (4,)), fused, gradients=1)
    named = {"input": "x", "filters": "w", "bias": "b", "side_input": "none"}
    found = asked_for(compiled.get_concrete_function(), "TfFusedOps>Conv2DBiasActGrad", named)
    assert found == {name: letter in wanted for name, letter in named.items()}


def test_shorter_chain_keeps_its_gradient():
    """A sum alone is no reason to part a convolution's backward pass from its forward pass."""

    def step(x, w, b, side):
        with tf.GradientTape() as tape:
            tape.watch([x, w, b, side])
            z = tf.nn.bias_add(tf.nn.conv2d(x, w, 1, "SAME"), b)
            y = z + side
        return z, tape.gradient(y, [x, w, b, side], output_gradients=tf.sin(y))

    args = values((2, 6, 5, 3), (3, 3, 3, 4), (4,), (2, 6, 5, 4))
    check(step, args, {"conv2d_bias": 1}, gradients=1)


def test_two_backward_passes():
    """One of two is fused where the other's inner gradient is used elsewhere."""

    def step(x, w, b):
        with tf.GradientTape(persistent=True) as tape:
            tape.watch([w, b])
            z = tf.nn.bias_add(tf.matmul(x, w), b)
            y = tf.nn.gelu(z)
            first, second = tf.reduce_sum(y * y), tf.reduce_sum(tf.sin(y))
        return tape.gradient(first, [w, b]), tape.gradient(second, [w, b, z])

    compiled = function(step)
    args = values((6, 7), (7, 5), (5,))
    assert_same(compiled(*args), tf.function(step)(*args))
    found = rule_counts(compiled)
    assert found == {"matmul_bias": 1, "matmul_bias_gelu_erf_grad": 1, "act_gelu_erf": 1}
    assert op_counts(compiled.get_concrete_function(*args))["TfFusedOps>MatMulBiasActGrad"] == 2


def test_cycle_is_refused():
    """The gradient of the bias moves the filters that the other gradients are taken with."""

    def step(x, w, b, dy):
        z = tf.matmul(x, w)
        s = tf.nn.bias_add(z, b)
        with tf.GradientTape() as tape:
            tape.watch(s)
            y = tf.nn.gelu(s)
        dz = tape.gradient(y, s, output_gradients=dy)
        db = tf.raw_ops.BiasAddGrad(out_backprop=dz)
        shifted = x + tf.reduce_sum(db)
        dw = tf.raw_ops.MatMul(a=shifted, b=dz, transpose_a=True, grad_b=True)
        return y, s, dw

    fused = {"matmul_bias": 1, "act_gelu_erf": 1}
    check(step, values((6, 7), (7, 5), (5,), (6, 5)), fused, gradients=1)


@pytest.mark.parametrize("entry", ["*_grad", "conv2d_bias_relu_grad"])
def test_switched_off(entry):
    rule = next(r for r in ROWS if r.name == "conv2d_bias_relu")
    dy, named = arguments(rule)
    step = step_of(rule, named, fetch_pre_activation)
    compiled = function(step, remap=RemapOptions(disable=[entry]))
    compiled(dy, *named.values())
    assert rule_counts(compiled) == {"conv2d_bias": 1}


@pytest.mark.parametrize("activation", ["relu", "leaky_relu", "sigmoid", "none"])
def test_slower_ones_are_left_out(activation):
    """Gradients of a product that are one op are not fused alone."""
    family = [rule for rule in rules.RULES if rule.family == "matmul_bias"]
    assert not any(r.backward_alone for r in family if r.activation.name == activation)


def test_idempotent():
    rule = next(r for r in ROWS if r.name == "conv2d_bias_relu")
    dy, named = arguments(rule)
    step = tf.function(step_of(rule, named, fetch_pre_activation))
    concrete = step.get_concrete_function(dy, *named.values())
    once = remap(concrete)
    twice = remap(once.graph_def, outputs=once.outputs)
    assert once.report.counts() == {"conv2d_bias": 1, "conv2d_bias_relu_grad": 1}
    assert twice.report.fused == []
    assert counts(twice.graph_def) == counts(once.graph_def)
    inputs = dict(zip((t.name for t in concrete.inputs), (dy, *named.values()), strict=True))
    assert_same(run(once.graph_def, inputs, once.outputs), concrete(dy, *named.values()))
