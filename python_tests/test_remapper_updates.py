"""What optimizers do to variables, as one op: same values, and refused wherever the order of the
program would tell the difference."""

import numpy as np
import pytest
import tensorflow as tf
from remapping import op_counts, reasons, rule_counts, values
from tolerances import assert_close

from tf_fused_ops import RemapOptions, accelerate
from tf_fused_ops.function import function

keras = pytest.importorskip("keras")

SHAPE = (7, 5)
OPS = {
    "gradient_descent": "ResourceApplyGradientDescent",
    "momentum": "ResourceApplyKerasMomentum",
    "nesterov_momentum": "ResourceApplyKerasMomentum",
}


class State:
    """A variable and its velocity."""

    def __init__(self, dtype="float32", shape=SHAPE):
        start, velocity = values(shape, shape, dtype=dtype, seed=1)
        self.variable, self.velocity = tf.Variable(start), tf.Variable(velocity)

    def arrays(self):
        return [self.variable.numpy(), self.velocity.numpy()]


def gradient_descent(state, gradient, rate=0.1):
    state.variable.assign_sub(gradient * rate)


def momentum(state, gradient, rate=0.1):
    state.velocity.assign(0.9 * state.velocity - rate * gradient)
    state.variable.assign_add(state.velocity)


def nesterov_momentum(state, gradient, rate=0.1):
    mu, rate = (tf.constant(value, gradient.dtype) for value in (0.9, rate))
    state.velocity.assign(state.velocity * mu - gradient * rate)
    state.variable.assign_add(mu * state.velocity - gradient * rate)


UPDATES = (gradient_descent, momentum, nesterov_momentum)


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
    for rule in OPS:
        fused = sum(n for name, n in counts.items() if OPS[name] == OPS[rule])
        assert op_counts(concrete)[OPS[rule]] == fused
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


@pytest.mark.parametrize(
    ("name", "optimizer", "others"),
    [
        ("gradient_descent", {}, 0),
        ("momentum", {"momentum": 0.9}, 0),
        ("nesterov_momentum", {"momentum": 0.8, "nesterov": True}, 0),
        ("momentum", {"momentum": 0.9, "clipnorm": 0.1}, 0),
        ("momentum", {"momentum": 0.9, "weight_decay": 0.01}, 0),
        ("momentum", {"momentum": 0.9, "use_ema": True}, 4),
    ],
)
def test_keras_optimizers(name, optimizer, others):
    results = []
    for decorator in (tf.function, function):
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4), keras.layers.Dense(2)])
        sgd = keras.optimizers.SGD(
            keras.optimizers.schedules.ExponentialDecay(0.05, 2, 0.9), **optimizer
        )
        sgd.build(model.trainable_variables)

        @decorator
        def step(x, model=model, sgd=sgd):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(x) - 1.0) ** 2)
            variables = model.trainable_variables
            sgd.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
            return loss

        losses = [step(values((5, 3), seed=i)[0]) for i in range(4)]
        results.append([*losses, *model.trainable_variables, *sgd.variables])
    for fused, stock in zip(results[1], results[0], strict=True):
        assert_close(name, fused.numpy(), stock.numpy(), "float32")
    counts = rule_counts(step)
    # A moving average reads the variables afterwards.
    assert counts.get(name, 0) == 4 - others
    assert ("afterwards" in reasons(step).get(name, "")) == bool(others)


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

    compiled = run(twice, {"momentum": 1})
    assert "afterwards" in reasons(compiled)["momentum"]


@pytest.mark.parametrize("update", UPDATES)
def test_steps_in_a_loop_and_a_branch(update):
    def loop(state, gradient):
        for _ in tf.range(3):
            if tf.reduce_sum(state.variable) < 100.0:
                update(state, gradient + state.variable)

    run(loop, {update.__name__: 1})


def read_afterwards(state, gradient):
    momentum(state, gradient)
    return state.variable + 1.0


def velocity_read_afterwards(state, gradient):
    momentum(state, gradient)
    return state.velocity + 1.0


def velocity_changed_between(state, gradient):
    state.velocity.assign(0.9 * state.velocity - 0.1 * gradient)
    state.velocity.assign_add(gradient)
    state.variable.assign_add(state.velocity)


def variable_first(state, gradient):
    velocity = tf.identity(state.velocity)
    state.variable.assign_add(state.velocity)
    state.velocity.assign(0.9 * velocity - 0.1 * gradient)


def called_afterwards(state, gradient):
    momentum(state, gradient)
    return tf.function(lambda: state.variable * 2.0)()


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (read_afterwards, "uses variable"),
        (velocity_read_afterwards, "uses velocity"),
        (velocity_changed_between, "uses velocity"),
        (variable_first, None),
        (called_afterwards, "uses variable"),
    ],
)
def test_order(program, words):
    compiled = run(program, {})
    assert words is None or words in reasons(compiled)["momentum"]


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
        (both_variables, None),
        (changed_in_a_call, "gradient_descent"),
    ],
)
def test_variable_that_is_returned(program, rule):
    """It is read after the rewriting, behind what changed it, which must not happen twice."""
    run(program, {rule: 1} if rule else {})


def test_edge_from_behind_the_rewriting():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, use_bias=False)])

    class Plain(keras.Model):
        def __init__(self):
            super().__init__()
            self.inner = model

        def train_step(self, data):
            variable = self.inner.trainable_variables[0].value
            self.changed = variable.assign_sub(0.25 * tf.ones_like(data[0]))
            return {}

    trained = Plain()
    trained.compile(jit_compile=False)
    accelerate(trained)

    @tf.function
    def step(x):
        trained.train_step((x, x))
        with tf.control_dependencies([trained.changed.op]):
            return tf.identity(x)

    kernel = model.trainable_variables[0].value
    kernel.assign(tf.zeros_like(kernel))
    step(tf.ones((3, 1)))
    np.testing.assert_array_equal(kernel.numpy(), np.full((3, 1), -0.25))
    assert trained.train_step.remap_reports[-1].counts() == {"gradient_descent": 1}


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


@pytest.mark.parametrize("update", [momentum, nesterov_momentum])
def test_gradient_that_broadcasts(update):
    compiled = run(update, {}, given=(1, 5))
    assert "may broadcast" in reasons(compiled)[update.__name__]


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

    run(program, {"gradient_descent": 1})


def test_variables_that_share_a_velocity():
    other = tf.Variable(tf.zeros(SHAPE))

    def program(state, gradient):
        other.assign(tf.zeros(SHAPE))
        momentum(state, gradient)
        state.velocity.assign(0.9 * state.velocity - 0.1 * gradient)
        other.assign_add(state.velocity)
        return gradient

    run(program, {"momentum": 1})


def test_a_graph_whose_order_is_in_its_control_edges():
    state = State()

    @tf.function(input_signature=[tf.TensorSpec(SHAPE)])
    def step(gradient):
        momentum(state, gradient)

    from tf_fused_ops.remapper import remap

    result = remap(step.get_concrete_function())
    assert result.report.counts() == {}
