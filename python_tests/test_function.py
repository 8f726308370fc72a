"""The decorator as a drop-in for tf.function."""

import inspect
import threading

import pytest
import tensorflow as tf
from remapping import assert_same, op_counts, rule_counts, values

import tf_fused_ops as tfo
from tf_fused_ops.remapper import RemapOptions

X, W, B = values((6, 7), (7, 5), (5,))
RELU = {"matmul_bias_relu": 1}


def layer(x, w=W, b=B):
    return tf.nn.relu(tf.nn.bias_add(tf.matmul(x, w), b))


def test_same_parameters():
    ours = dict(inspect.signature(tfo.function).parameters)
    ours.pop("remap")
    theirs = inspect.signature(tf.function).parameters
    assert list(ours) == list(theirs)
    assert [p.default for p in ours.values()] == [p.default for p in theirs.values()]


def test_bare_called_and_with_arguments():
    @tfo.function
    def bare(x):
        return layer(x)

    @tfo.function(reduce_retracing=True)
    def with_arguments(x):
        return layer(x)

    for compiled in (bare, with_arguments, tfo.function(layer), tfo.function(lambda x: layer(x))):
        assert_same(compiled(X), layer(X))
        assert rule_counts(compiled) == RELU


def test_object_interface():
    signature = [tf.TensorSpec([None, 7])]

    @tfo.function(input_signature=signature)
    def compiled(x):
        """Says something."""
        return layer(x)

    stock = tf.function(compiled.python_function, input_signature=signature)
    assert isinstance(compiled, type(stock))
    assert compiled.__name__ == "compiled"
    assert compiled.__doc__ == "Says something."
    assert compiled.input_signature == stock.input_signature
    assert compiled.python_function is stock.python_function
    assert inspect.signature(compiled) == inspect.signature(stock)
    assert_same(compiled.python_function(X), layer(X))
    concrete = compiled.get_concrete_function()
    assert_same(concrete(X), layer(X))
    assert concrete.structured_outputs.shape.as_list() == [None, 5]
    assert "TensorSpec(shape=(None, 7)" in compiled.pretty_printed_concrete_signatures()
    assert compiled.experimental_get_tracing_count() == 1
    assert compiled.function_type.parameters.keys() == {"x"}


def test_retracing_rules():
    def traced(decorate, **options):
        count = []

        @decorate(**options)
        def fn(x, flag=True):
            count.append(1)
            return layer(x) if flag else x

        for x in (X, X + 1, X[:3], X[:2], X[:1]):
            fn(x)
        fn(X, False)
        fn(X, flag=False)
        return len(count), fn.experimental_get_tracing_count()

    for options in ({}, {"reduce_retracing": True}, {"autograph": False}):
        assert traced(tfo.function, **options) == traced(tf.function, **options)


def test_methods():
    class Model(tf.Module):
        def __init__(self, scale):
            super().__init__()
            self.scale = tf.Variable(scale)

        @tfo.function(input_signature=[tf.TensorSpec([None, 7])], remap=RemapOptions())
        def __call__(self, x):
            return layer(x) * self.scale

        @tfo.function(remap=RemapOptions(disable=("*",)))
        def stock(self, x):
            return layer(x)

    two, three = Model(2.0), Model(3.0)
    assert_same([two(X), three(X)], [layer(X) * 2.0, layer(X) * 3.0])
    assert rule_counts(two.__call__) == rule_counts(three.__call__) == RELU
    two.stock(X)
    assert rule_counts(two.stock) == {}


def test_autograph():
    """Python control flow over tensors is converted, in callees as well."""

    def helper(x):
        if tf.reduce_sum(x) > 0:
            return layer(x)
        return layer(-x)

    @tfo.function
    def compiled(x, steps):
        total = tf.zeros([6, 5])
        for _ in tf.range(steps):
            total += helper(x)
            if tf.reduce_any(total > 1e6):
                break
        return total

    for x in (X, -X):
        sign = 1.0 if tf.reduce_sum(x) > 0 else -1.0
        assert_same(compiled(x, tf.constant(3)), 3 * layer(sign * x))
    assert rule_counts(compiled) == {"matmul_bias_relu": 2}


def test_errors_name_the_users_line():
    @tfo.function
    def compiled(x):
        return tf.matmul(x, x)  # the faulty line

    with pytest.raises(ValueError, match="the faulty line"):
        compiled(X)


def test_structures_and_variables():
    counter = tf.Variable(0)
    state = tf.Variable(tf.zeros([6, 5]))

    def body(inputs, *, factor):
        counter.assign_add(1)
        y = layer(inputs["x"])
        before = state.read_value()
        state.assign_add(y * factor)
        return {
            "y": y,
            "none": None,
            "number": 3,
            "state": (before, state),
            "ragged": tf.ragged.stack([y[0], y[1]]),
        }

    compiled = tfo.function(body)
    found = compiled({"x": X}, factor=2.0)
    assert counter.numpy() == 1
    y = layer(X)
    assert_same([found["y"], found["state"][0], found["state"][1]], [y, tf.zeros([6, 5]), 2 * y])
    assert found["none"] is None
    assert found["number"] == 3
    assert isinstance(found["ragged"], tf.RaggedTensor)
    assert rule_counts(compiled) == RELU


def test_variables_created_inside():
    created = []

    @tfo.function
    def compiled(x):
        if not created:
            created.append(tf.Variable(tf.ones([7, 5])))
        return layer(x, created[0])

    assert_same(compiled(X), layer(X, tf.ones([7, 5])))
    assert_same(compiled(X), layer(X, tf.ones([7, 5])))
    assert set(rule_counts(compiled)) == {"matmul_bias_relu"}


def test_control_flow_bodies():
    @tfo.function
    def compiled(x, flag):
        a = tf.cond(flag, lambda: layer(x), lambda: layer(-x))
        _, b = tf.while_loop(lambda i, _: i < 3, lambda i, y: (i + 1, y + layer(x)), [0, a])
        c = tf.map_fn(lambda row: layer(row[None])[0], x)
        d = tf.switch_case(tf.constant(1), [lambda: x, lambda: layer(x)[:, :1] + x])
        return a, b, c, d

    y = layer(X)
    expected = y, y + (y + y + y), y, y[:, :1] + X
    assert_same(compiled(X, tf.constant(True)), expected)
    assert rule_counts(compiled) == {"matmul_bias_relu": 5}
    assert "MatMul" not in op_counts(compiled.get_concrete_function(X, tf.constant(True)))


@pytest.mark.parametrize("approximate", [True, False])
def test_gradient_through_control_flow(approximate):
    """A loop's and a branch's forward pass keep the pre-activation if need be."""

    def body(x, w, flag):
        def gelu(y):
            return tf.nn.gelu(tf.nn.bias_add(tf.matmul(y, w), B[:1] * tf.ones([7])), approximate)

        with tf.GradientTape() as tape:
            tape.watch([x, w])
            y = tf.cond(flag, lambda: gelu(x), lambda: x)
            _, y = tf.while_loop(lambda i, _: i < 3, lambda i, y: (i + 1, gelu(y)), [0, y])
        return y, tape.gradient(y, [x, w])

    w = values((7, 7))[0] * 0.3
    compiled = tfo.function(body)
    for flag in (True, False):
        flag = tf.constant(flag)
        assert_same(compiled(X, w, flag), tf.function(body)(X, w, flag), units=256)
    name = "matmul_bias_gelu_" + ("tanh" if approximate else "erf")
    assert rule_counts(compiled) == {name: 2, "slice_gradient": 1}


def test_nested_functions():
    """A nested tf.function is rewritten inside the decorator, and only there."""

    @tf.function
    def inner(x):
        return layer(x)

    @tfo.function
    def outer(x):
        return inner(x) + 1.0

    stock = inner(X)
    assert_same(outer(X), stock + 1.0)
    assert_same(inner(X), stock)
    assert rule_counts(outer) == RELU
    assert op_counts(inner.get_concrete_function(X))["MatMul"] == 1
    assert op_counts(outer.get_concrete_function(X))["MatMul"] == 0


def test_decorated_inside_stock_and_decorated():
    inner = tfo.function(layer)

    assert_same(tf.function(lambda x: inner(x))(X), layer(X))
    assert rule_counts(inner) == RELU
    outer = tfo.function(lambda x: inner(x) * 2.0)
    assert_same(outer(X), layer(X) * 2.0)


def test_nested_gradient():
    inner = tf.function(layer)

    @tfo.function
    def step(x, w):
        with tf.GradientTape() as tape:
            tape.watch([x, w])
            y = inner(x, w)
        return y, tape.gradient(y, [x, w])

    assert_same(step(X, W), tf.function(step.python_function)(X, W))
    counts = op_counts(step.get_concrete_function(X, W))
    assert counts["TfFusedOps>MatMulBiasActGrad"] >= 1
    assert counts["ReluGrad"] == 0


def test_custom_gradient_with_layer_inside():
    @tf.custom_gradient
    def doubled(x):
        y = layer(x)
        return y, lambda dy: 2.0 * tf.matmul(dy * tf.cast(y > 0, tf.float32), W, transpose_b=True)

    def body(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = doubled(x)
        return y, tape.gradient(y, x)

    compiled = tfo.function(body)
    assert_same(compiled(X), tf.function(body)(X))

    def outer(fn):
        with tf.GradientTape() as tape:
            tape.watch(X)
            y = fn(X)
        return tape.gradient(y, X)

    forward = tfo.function(lambda x: doubled(x))
    assert_same(outer(forward), outer(tf.function(lambda x: doubled(x))))
    assert rule_counts(forward) == RELU


def test_dataset_map():
    dataset = tf.data.Dataset.from_tensors(X).map(tfo.function(layer))
    assert_same(next(iter(dataset)), layer(X))

    @tfo.function
    def total(x):
        mapped = tf.data.Dataset.from_tensors(x).repeat(3).map(lambda v: layer(v))
        return mapped.reduce(tf.zeros([6, 5]), lambda a, b: a + b)

    assert_same(total(X), 3 * layer(X))
    assert rule_counts(total) == RELU


def test_run_functions_eagerly():
    compiled = tfo.function(layer)
    tf.config.run_functions_eagerly(True)
    try:
        assert_same(compiled(X), layer(X))
    finally:
        tf.config.run_functions_eagerly(False)
    assert compiled.remap_reports == []


def test_jit_compile_is_left_alone():
    compiled = tfo.function(layer, jit_compile=True)
    assert_same(compiled(X), layer(X))
    assert rule_counts(compiled) == {}
    assert "XLA" in compiled.remap_reports[-1].skipped
    assert "left alone" in str(compiled.remap_reports[-1])
    inner = tfo.function(layer)
    assert_same(tf.function(lambda x: inner(x), jit_compile=True)(X), layer(X))
    assert rule_counts(inner) == {}


def test_gradient_of_a_compiled_function_is_left_alone():
    """XLA compiles the backward function along with the forward function."""

    def conv(x, w, b):
        return tf.nn.relu(tf.nn.bias_add(tf.nn.conv2d(x, w, 1, "SAME"), b))

    def gradients(fn, args):
        with tf.GradientTape() as tape:
            tape.watch(args)
            y = fn(*args)
        return tape.gradient(y, args)

    args = values((2, 5, 4, 3), (3, 3, 3, 4), (4,))
    inner = tf.function(conv, jit_compile=True)
    step = tfo.function(lambda *args: gradients(inner, args))
    assert_same(step(*args), gradients(conv, args))
    assert rule_counts(step) == {}
    assert [bool(report.skipped) for report in step.remap_reports] == [True, True, False]


def test_saved_model(tmp_path):
    class Model(tf.Module):
        def __init__(self):
            super().__init__()
            self.w, self.b = tf.Variable(W), tf.Variable(B)

        @tfo.function(input_signature=[tf.TensorSpec([None, 7])])
        def __call__(self, x):
            return tf.nn.gelu(tf.nn.bias_add(tf.matmul(x, self.w), self.b))

    model = Model()
    expected = model(X)
    path = str(tmp_path / "model")
    tf.saved_model.save(model, path, signatures=model.__call__)
    loaded = tf.saved_model.load(path)

    def gradient(fn, variable):
        with tf.GradientTape() as tape:
            y = fn(X)
        return tape.gradient(y, variable)

    assert_same(loaded(X), expected)
    assert_same(loaded.signatures["serving_default"](X), {"output_0": expected})
    assert_same(gradient(loaded, loaded.w), gradient(model, model.w))
    counts = op_counts(loaded.signatures["serving_default"])
    assert counts["TfFusedOps>MatMulBiasAct"] >= 1
    assert counts["MatMul"] == 0


def test_threads():
    compiled = tfo.function(layer)
    found, inputs = {}, [values((n + 1, 7), seed=n)[0] for n in range(6)]

    def run(i):
        found[i] = compiled(inputs[i])

    threads = [threading.Thread(target=run, args=[i]) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert_same([found[i] for i in range(6)], [layer(x) for x in inputs])
    assert rule_counts(compiled) == {"matmul_bias_relu": 6}


def test_vectorized_map():
    compiled = tfo.function(lambda x: tf.vectorized_map(lambda row: layer(row[None])[0], x))
    assert_same(compiled(X), layer(X))


def test_rewriting_twice_changes_nothing():
    from tf_fused_ops.remapper import remap_graph

    graph = tfo.function(layer).get_concrete_function(X).graph
    before = [op.name for op in graph.get_operations()]
    outputs, report = remap_graph(graph, graph.outputs)
    assert all(a is b for a, b in zip(outputs, graph.outputs, strict=True))
    assert report.fused == []
    assert [op.name for op in graph.get_operations()] == before


def test_reports_name_the_users_line():
    compiled = tfo.function(layer)
    compiled(X)
    (fusion,) = compiled.remap_reports[-1].fused
    line = inspect.getsourcelines(layer)[1] + 1
    assert fusion.source == f"{__file__}:{line}"
    assert fusion.fused == ("Relu_fused",)
    assert "Fuse MatMul with BiasAdd and Relu" in str(compiled.remap_reports[-1])


def test_unexpected_tensorflow(monkeypatch):
    from tf_fused_ops.remapper import tracing

    monkeypatch.setattr(tracing, "_installed", False)
    monkeypatch.setattr(tracing.func_graph, "func_graph_from_py_func", lambda other: None)
    with pytest.raises(RuntimeError, match=r"tf_fused_ops.function does not work with TensorFlow"):
        tfo.function(layer)


MIRRORED = """
import tensorflow as tf, numpy as np
import tf_fused_ops as tfo
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
x = np.random.default_rng(0).standard_normal((8, 7)).astype("f")

def train(decorate):
    with strategy.scope():
        w, b = tf.Variable(tf.ones([7, 5])), tf.Variable(tf.zeros([5]))
    data = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices(x).batch(8))

    @decorate
    def step(batch):
        def replica(batch):
            with tf.GradientTape() as tape:
                y = tf.nn.relu(tf.nn.bias_add(tf.matmul(batch, w), b))
                loss = tf.reduce_sum(y * y)
            gradients = tape.gradient(loss, [w, b])
            context = tf.distribute.get_replica_context()
            for variable, gradient in zip((w, b), context.all_reduce("sum", gradients)):
                variable.assign_sub(1e-3 * gradient)
            return loss
        return strategy.reduce("sum", strategy.run(replica, [batch]), axis=None)

    losses = [float(step(batch)) for _ in range(3) for batch in data]
    return losses, w.numpy(), step

losses, w, _ = train(tf.function)
fused_losses, fused_w, step = train(tfo.function)
np.testing.assert_allclose(fused_losses, losses, rtol=1e-5)
np.testing.assert_allclose(fused_w, w, rtol=1e-5)
report = step.remap_reports[-1]
print(report.counts(), sum(fusion.gradients for fusion in report.fused))
"""


def test_mirrored_strategy(run_python):
    counts = {"matmul_bias_relu": 2, "gradient_descent": 4}
    assert f"{counts} 2" in run_python(MIRRORED)
