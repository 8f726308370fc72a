"""What TensorFlow says where an op of a rewritten function comes from."""

import inspect
import os

import pytest
import tensorflow as tf

import tf_fused_ops as tfo

PACKAGE = os.path.dirname(tfo.__file__) + os.sep
SIGNATURE = [
    tf.TensorSpec([None, 8, 8, 4]),
    tf.TensorSpec([3, 3, 4, None]),
    tf.TensorSpec([None]),
]


def layer(x, filters, bias):
    return tf.nn.relu(tf.nn.bias_add(tf.nn.conv2d(x, filters, 1, "SAME"), bias))


def step(x, filters, bias):
    with tf.GradientTape() as tape:
        tape.watch([x, filters, bias])
        loss = tf.reduce_sum(layer(x, filters, bias))
    return tape.gradient(loss, [x, filters, bias])


def user_frames(op):
    """Returns (file, line, function) of each frame outside TensorFlow, outermost first."""
    return [(frame.filename, frame.lineno, frame.name) for frame in op.traceback.get_user_frames()]


def line_of(function, text):
    """Returns the frame of the line of a function that has some text."""
    lines, first = inspect.getsourcelines(function)
    (place,) = (place for place, line in enumerate(lines, first) if text in line)
    return __file__, place, function.__name__


def test_error_at_run_time_names_the_users_line():
    fused = tfo.function(layer, input_signature=SIGNATURE)
    with pytest.raises(tf.errors.InvalidArgumentError, match="bias must have the shape") as caught:
        fused(tf.ones([1, 8, 8, 4]), tf.ones([3, 3, 4, 8]), tf.ones([7]))
    assert fused.remap_reports[0].counts() == {"conv2d_bias_relu": 1}
    words = str(caught.value)
    assert 'File "{}", line {}, in {}'.format(*line_of(layer, "conv2d")) in words
    assert PACKAGE not in words


@pytest.mark.parametrize("autograph", [True, False])
def test_fused_ops_have_the_line_of_what_they_stand_for(autograph):
    fused = tfo.function(step, input_signature=SIGNATURE, autograph=autograph)
    graph = fused.get_concrete_function().graph
    made = {op.type: user_frames(op) for op in graph.get_operations() if "TfFused" in op.type}
    forward, backward = "TfFusedOps>Conv2DBiasAct", "TfFusedOps>Conv2DBiasActGrad"
    assert made[forward][-1] == line_of(layer, "conv2d")
    assert made[backward][-1] == line_of(step, "gradient(")
    for frames in made.values():
        assert {file for file, _, _ in frames if file.startswith(PACKAGE)} == set()


def test_other_ops_have_the_traces_of_a_plain_function():
    def traces(decorator):
        graph = decorator(step, input_signature=SIGNATURE).get_concrete_function().graph
        return {op.name: user_frames(op)[-2:] for op in graph.get_operations() if op.inputs}

    stock, fused = traces(tf.function), traces(tfo.function)
    both = stock.keys() & fused.keys()
    assert both
    assert {name: fused[name] for name in both} == {name: stock[name] for name in both}


def test_update_has_the_line_of_the_optimizer():
    variable, velocity = tf.Variable(tf.ones([5])), tf.Variable(tf.zeros([5]))

    @tfo.function
    def train(rate, gradient):
        velocity.assign(velocity * 0.9 - gradient * rate)
        variable.assign_add(velocity)

    concrete = train.get_concrete_function(tf.TensorSpec([]), tf.TensorSpec([5]))
    (op,) = (op for op in concrete.graph.get_operations() if op.type.endswith("UpdateVariable"))
    assert user_frames(op)[-1][::2] == (__file__, "train")
