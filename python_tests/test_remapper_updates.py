"""What optimizers do to variables, as one op: same values, and refused wherever the order of the
program would tell the difference."""

import numpy as np
import pytest
import tensorflow as tf
from remapping import op_counts, reasons, rule_counts, values
from tolerances import assert_close

from tf_fused_ops import RemapOptions, accelerate
from tf_fused_ops.function import function
from tf_fused_ops.remapper import variable_updates

keras = pytest.importorskip("keras")

SHAPE = (7, 5)
OPS = dict.fromkeys((u.name for u in variable_updates.UPDATES), "TfFusedOps>UpdateVariable")
OPS["gradient_descent"] = "ResourceApplyGradientDescent"
# Where that has no kernel.
STOCK_OPS = {
    "momentum": "ResourceApplyKerasMomentum",
    "nesterov_momentum": "ResourceApplyKerasMomentum",
    "adam": "ResourceApplyAdam",
}


class State:
    """A variable, its velocity (or first moment) and its second moment, and a count of steps."""

    def __init__(self, dtype="float32", shape=SHAPE):
        start, velocity, root = values(shape, shape, shape, dtype=dtype, seed=1)
        self.variable, self.velocity = tf.Variable(start), tf.Variable(velocity)
        self.square = tf.Variable(root * root)
        self.count = tf.Variable(tf.zeros([], dtype))

    def arrays(self):
        return [v.numpy() for v in (self.variable, self.velocity, self.square)]


def gradient_descent(state, gradient, rate=0.1):
    state.variable.assign_sub(gradient * rate)


def momentum(state, gradient, rate=0.1):
    state.velocity.assign(0.9 * state.velocity - rate * gradient)
    state.variable.assign_add(state.velocity)


def nesterov_momentum(state, gradient, rate=0.1):
    mu, rate = (tf.constant(value, gradient.dtype) for value in (0.9, rate))
    state.velocity.assign(state.velocity * mu - gradient * rate)
    state.variable.assign_add(mu * state.velocity - gradient * rate)


def adam(state, gradient, rate=0.1):
    def scalar(value):
        return tf.constant(value, gradient.dtype)

    state.velocity.assign_add((gradient - state.velocity) * scalar(0.25))
    state.square.assign_add(scalar(0.125) * (tf.square(gradient) - state.square))
    step = state.velocity * scalar(rate) / (tf.sqrt(state.square) + scalar(0.01))
    state.variable.assign_sub(step)


def rmsprop(state, gradient, rate=0.1):
    kept = tf.constant(0.75, gradient.dtype) * state.square
    state.square.assign(kept + tf.constant(0.25, gradient.dtype) * tf.square(gradient))
    root = tf.sqrt(state.square + tf.constant(0.01, gradient.dtype))
    state.variable.assign_sub(tf.constant(rate, gradient.dtype) * gradient / root)


def adagrad(state, gradient, rate=0.1):
    state.square.assign_add(tf.square(gradient))
    root = tf.sqrt(state.square + tf.constant(0.01, gradient.dtype))
    state.variable.assign_sub(gradient * tf.constant(rate, gradient.dtype) / root)


def lion(state, gradient, rate=0.1):
    def mix(share):
        shares = (tf.constant(value, gradient.dtype) for value in (share, 1 - share))
        return next(shares) * state.velocity + next(shares) * gradient

    step = tf.sign(mix(0.75))
    state.variable.assign_sub(tf.constant(rate, gradient.dtype) * step)
    state.velocity.assign(mix(0.9375))


UPDATES = (gradient_descent, momentum, nesterov_momentum, adam, rmsprop, adagrad, lion)


def run(program, counts, dtype="float32", shape=SHAPE, given=None, steps=3, **options):
    """Checks a program of (state, gradient) against stock; returns the decorated function.

    Args:
        program: What changes the state.
        counts: {rule: number of fusions} of the trace.
        dtype: That of the state.
        shape: The same.
        given: The shape of the gradient.
        steps: How often it runs.
        **options: Those of `function`.
    """
    gradients = [values(given or shape, dtype=dtype, seed=i)[0] for i in range(steps)]
    results = []
    for decorator in (tf.function, lambda f: function(f, **options)):
        state = State(dtype, shape)
        compiled = decorator(lambda gradient, state=state: program(state, gradient))
        returned = [compiled(gradient) for gradient in gradients]
        results.append(state.arrays() + [r.numpy() for r in returned if r is not None])
    for fused, stock in zip(results[1], results[0], strict=True):
        assert_close(program.__name__, fused, stock, dtype)
    assert rule_counts(compiled) == counts
    concrete = compiled.get_concrete_function(tf.TensorSpec(given or shape, dtype))
    for op_type in {*OPS.values(), *STOCK_OPS.values()}:
        fused = sum(n for name, n in counts.items() if OPS[name] == op_type)
        assert op_counts(concrete)[op_type] == fused
    return compiled


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize("update", UPDATES)
def test_plain_code(update, dtype):
    compiled = run(update, {update.__name__: 1}, dtype)
    concrete = compiled.get_concrete_function(tf.TensorSpec(SHAPE, dtype))
    assert not {"AssignVariableOp", "AssignAddVariableOp", "Mul"} & op_counts(concrete).keys()
    (fusion,) = compiled.remap_reports[-1].fused
    assert "variable=" in fusion.messages[0] and fusion.source.startswith(__file__)


@pytest.mark.parametrize("shape", [(), (1,), (0, 3), (3, 1, 2)])
@pytest.mark.parametrize("update", UPDATES)
def test_shapes(update, shape):
    run(update, {update.__name__: 1}, shape=shape)


def test_fit_of_an_accelerated_model():
    def model():
        keras.utils.set_random_seed(0)
        layers = [keras.Input((3,)), keras.layers.Dense(4, "relu"), keras.layers.Dense(1)]
        made = keras.Sequential(layers)
        made.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse", steps_per_execution=3)
        return made

    x, y = values((24, 3), (24, 1))
    stock, fused = model(), accelerate(model())
    losses = [m.fit(x, y, 4, epochs=2, verbose=0, shuffle=False).history for m in (stock, fused)]
    np.testing.assert_allclose(losses[1]["loss"], losses[0]["loss"], rtol=1e-5)
    assert fused.train_step.remap_reports[-1].counts()["momentum"] == 4


def test_several_steps_in_one_function():
    def twice(state, gradient):
        momentum(state, gradient)
        momentum(state, gradient + state.variable)

    run(twice, {"momentum": 2})


@pytest.mark.parametrize("update", UPDATES)
def test_steps_in_a_loop_and_a_branch(update):
    def loop(state, gradient):
        for _ in tf.range(3):
            if tf.reduce_sum(state.variable) < 100.0:
                update(state, gradient + state.variable)

    run(loop, {update.__name__: 1})


def around(inner):
    """Returns a program of momentum with something in between."""

    def program(state, gradient):
        state.velocity.assign(0.9 * state.velocity - 0.1 * gradient)
        result = inner(state, gradient)
        state.variable.assign_add(state.velocity)
        return result

    program.__name__ = f"around_{inner.__name__}"
    return program


def read_variable(state, gradient):
    return state.variable + 1.0


def read_velocity(state, gradient):
    return state.velocity + 1.0


def change_velocity(state, gradient):
    state.velocity.assign_add(gradient)


def change_variable(state, gradient):
    state.variable.assign(gradient)


def call(state, gradient):
    return tf.function(lambda: state.variable * state.velocity)()


def change_something_else(state, gradient):
    state.square.assign_add(gradient)
    return tf.identity(state.square)


@pytest.mark.parametrize(
    ("inner", "name"),
    [
        (read_variable, "variable"),
        (read_velocity, "velocity"),
        (change_variable, "variable"),
        (change_velocity, "velocity"),
        (call, "variable"),
        (change_something_else, None),
    ],
)
def test_something_in_between(inner, name):
    compiled = run(around(inner), {} if name else {"momentum": 1})
    assert name is None or f"uses {name}" in reasons(compiled)["momentum"]


@pytest.mark.parametrize("inner", [read_variable, read_velocity, change_variable, call])
@pytest.mark.parametrize("update", UPDATES)
def test_something_before_and_behind(update, inner):
    def program(state, gradient):
        before = inner(state, gradient)
        update(state, gradient)
        behind = inner(state, gradient)
        return None if before is None else tf.stack([before, behind])

    run(program, {update.__name__: 1})


def test_variable_first():
    def program(state, gradient):
        velocity = tf.identity(state.velocity)
        state.variable.assign_add(state.velocity)
        state.velocity.assign(0.9 * velocity - 0.1 * gradient)

    run(program, {})


def changed_variable(state, gradient):
    return state.variable.assign_sub(0.1 * gradient)


def changed_variable_with_momentum(state, gradient):
    state.velocity.assign(0.9 * state.velocity - 0.1 * gradient)
    return state.variable.assign_add(state.velocity)


def changed_velocity(state, gradient):
    velocity = state.velocity.assign(0.9 * state.velocity - 0.1 * gradient)
    state.variable.assign_add(velocity)
    return velocity


def both_variables(state, gradient):
    momentum(state, gradient)
    return tf.stack([state.variable, state.velocity])


def changed_in_a_call(state, gradient):
    return tf.function(lambda g: state.variable.assign_sub(0.1 * g))(gradient)


@pytest.mark.parametrize(
    ("program", "rule"),
    [
        (changed_variable, "gradient_descent"),
        (changed_variable_with_momentum, "momentum"),
        (changed_velocity, "momentum"),
        (both_variables, "momentum"),
        (changed_in_a_call, "gradient_descent"),
    ],
)
def test_variable_that_is_returned(program, rule):
    """It is read after the rewriting, behind what changed it, which must not happen twice."""
    run(program, {rule: 1})


def trained_inside(train_step):
    """Returns an accelerated model with a train step of (state) and its state."""
    state = State(shape=(3, 1))

    class Plain(keras.Model):
        def train_step(self, data):
            train_step(state)
            return {}

    model = Plain()
    model.compile(jit_compile=False)
    return accelerate(model), state


def test_edge_from_behind_the_rewriting():
    def train_step(state):
        state.changed = state.variable.assign_sub(0.25 * tf.ones((3, 1)))

    model, state = trained_inside(train_step)

    @tf.function
    def step(x):
        model.train_step((x, x))
        with tf.control_dependencies([state.changed.op]):
            return tf.identity(x)

    expected = state.variable.numpy() - 0.25
    step(tf.ones((3, 1)))
    np.testing.assert_array_equal(state.variable.numpy(), expected)
    assert model.train_step.remap_reports[-1].counts() == {"gradient_descent": 1}


def test_value_used_behind_the_rewriting():
    """What was read of the velocity is read again, behind the fused op."""

    def train_step(state):
        state.old = tf.convert_to_tensor(state.velocity)
        state.velocity.assign(0.5 * state.old - 0.25 * tf.ones((3, 1)))
        state.new = tf.convert_to_tensor(state.velocity)
        state.variable.assign_add(state.new)

    model, state = trained_inside(train_step)

    @tf.function
    def step(x):
        model.train_step((x, x))
        return state.old, state.new

    old = state.velocity.numpy()
    returned = step(tf.ones((3, 1)))
    np.testing.assert_array_equal(returned, [old, 0.5 * old - 0.25])
    np.testing.assert_array_equal(state.velocity.numpy(), returned[1])
    assert model.train_step.remap_reports[-1].counts() == {"momentum": 1}


def test_control_edge():
    def waits(state, gradient):
        state.velocity.assign(0.9 * state.velocity - 0.1 * gradient)
        changed = state.variable.assign_add(state.velocity)
        with tf.control_dependencies([changed.op]):
            return tf.identity(gradient)

    compiled = run(waits, {})
    assert "control edge" in reasons(compiled)["momentum"]


def test_value_used_elsewhere():
    def returns(state, gradient):
        new = 0.9 * state.velocity - 0.1 * gradient
        state.velocity.assign(new)
        state.variable.assign_add(state.velocity)
        return new

    compiled = run(returns, {})
    assert "output of the graph" in reasons(compiled)["momentum"]


@pytest.mark.parametrize("update", [momentum, nesterov_momentum, adam, rmsprop])
def test_gradient_that_broadcasts(update):
    compiled = run(update, {}, given=(1, 5))
    assert "may broadcast" in reasons(compiled)[update.__name__]


def test_variable_that_is_its_own_velocity():
    def program(state, gradient):
        state.velocity = state.variable
        momentum(state, gradient)

    compiled = run(program, {})
    assert "not different variables" in reasons(compiled)["momentum"]


def test_rate_that_is_a_vector():
    def program(state, gradient):
        momentum(state, gradient, tf.constant([0.1, 0.2, 0.3, 0.4, 0.5]))

    compiled = run(program, {})
    assert "has rank 1" in reasons(compiled)["momentum"]


def test_gradient_of_an_unknown_batch():
    """Its shape is known once the dense layer is fused."""
    results = []
    for decorator in (tf.function, function):
        kernel = tf.Variable(values((3, 4), seed=2)[0])

        @decorator(input_signature=[tf.TensorSpec([None, None, 3])])
        def step(x, kernel=kernel):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.nn.relu(tf.tensordot(x, kernel, 1) + tf.ones(4)))
            (gradient,) = tape.gradient(loss, [kernel])
            kernel.assign_sub(0.1 * tf.identity(gradient))
            return loss

        step(values((2, 5, 3))[0])
        results.append(kernel.numpy())
    assert_close("kernel", *reversed(results), "float32")
    assert rule_counts(step) == {"dense_bias_relu": 1, "gradient_descent": 1}


def test_variable_of_unknown_shape():
    variable = tf.Variable([1.0, 2.0], shape=tf.TensorShape(None))

    @function
    def step(gradient):
        variable.assign_sub(0.5 * gradient)

    step(tf.constant([2.0, 4.0]))
    np.testing.assert_array_equal(variable.numpy(), [0.0, 0.0])
    assert "may broadcast" in reasons(step)["gradient_descent"]


def test_switched_off():
    run(momentum, {}, remap=RemapOptions(disable=["momentum"]))


def test_two_updates_of_one_variable():
    def program(state, gradient):
        state.variable.assign_sub(0.1 * gradient)
        state.variable.assign_sub(0.2 * gradient)

    run(program, {"gradient_descent": 2})


def test_updates_in_order():
    """Each reads what the one before has left."""

    def program(state, gradient):
        adam(state, gradient)
        state.velocity.assign_sub(0.5 * gradient)
        adam(state, 2.0 * gradient)

    run(program, {"adam": 2, "gradient_descent": 1})


def test_rate_that_is_made_in_between():
    """The fused op comes where the first variable was changed, and yet has to wait for the rate."""

    def program(state, gradient):
        state.velocity.assign_add((gradient - state.velocity) * 0.25)
        rate = 0.1 / state.count.assign_add(1.0)
        state.square.assign_add((tf.square(gradient) - state.square) * 0.125)
        state.variable.assign_sub(state.velocity * rate / (tf.sqrt(state.square) + 0.01))
        return rate

    run(program, {"adam": 1})


def test_variables_that_share_a_velocity():
    other = tf.Variable(tf.zeros(SHAPE))

    def program(state, gradient):
        other.assign(tf.zeros(SHAPE))
        momentum(state, gradient)
        state.velocity.assign(0.9 * state.velocity - 0.1 * gradient)
        other.assign_add(state.velocity)
        return gradient

    run(program, {"momentum": 2})


def test_a_graph_whose_order_is_in_its_control_edges():
    state = State()

    @tf.function(input_signature=[tf.TensorSpec(SHAPE)])
    def step(gradient):
        momentum(state, gradient)

    from tf_fused_ops.remapper import remap

    result = remap(step.get_concrete_function())
    assert result.report.counts() == {}
