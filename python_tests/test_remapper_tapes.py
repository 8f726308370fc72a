"""Gradients: every way of taking them around and inside a rewritten function."""

import pytest
import tensorflow as tf
from remapping import (
    asked_for,
    assert_same,
    check,
    gradient_count,
    op_counts,
    reasons,
    rule_counts,
    values,
)

import tf_fused_ops as tfo
from tf_fused_ops.function import function

X, W, B = values((6, 7), (7, 5), (5,))


def gelu_layer(x, w, b):
    return tf.nn.gelu(tf.nn.bias_add(tf.matmul(x, w), b), approximate=True)


def relu_layer(x, w, b):
    return tf.nn.relu(tf.nn.bias_add(tf.matmul(x, w), b))


LAYERS = {"matmul_bias_gelu_tanh": gelu_layer, "matmul_bias_relu": relu_layer}


@pytest.fixture(params=LAYERS)
def rule(request):
    """A rule whose gradient reads the pre-activation, and one whose gradient reads the output."""
    return request.param


@pytest.mark.parametrize("wanted", ["x", "w", "b", "xw", "wb", "xb"])
def test_subset_of_gradients(rule, wanted):
    """The gradient op computes no more than what is used."""

    def step(x, w, b):
        named = {"x": x, "w": w, "b": b}
        sources = [named[name] for name in wanted]
        with tf.GradientTape() as tape:
            tape.watch(sources)
            y = LAYERS[rule](x, w, b)
        return tape.gradient(y, sources)

    compiled = check(step, [X, W, B], {rule: 1}, gradients=1)
    expected = {"a": "x" in wanted, "b": "w" in wanted, "bias": "b" in wanted, "side_input": False}
    concrete = compiled.get_concrete_function()
    assert asked_for(concrete, "TfFusedOps>MatMulBiasActGrad", expected) == expected


@pytest.mark.parametrize("awaited", [True, False])
def test_operands_have_a_gradient_op_each(awaited):
    """TensorFlow runs them beside each other, which pays where what comes before waits for one."""

    def step(x, w, b, side):
        with tf.GradientTape() as tape:
            tape.watch([x, w, b, side])
            y = tf.nn.relu(tf.nn.bias_add(tf.matmul(x, w), b) + side)
        dx, *others = tape.gradient(y, [x, w, b, side])
        return tf.sin(dx) if awaited else dx, *others

    side = values(X.shape[:1] + W.shape[1:])[0]
    compiled = check(step, [X, W, B, side], {"matmul_bias_add_relu": 1}, gradients=1)
    ops = compiled.get_concrete_function().graph.get_operations()
    names = ("a", "side_input", "b", "bias")
    switches = {
        tuple(name for name in names if op.get_attr(f"{name}_gradient"))
        for op in ops
        if op.type == "TfFusedOps>MatMulBiasActGrad"
    }
    assert switches == ({names[:2], names[2:]} if awaited else {names})
    (fusion,) = compiled.remap_reports[-1].fused
    assert len(fusion.fused) == 1 + len(switches) and fusion.gradients == 1


def test_output_as_its_own_gradient(rule):
    """The stock forward pass does not live on for the backward pass."""

    def step(x, w, b):
        with tf.GradientTape() as tape:
            tape.watch([w, b])
            y = LAYERS[rule](x, w, b)
        return tape.gradient(y, [w, b], output_gradients=y)

    compiled = check(step, [X, W, B], {rule: 1}, gradients=1)
    assert op_counts(compiled.get_concrete_function())["MatMul"] == 0


def test_persistent_tape(rule):
    """Two backward passes of one forward pass become two gradient ops."""

    def step(x, w, b):
        with tf.GradientTape(persistent=True) as tape:
            tape.watch([w, b])
            y = LAYERS[rule](x, w, b)
            first, second = tf.reduce_sum(y * y), tf.reduce_sum(tf.sin(y))
        return tape.gradient(first, [w, b]), tape.gradient(second, [w, b])

    check(step, [X, W, B], {rule: 1}, gradients=2)


def test_outer_tape_over_inner_tape(rule):
    """The fused gradient op is differentiated in turn."""

    def step(x, w, b):
        with tf.GradientTape() as tape:
            tape.watch([x, w, b])
            y = tf.reduce_sum(LAYERS[rule](x, w, b) ** 3)
        return tape.gradient(y, [x, w, b])

    def second_order(fn):
        with tf.GradientTape() as tape:
            tape.watch([X, W, B])
            gradients = fn(X, W, B)
        return tape.gradient(gradients, [X, W, B])

    fused = function(step)
    assert_same(second_order(fused), second_order(tf.function(step)), units=256)
    assert (rule_counts(fused), gradient_count(fused)) == ({rule: 1}, 1)


def test_second_order_inside(rule):
    """Values that the second gradient reads stay stock; results agree."""

    def step(x, w, b):
        with tf.GradientTape() as outer:
            outer.watch([w, b])
            with tf.GradientTape() as inner:
                inner.watch(w)
                y = tf.reduce_sum(LAYERS[rule](x, w, b) ** 3)
            gradient = inner.gradient(y, w)
            penalty = tf.reduce_sum(gradient**2)
        return gradient, outer.gradient(penalty, [w, b])

    compiled = function(step)
    assert_same(compiled(X, W, B), tf.function(step)(X, W, B), units=256)
    if rule == "matmul_bias_relu":
        assert rule_counts(compiled) == {rule: 1}
    else:
        assert rule in reasons(compiled)


def test_jacobian(rule):
    compiled = function(LAYERS[rule])

    def jacobian(fn):
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(B)
            y = fn(X, W, B)
        return tape.jacobian(y, B, experimental_use_pfor=False)

    assert_same(jacobian(compiled), jacobian(tf.function(LAYERS[rule])))


def test_symbolic_gradients(rule):
    """tf.gradients inside the function."""

    @tf.function
    def step(x, w, b):
        y = LAYERS[rule](x, w, b)
        return y, tf.gradients(y, [x, w, b])

    check(step, [X, W, B], {rule: 1}, gradients=1)


def test_frozen_bias(rule):
    """A bias that is not trained needs no gradient."""
    weights = tf.Variable(W)
    bias = tf.Variable(B, trainable=False)

    def step(x):
        with tf.GradientTape() as tape:
            y = LAYERS[rule](x, weights, bias)
        return y, tape.gradient(y, [weights, bias])

    check(step, [X], {rule: 1}, gradients=1)


def test_train_step_moves_variables(rule):
    """A whole step with an optimizer: the same weights after three steps."""

    def train(decorate):
        weights, bias = tf.Variable(W), tf.Variable(B)
        momentum = [tf.Variable(tf.zeros_like(v)) for v in (weights, bias)]

        def step(x):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(LAYERS[rule](x, weights, bias) ** 2)
            gradients = tape.gradient(loss, [weights, bias])
            for variable, slot, gradient in zip([weights, bias], momentum, gradients, strict=True):
                slot.assign(0.9 * slot + gradient)
                variable.assign_sub(0.1 * slot)
            return loss

        compiled = decorate(step)
        losses = [compiled(X) for _ in range(3)]
        return losses, weights.value(), bias.value()

    assert_same(train(function), train(tf.function))


def test_stop_gradient_and_stop_recording(rule):
    def step(x, w, b):
        with tf.GradientTape() as tape:
            tape.watch(b)
            y = LAYERS[rule](x, w, b)
            with tape.stop_recording():
                scale = tf.reduce_mean(y)
            loss = tf.reduce_sum(y * scale + tf.stop_gradient(y))
        return tape.gradient(loss, b)

    check(step, [X, W, B], {rule: 1}, gradients=1)


def test_recompute_grad(rule):
    layer = tf.recompute_grad(LAYERS[rule])

    def step(x, w, b):
        with tf.GradientTape() as tape:
            tape.watch([x, w, b])
            y = layer(x, w, b)
        return y, tape.gradient(y, [x, w, b])

    compiled = function(step)
    assert_same(compiled(X, W, B), tf.function(step)(X, W, B))
    assert rule_counts(compiled).get(rule, 0) >= 1


def test_nothing_but_operands_and_result_is_kept():
    """Where the slope follows from y, the outer tape keeps x, w and y, and nothing else."""
    compiled = function(relu_layer)
    concrete = compiled.get_concrete_function(X, W, B)
    forward, backward = concrete._delayed_rewrite_functions.forward_backward()
    assert op_counts(concrete)["TfFusedOps>MatMulBiasAct"] == 1
    op = next(op for op in backward.graph.get_operations() if op.type.endswith("ActGrad"))
    _, x, w, y = op.inputs
    # Besides these there is only the pre-activation, which is empty unless it is asked for.
    kept = {t.name for t in backward.graph.inputs if t.shape.rank is not None}
    assert kept == {t.name for t in (x, w, y)} | {"Placeholder:0"}
    assert not forward.graph.get_operation_by_name("Relu_fused").get_attr("save_pre_activation")


@pytest.mark.parametrize(("height", "ops"), [(63, 2), (64, 1)])
@pytest.mark.parametrize("registered", [False, True])
def test_gradients_of_large_images_are_one_op(height, ops, registered):
    """From 1 MiB an image on, which is 64x64x64 in float32."""

    def conv(x, w):
        if registered:
            return tfo.conv2d_bias_act(x, w, tf.zeros([64]), activation="relu")
        return tf.nn.relu(tf.nn.bias_add(tf.nn.conv2d(x, w, 1, "SAME"), tf.zeros([64])))

    def step(x, v, w):
        with tf.GradientTape() as tape:
            tape.watch([v, w])
            loss = tf.reduce_sum(conv(conv(x, v), w))
        return tape.gradient(loss, [v, w])

    shapes = [[None, height, 64, 3], [3, 3, 3, 64], [3, 3, 64, 64]]
    specs = [tf.TensorSpec(shape, tf.float32) for shape in shapes]
    concrete = function(step, input_signature=specs).get_concrete_function()
    named = ("filters", "bias")
    asked = asked_for(concrete, "TfFusedOps>Conv2DBiasActGrad", named)
    assert asked["filters"] == 2
    assert op_counts(concrete)["TfFusedOps>Conv2DBiasActGrad"] == ops + 1
