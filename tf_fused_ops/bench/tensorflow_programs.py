"""The cases as plain TensorFlow code, under any decorator."""

import functools
import time

import numpy as np
import tensorflow as tf

from tf_fused_ops.bench import grid
from tf_fused_ops.bench.cases import (
    EPSILON,
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
from tf_fused_ops.bench.rule_chains import FAMILIES, rms_norm
from tf_fused_ops.bench.stacks import POOL
from tf_fused_ops.bench.workers import OURS, WINOGRAD

_ACTIVATIONS = {
    "none": tf.identity,
    "relu": tf.nn.relu,
    "relu6": tf.nn.relu6,
    "sigmoid": tf.sigmoid,
    "tanh": tf.tanh,
    "gelu_tanh": functools.partial(tf.nn.gelu, approximate=True),
    "gelu_erf": functools.partial(tf.nn.gelu, approximate=False),
    "softplus": tf.nn.softplus,
    "hard_sigmoid": lambda x: tf.nn.relu6(x + 3.0) / 6.0,
    "silu": tf.nn.silu,
    "mish": lambda x: x * tf.tanh(tf.math.softplus(x)),
    "hard_swish": lambda x: x * tf.nn.relu6(x + 3.0) / 6.0,
}
# An output of one of these ops, the first one, is what a forward pass is kept for.
_KEPT = ("Conv2D", "MatMul", "BatchMatMulV2", "Einsum", "Erfc")
# The size of the matrices, and the number of elements, by which a GPU is measured.
_PRODUCT, _COPIED = 8192, 1 << 28
# So small that rounding is not amplified from step to step.
_RATE = 1e-6
# Keras's own, which it adds to the largest magnitude of a row.
_QUANTIZER_EPSILON = 1e-7
_NAMESPACE = "TfFusedOps>"
_CONVOLUTION = f"{_NAMESPACE}Conv2DBiasAct"
# What a fused op replaces; any of them left in a graph means that it was not fused.
_REPLACED = (
    "Conv2D",
    "Conv2DBackpropFilter",
    "Conv2DBackpropInput",
    "Conv3D",
    "Conv3DBackpropFilterV2",
    "Conv3DBackpropInputV2",
    "MatMul",
    "BatchMatMulV3",
    "FusedBatchNorm",
    "FusedBatchNormV2",
    "FusedBatchNormV3",
    "FusedBatchNormGradV3",
    "Relu",
    "ReluGrad",
)
# Likewise, of recurrent layers.
_LOOPS = ("While", "StatelessWhile", *_REPLACED)
# And of decoders, where large matrices are read for a few rows.
_CACHED = ("XlaDynamicUpdateSlice", "Pack", "Einsum", "Softmax", "Sigmoid", "Rsqrt")
_LARGE = 512
# Rules that apply to what layers do beside that, and emit no fused op.
_OF_STOCK_OPS = {"slice_gradient", "joined_slice_gradients"}
_LAYERS = {"lstm": "LSTM", "gru": "GRU", "simple_rnn": "SimpleRNN"}


class NotWhatItClaims(Exception):
    """A peer did not run what its name says."""


def use_threads(count):
    """Sets the number of threads of an op, and of ops that run at the same time."""
    tf.config.threading.set_intra_op_parallelism_threads(count)
    tf.config.threading.set_inter_op_parallelism_threads(count)


class Programs:
    """One TensorFlow peer.

    Args:
        peer: "stock", "xla", "ours" or "winograd".
        device: "cpu" or "gpu".
    """

    def __init__(self, peer, device="cpu"):
        self._peer = peer
        self._is_ours = peer in (OURS, WINOGRAD)
        self._device = device

    def wait(self):
        """Returns once all that was called is done."""
        if self._device == "gpu":
            tf.test.experimental.sync_devices()

    def card(self, dtype):
        """The GPU's name, and how many operations and bytes it does in a second.

        Operations are those of a large product (of float32 in TF32), bytes those that a negation
        reads and writes.
        """
        (gpu,) = tf.config.list_physical_devices("GPU")[:1]
        name = tf.config.experimental.get_device_details(gpu)["device_name"]
        a, b = (tf.cast(tf.random.normal([_PRODUCT] * 2), dtype) for _ in range(2))
        operations = 2 * _PRODUCT**3 / self._seconds(lambda: tf.matmul(a, b))
        x = tf.cast(tf.random.normal([_COPIED]), dtype)
        return name, operations, 2 * _COPIED * x.dtype.size / self._seconds(lambda: -x)

    def _seconds(self, function, calls=10, times=3):
        """The least of some times of a function."""
        function()
        self.wait()
        taken = []
        for _ in range(times):
            before = time.perf_counter()
            for _ in range(calls):
                function()
            self.wait()
            taken.append((time.perf_counter() - before) / calls)
        return min(taken)

    def load(self, case, mode):
        """Traces a case.

        Args:
            case: A case of `bench.cases`.
            mode: "forward" or "step".

        Returns:
            A function without arguments that runs it, and a list of the arrays it computes.

        Raises:
            NotWhatItClaims: The traced graph is not the peer's kind.
        """
        if isinstance(case, ApplicationCase):
            return self._load_model(case, mode)
        values = zip(grid.inputs(case), grid.dtypes(case), strict=True)
        inputs = [tf.constant(value, dtype) for value, dtype in values]
        forward, is_rule = _forward(case), isinstance(case, RuleCase)
        alone, joins = (case.alone, case.joins) if is_rule else (False, False)
        if mode == "forward":
            function, arguments = self.decorate(forward), inputs[:-1]
        else:
            step = training_step(forward)
            function, arguments = self.decorate(_keeping(step) if alone else step), inputs
        self._check(function.get_concrete_function(*arguments), () if alone else _replaced(case))
        if self._is_ours and not isinstance(case, DecoderCase):
            fired = function.remap_reports[-1].counts().keys() - _OF_STOCK_OPS
            if case.rule() not in fired or len(fired) > 1 + alone + joins:
                raise NotWhatItClaims(f"fused by {', '.join(sorted(fired))}, not {case.rule()}")
        outputs = tf.nest.flatten(function(*arguments))
        if any(self._device.upper() not in output.device for output in outputs):
            raise NotWhatItClaims(f"not computed on the {self._device}")
        return lambda: function(*arguments), [_array(output) for output in outputs]

    def load_stack(self, layers):
        """A function without arguments that computes the gradients of all weights.

        Args:
            layers: A row of `stacks.STACKS`.
        """
        cases = [case for case in layers if case != POOL]
        weights = [tf.constant(v, c.dtype) for c in cases for v in grid.inputs(c)[1:3]]
        x = tf.constant(grid.inputs(cases[0])[0], cases[0].dtype)

        def step(x, weights):
            with tf.GradientTape() as tape:
                tape.watch(weights)
                rest, y = iter(weights), x
                for layer in layers:
                    if layer == POOL:
                        y = tf.nn.max_pool2d(y, 2, 2, "VALID")
                    else:
                        y = _forward(layer)(y, next(rest), next(rest))
                loss = tf.reduce_mean(tf.square(y))
            return tape.gradient(loss, weights)

        function = self.decorate(step)
        self._check(function.get_concrete_function(x, weights), _REPLACED)
        grid.inputs.cache_clear()
        return lambda: function(x, weights)

    def decorate(self, function):
        """The function under the peer's decorator."""
        if self._is_ours:
            from tf_fused_ops import RemapOptions
            from tf_fused_ops import function as fused

            return fused(function, remap=RemapOptions(winograd=self._peer == WINOGRAD))
        return tf.function(function, jit_compile=self._peer == "xla", autograph=False)

    def _load_model(self, case, mode):
        call = self.decorate(application(case, mode))
        self._check(call.get_concrete_function(), replaced=())
        # The losses of the first steps.
        steps = 1 if mode == "forward" else 3
        return call, [np.stack([_array(call()) for _ in range(steps)])]

    def _check(self, concrete, replaced):
        graph = concrete.graph
        operations = [op.type for op in graph.get_operations()]
        for function in graph.as_graph_def().library.function:
            operations += [node.op for node in function.node_def]
        fused = any(op.startswith(_NAMESPACE) for op in operations)
        compiled = concrete.function_def.attr["_XlaMustCompile"].b
        if compiled != (self._peer == "xla"):
            raise NotWhatItClaims("compiled by XLA" if compiled else "not compiled by XLA")
        if fused != self._is_ours:
            raise NotWhatItClaims("fused" if fused else "nothing was fused")
        convolutions = (op for op in graph.get_operations() if op.type.startswith(_CONVOLUTION))
        allowed = {op.get_attr("winograd") for op in convolutions}
        if allowed - {self._peer == WINOGRAD}:
            raise NotWhatItClaims(f"Winograd's algorithm is{' not' * (False in allowed)} allowed")
        left = sorted(set(operations) & set(replaced))
        if self._is_ours and left:
            raise NotWhatItClaims(f"not fused: {', '.join(left)}")


def _replaced(case):
    """What may not be left of a case."""
    if isinstance(case, DecoderCase):
        return (*_CACHED, *["BatchMatMulV2"] * (case.width >= _LARGE))
    return _LOOPS if isinstance(case, RecurrentCase) else _REPLACED


def training_step(forward):
    """A function of the inputs and dy that returns y and the gradients of the inputs."""

    def step(*arguments):
        *inputs, dy = arguments
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            y = forward(*inputs)
        gradients = tape.gradient(y, inputs, dy)
        # Statistics have none.
        return [y, *(gradient for gradient in gradients if gradient is not None)]

    return step


def _keeping(step):
    """A training step that also returns what only a forward pass of stock ops has."""

    def with_kept(*arguments):
        outputs = step(*arguments)
        ops = tf.compat.v1.get_default_graph().get_operations()
        return [*outputs, next(op.outputs[0] for op in ops if op.type in _KEPT)]

    return with_kept


@functools.singledispatch
def _forward(case):
    """A function of a case's inputs, in plain TensorFlow."""
    raise TypeError(f"case: {type(case).__name__} has no TensorFlow program")


@_forward.register
def _(case: ConvCase):
    def forward(x, filters, bias):
        y = tf.nn.conv2d(
            x,
            filters,
            case.ordered(1, case.strides, 1),
            case.padding,
            case.layout,
            case.ordered(1, case.dilations, 1),
        )
        return _ACTIVATIONS[case.act](tf.nn.bias_add(y, bias, case.layout))

    return forward


@_forward.register
def _(case: ConvTransposeCase):
    def forward(x, filters, bias):
        y = tf.nn.conv2d_transpose(x, filters, case.output_shape(), case.strides, case.padding)
        return _ACTIVATIONS[case.act](tf.nn.bias_add(y, bias))

    return forward


@_forward.register
def _(case: MatMulCase):
    def forward(a, b, bias):
        return _ACTIVATIONS[case.act](tf.nn.bias_add(tf.matmul(a, b), bias))

    return forward


@_forward.register
def _(case: BatchNormCase):
    def forward(x, scale, offset, *side):
        y, _, _ = tf.compat.v1.nn.fused_batch_norm(
            x, scale, offset, epsilon=EPSILON, data_format=case.layout, is_training=True
        )
        return _ACTIVATIONS[case.act](y + side[0] if side else y)

    return forward


@_forward.register
def _(case: RuleCase):
    def forward(*inputs):
        if case.family.endswith("_add"):
            *inputs, side = inputs
            y = FAMILIES[case.family.removesuffix("_add")](*inputs) + side
        else:
            y = FAMILIES[case.family](*inputs)
        return _ACTIVATIONS[case.act](y)

    return forward


@_forward.register
def _(case: RecurrentCase):
    import keras

    build = getattr(keras.layers, _LAYERS[case.cell])
    # Of the weights it has at first only the shapes count; there is no default in bfloat16.
    initial = {"recurrent_initializer": "zeros"}
    layer = build(case.units, return_sequences=True, dtype=case.dtype, **initial)
    layer.build((case.batch, case.steps, case.features))

    def forward(x, *weights):
        y, _ = layer.stateless_call(weights, layer.non_trainable_variables, x)
        return y

    return forward


@_forward.register
def _(case: QuantizedCase):
    # What the layer of Keras consists of.
    def forward(a, b, b_scale, *bias):
        largest = tf.reduce_max(tf.abs(a), -1, keepdims=True)
        scale = 127 / (largest + _QUANTIZER_EPSILON)
        rounded = tf.clip_by_value(tf.round(a * scale), -127, 127)
        product = tf.matmul(tf.cast(rounded, tf.int8), b, output_type=tf.int32)
        y = tf.cast(product, a.dtype) / (tf.cast(b_scale, a.dtype) * scale)
        return _ACTIVATIONS[case.act](tf.nn.bias_add(y, *bias) if bias else y)

    return forward


@_forward.register
def _(case: WeightOnlyCase):
    # What the layer of Keras consists of.
    def numbers(b, scale, zero, group, dtype):
        packed, four, eight = tf.transpose(b), tf.constant(4, tf.int8), tf.constant(8, tf.int8)
        mask = tf.constant(15, tf.int8)
        halves = packed & mask, tf.bitwise.right_shift(packed, four) & mask
        signed = [(half ^ eight) - eight for half in halves]
        both = tf.reshape(tf.stack(signed, 1), [-1, case.k])
        integers = tf.transpose(both[: case.n, ...])
        group = tf.where(group < 0, group + case.groups, group)
        zero = tf.cast(tf.gather(zero, group), dtype)
        return (tf.cast(integers, dtype) - zero) * tf.gather(tf.cast(scale, dtype), group)

    def product(a, w):
        heads = [2, case.n // 2]
        if case.form == "matmul":
            return tf.matmul(a, w)
        a = tf.reshape(a, [2, case.m // 2, case.k])
        if case.form == "dense":
            return tf.tensordot(a, w, 1)
        if case.form == "einsum":
            w = tf.reshape(w, [case.k, *heads])
            return tf.raw_ops.Einsum(inputs=[a, w], equation="abc,cde->abde")
        y = tf.matmul(a, w)
        return y if case.form == "batch_matmul" else tf.reshape(y, [-1, case.m // 2, *heads])

    def forward(a, b, scale, *others):
        if case.bits == 8:
            y = tf.matmul(a, tf.cast(b, a.dtype)) / tf.cast(scale, a.dtype)
        else:
            zero, group, *others = others
            w = numbers(b, scale, zero, group, a.dtype)
            if case.form == "numbers":
                return w
            y = product(a, w)
        if others and y.shape.rank == 4:
            y += tf.reshape(others[0], y.shape[2:])
        elif others:
            y = tf.nn.bias_add(y, *others)
        return _ACTIVATIONS[case.act](y)

    return forward


@_forward.register
def _(case: DecoderCase):
    import keras
    from keras import ops

    shape = [case.batch, 1, -1, case.depth]
    wide = "float64" if case.dtype == "float64" else "float32"
    softmax = keras.layers.Softmax(dtype=wide)

    def norm(x, scale):
        return tf.cast(rms_norm(tf.cast(x, wide), tf.cast(scale, wide)), x.dtype)

    def attend(x, cache, index, query, key, value, output):
        """What is added to x, and the next cache of a layer, as KerasHub spells it."""
        query, *new = (tf.reshape(tf.matmul(x, w), shape) for w in (query, key, value))
        parts = cache[:, 0, ...], cache[:, 1, ...]
        start = [0, index, 0, 0]
        key, value = (ops.slice_update(p, start, n) for p, n in zip(parts, new, strict=True))
        cache = tf.stack((key, value), axis=1)
        groups = case.heads // case.key_heads
        key, value = (ops.repeat(part, repeats=groups, axis=2) for part in (key, value))
        scores = ops.einsum("bquh,bkuh->buqk", query, key) * case.depth**-0.5
        mask = tf.range(case.length)[None, None, None, :] <= index
        weights = tf.cast(softmax(scores, mask), x.dtype)
        y = ops.einsum("buqk,bkuh->bquh", weights, value)
        return tf.matmul(tf.reshape(y, x.shape), output), cache

    def forward(first, cache, scale, *weights):
        def step(index, x, cache):
            x, caches = x + first, []
            for i, (before, behind, *matrices) in enumerate(case.by_layer(weights)):
                *projections, gate, up, down = matrices
                y, updated = attend(norm(x, before), cache[:, i, ...], index, *projections)
                caches.append(updated)
                x += y
                y = norm(x, behind)
                x += tf.matmul(tf.nn.silu(tf.matmul(y, gate)) * tf.matmul(y, up), down)
            return index + 1, norm(x, scale), tf.stack(caches, axis=1)

        start = tf.constant(case.length - case.steps), tf.zeros_like(first), cache
        return tf.while_loop(lambda index, *_: index < case.length, step, start)[1]

    return forward


def application(case, mode):
    """A function without arguments that predicts, or takes a training step and returns the loss."""
    import keras

    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy(case.dtype)
    build = getattr(keras.applications, case.name)
    model = build(weights=None, input_shape=(case.size, case.size, 3))
    random = np.random.default_rng(0)
    images = tf.constant(random.normal(size=(case.batch, case.size, case.size, 3)), case.dtype)
    if mode == "forward":
        return lambda: model(images, training=False)
    labels = tf.constant(random.integers(case.classes, size=case.batch))
    optimizer = keras.optimizers.SGD(_RATE, momentum=0.9)
    optimizer.build(model.trainable_variables)
    entropy = keras.losses.SparseCategoricalCrossentropy()

    def step():
        with tf.GradientTape() as tape:
            loss = entropy(labels, model(images, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    return step


def _array(tensor):
    """As NumPy knows it: bfloat16 widened."""
    if tensor.dtype == tf.bfloat16:
        tensor = tf.cast(tensor, tf.float32)
    return tensor.numpy()
