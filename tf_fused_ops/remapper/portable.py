"""The way back: fused ops are replaced by stock ops, for where tf_fused_ops is not installed."""

import time

import tensorflow as tf
from tensorflow.python.framework.auto_control_deps import AutomaticControlDependencies

from tf_fused_ops.ops import (
    _gradient,
    cache,
    quantized_matmul,
    recurrent,
    reference,
    weight_only_matmul,
)
from tf_fused_ops.ops.attention import optional_inputs
from tf_fused_ops.remapper import emission, hiding
from tf_fused_ops.remapper.graph import GraphView
from tf_fused_ops.remapper.graph_def import Transform
from tf_fused_ops.remapper.report import Fusion, Report
from tf_fused_ops.remapper.variable_updates import UPDATES

_ACTIVATION = ("activation", "alpha")
_CONV = ("strides", "padding", "data_format", "dilations")
_CONV3D = ("strides", "padding", "dilations")
_GROUPS = ("groups", "data_format")
_MATMUL = ("transpose_a", "transpose_b")
_MAX_POOL = ("ksize", "strides", "padding")
_OPTIONAL = ("num_bias", "num_side_inputs", "num_scale")
_STATISTICS = ("epsilon", "momentum", "training", "unbiased", "data_format")


class ToStock(Transform):
    """Replaces every fused op by what `ops.reference` says it computes."""

    def __call__(self, graph, outputs, name):
        start = time.perf_counter()
        report = Report(name)
        fused = [op for op in graph.get_operations() if op.type in _STOCK]
        if fused:
            view = GraphView(graph, outputs)
            with emission.outside(graph):
                for op in fused:
                    new = _emit(op)
                    first = new[0] if isinstance(new[0], tf.Operation) else new[0].op
                    view.remove([op])
                    view.swap(list(zip(op.outputs, new if op.outputs else [], strict=True)))
                    # Functions, and other ops, wait for what has a state.
                    view.replace_output(op, first)
                    for user in op._control_outputs:
                        view.replace_control_input(user, op, first)
                    report.fused.append(Fusion(op.type, (op.name,), (first.name,), ()))
            hiding.hide(graph, view.leftovers())
            outputs = view.outputs
        report.seconds = time.perf_counter() - start
        return outputs, report


def _emit(op):
    """Emits stock ops with the device and the control inputs of a fused op.

    Returns:
        Its outputs, or an op that stands for it if it has none.
    """
    with emission.emitting(op, op.control_inputs), tf.name_scope(f"{op.name}_stock/"):
        return _STOCK[op.type](op)


def _attributes(op, names):
    values = _gradient.attributes(op, *names)
    if values.get("padding") == "EXPLICIT":
        explicit = iter(op.get_attr("explicit_paddings"))
        values["padding"] = [list(pair) for pair in zip(explicit, explicit, strict=True)]
    return values


def _contraction(function, names):
    """Returns what stands for a forward op with bias, side input, scale and activation.

    Args:
        function: Takes both operands, and what follows the optional inputs.
        names: The attributes that it takes, too.
    """

    def stock(op):
        attributes, rest = _attributes(op, names), iter(op.inputs[2:])
        bias, side_input, scale = (_optional(op, name, rest) for name in _OPTIONAL)
        if scale is not None:
            attributes["scale"] = scale
        linear = {"activation": "none", "alpha": 0.0}
        z = function(*op.inputs[:2], *rest, None, None, **attributes, **linear)
        if bias is not None:
            z = _add_bias(z, bias, attributes.get("data_format", "NHWC"))
        if side_input is not None:
            z = z + side_input
        y = reference.act(z, **_attributes(op, _ACTIVATION))
        pre_activation = z if op.get_attr("save_pre_activation") else tf.zeros([0], z.dtype)
        return [y, pre_activation, *_moments_of(op, y)]

    return stock


def _moments_of(op, y):
    """Returns the moments of a convolution's output if it yields them."""
    if not op.node_def.attr["num_moments"].i:
        return []
    return [reference.batch_norm_moments(y, **_attributes(op, ["data_format"]))]


def _optional(op, count, inputs):
    """Returns the next of an op's inputs if the attribute that counts it says that it is there."""
    return next(inputs) if count in op.node_def.attr and op.get_attr(count) else None


def _add_bias(z, bias, data_format):
    # The op that TensorFlow's own remapper knows; in NCHW its gradient is wrong on CPU.
    if data_format == "NHWC":
        return tf.nn.bias_add(z, bias)
    return z + tf.reshape(bias, [-1, 1, 1])


def _contraction_grad(function, names):
    """Returns what stands for the gradient op."""

    def stock(op):
        saved = op.inputs[3] if op.get_attr("num_saved") else None
        outputs = function(*op.inputs[:3], saved, **_attributes(op, (*names, *_ACTIVATION)))
        return _requested(op, outputs)

    return stock


def _requested(op, outputs):
    """Returns the outputs of a gradient op with those empty that it was not asked for."""
    names = (argument.name for argument in op.op_def.output_arg)
    switches = (f"{name.removesuffix('_grad')}_gradient" for name in names)
    return [
        tf.zeros([0], value.dtype)
        if switch in op.node_def.attr and not op.get_attr(switch)
        else value
        for switch, value in zip(switches, outputs, strict=True)
    ]


def _batch_norm(op):
    side_input = op.inputs[5] if op.get_attr("num_side_inputs") else None
    if op.get_attr("training") or op.inputs[0].shape.rank is None:
        attributes = _attributes(op, (*_STATISTICS, *_ACTIVATION))
        outputs = reference.batch_norm_act(*op.inputs[:5], side_input, **attributes)
    else:
        outputs = _batch_norm_inference(op, side_input)
    return [*outputs, _mask(op, outputs[0])]


def _mask(op, y):
    return reference.pack_mask(y > 0) if op.get_attr("save_mask") else tf.zeros([0], tf.uint8)


def _batch_norm_inference(op, side_input):
    """As tf.nn.batch_normalization has it: one product and one sum over x."""
    x, scale, offset, mean, variance = op.inputs[:5]
    vectors, epsilon = (mean, variance, offset, scale), _attributes(op, ["epsilon"])["epsilon"]
    if op.get_attr("data_format") == b"NCHW":
        vectors = (tf.reshape(v, [-1] + [1] * (x.shape.rank - 2)) for v in vectors)
    z = tf.nn.batch_normalization(tf.cast(x, scale.dtype), *vectors, epsilon)
    if side_input is not None:
        z += tf.cast(side_input, z.dtype)
    y = tf.cast(reference.act(z, **_attributes(op, _ACTIVATION)), x.dtype)
    return [y, mean, variance, mean, tf.math.rsqrt(variance + epsilon)]


def _batch_norm_apply(op):
    side_input = op.inputs[6] if op.get_attr("num_side_inputs") else None
    attributes = _attributes(op, ("epsilon", "momentum", "unbiased", "data_format", *_ACTIVATION))
    outputs = reference.batch_norm_apply(*op.inputs[:6], side_input, **attributes)
    return [*outputs, _mask(op, outputs[0])]


def _batch_norm_moments(op):
    return [reference.batch_norm_moments(op.inputs[0], **_attributes(op, ["data_format"]))]


def _batch_norm_grad(function, num_operands, names=("data_format",)):
    """Returns what stands for a gradient op with side input and mask."""

    def stock(op):
        rest, side = op.inputs[num_operands:], op.get_attr("num_side_inputs")
        outputs = function(
            *op.inputs[:num_operands],
            rest[0] if side else None,
            rest[side] if op.get_attr("num_masks") else None,
            **_attributes(op, (*names, *_ACTIVATION)),
        )
        return _requested(op, outputs)

    return stock


def _act(op):
    return [reference.act(op.inputs[0], **_attributes(op, _ACTIVATION))]


def _act_grad(op):
    return [reference.act_grad(*op.inputs, **_attributes(op, _ACTIVATION))]


def _max_pool(op):
    return reference.max_pool_act(op.inputs[0], **_attributes(op, (*_MAX_POOL, "activation")))


def _max_pool_grad(op):
    return [reference.max_pool_act_grad(*op.inputs, **_attributes(op, _MAX_POOL))]


def _layer_norm(op):
    """As tf.nn.batch_normalization has it."""
    (x, scale, offset), epsilon = op.inputs, _attributes(op, ["epsilon"])["epsilon"]
    wide = tf.cast(x, scale.dtype)
    if not op.get_attr("subtract_mean"):
        inv_std = tf.math.rsqrt(tf.reduce_mean(tf.square(wide), -1, keepdims=True) + epsilon)
        y = tf.cast(wide * inv_std * scale + offset, x.dtype)
        return [y, tf.zeros_like(inv_std[..., 0]), inv_std[..., 0]]
    mean, variance = tf.nn.moments(wide, [-1], keepdims=True)
    y = tf.nn.batch_normalization(wide, mean, variance, offset, scale, epsilon)
    return [tf.cast(y, x.dtype), mean[..., 0], tf.math.rsqrt(variance[..., 0] + epsilon)]


def _layer_norm_grad(op):
    dy, x, scale, _, inv_std = op.inputs
    attributes = _attributes(op, ["subtract_mean"])
    return reference.layer_norm_grad(dy, x, scale, inv_std, **attributes)


def _group_norm(op):
    attributes = _attributes(op, (*_GROUPS, "epsilon", *_ACTIVATION))
    return reference.group_norm_act(*op.inputs, **attributes)


def _group_norm_grad(op):
    dy, x, scale, offset, _, inv_std = op.inputs
    attributes = _attributes(op, (*_GROUPS, *_ACTIVATION))
    return reference.group_norm_act_grad(dy, x, scale, offset, inv_std, **attributes)


_ATTENTION = (
    *("scale", "masked", "zero_masked", "heads_first"),
    *("dropout_rate", "dropout_scale"),
)


def _attention(op):
    optional = optional_inputs(op, op.inputs[3:])
    attributes = _attributes(op, [*_ATTENTION, "slot"])
    return reference.attention(*op.inputs[:3], *optional, **attributes)


def _attention_grad(op):
    # What the forward op kept follows from its arguments.
    optional = optional_inputs(op, op.inputs[7:])
    attributes = _attributes(op, [*_ATTENTION, "bias_gradient"])
    return reference.attention_grad(*op.inputs[:4], *optional, **attributes)


def _dropout(op):
    return [reference.dropout(*op.inputs, **_attributes(op, ["rate", "scale"]))]


def _cross_entropy(function):
    """Returns what stands for cross entropy with labels of a kind."""
    return lambda op: function(*op.inputs)


def _cross_entropy_grad(function):
    """Returns what stands for its gradient."""
    # What the forward op kept follows from its arguments.
    return lambda op: [function(*op.inputs[:3])]


def _random_words(op):
    """Draws anew in every call, too, but other numbers: no stock op tells of its generator."""
    least, most = tf.int64.min, tf.int64.max
    seeds = _attributes(op, ["seed", "seed2"])
    words = tf.raw_ops.RandomUniformInt(
        shape=[3], minval=tf.constant(least, tf.int64), maxval=tf.constant(most, tf.int64), **seeds
    )
    words = tf.bitcast(words, tf.uint64)
    return [words[:1], words[1:]]


def _softmax(op):
    return [reference.softmax(*op.inputs, **_attributes(op, ["scale", "masked", "zero_masked"]))]


def _softmax_grad(op):
    return [reference.softmax_grad(*op.inputs, **_attributes(op, ["scale", "zero_masked"]))]


def _recurrent(op):
    *outputs, saved = recurrent.stock(op, op.inputs)
    return [*outputs, saved if op.get_attr("save") else tf.zeros([0], saved.dtype)]


def _recurrent_grad(op):
    return recurrent.stock_gradient(op, op.inputs)


def _prelu(op):
    return [reference.prelu(*op.inputs)]


def _prelu_grad(op):
    return reference.prelu_grad(*op.inputs)


def _quantized_matmul(op):
    return [quantized_matmul.stock(op, op.inputs)]


def _weight_only_matmul(op):
    return [weight_only_matmul.stock(op, op.inputs)]


def _dequantized_weights(op):
    return [weight_only_matmul.stock_weights(op, op.inputs)]


def _update_cache(op):
    return list(cache.stock(op, op.inputs))


def _update_variable(op):
    formula, of_rows = op.get_attr("formula").decode(), op.get_attr("num_indices") > 0
    rule = next(
        rule
        for rule in UPDATES
        if rule.fused_attrs.get("formula") == formula and bool(rule.integers) == of_rows
    )
    with AutomaticControlDependencies():
        return [tf.group(*rule.stock_of(op).values())]


_STOCK = {
    "TfFusedOps>Act": _act,
    "TfFusedOps>ActGrad": _act_grad,
    "TfFusedOps>Conv2DBiasAct": _contraction(reference.conv2d_bias_act, _CONV),
    "TfFusedOps>Conv2DBiasActGrad": _contraction_grad(reference.conv2d_bias_act_grad, _CONV),
    "TfFusedOps>Conv2DTransposeBiasAct": _contraction(reference.conv2d_transpose_bias_act, _CONV),
    "TfFusedOps>Conv2DTransposeBiasActGrad": _contraction_grad(
        reference.conv2d_transpose_bias_act_grad, _CONV
    ),
    "TfFusedOps>Conv3DBiasAct": _contraction(reference.conv3d_bias_act, _CONV3D),
    "TfFusedOps>Conv3DBiasActGrad": _contraction_grad(reference.conv3d_bias_act_grad, _CONV3D),
    "TfFusedOps>GroupNormAct": _group_norm,
    "TfFusedOps>GroupNormActGrad": _group_norm_grad,
    "TfFusedOps>LayerNorm": _layer_norm,
    "TfFusedOps>LayerNormGrad": _layer_norm_grad,
    "TfFusedOps>MatMulBiasAct": _contraction(reference.matmul_bias_act, _MATMUL),
    "TfFusedOps>MatMulBiasActGrad": _contraction_grad(reference.matmul_bias_act_grad, _MATMUL),
    "TfFusedOps>MaxPoolAct": _max_pool,
    "TfFusedOps>MaxPoolActGrad": _max_pool_grad,
    "TfFusedOps>Prelu": _prelu,
    "TfFusedOps>PreluGrad": _prelu_grad,
    "TfFusedOps>Attention": _attention,
    "TfFusedOps>AttentionGrad": _attention_grad,
    "TfFusedOps>SoftmaxCrossEntropy": _cross_entropy(reference.softmax_cross_entropy),
    "TfFusedOps>SoftmaxCrossEntropyGrad": _cross_entropy_grad(reference.softmax_cross_entropy_grad),
    "TfFusedOps>SparseSoftmaxCrossEntropy": _cross_entropy(reference.sparse_softmax_cross_entropy),
    "TfFusedOps>SparseSoftmaxCrossEntropyGrad": _cross_entropy_grad(
        reference.sparse_softmax_cross_entropy_grad
    ),
    "TfFusedOps>Recurrent": _recurrent,
    "TfFusedOps>RecurrentGrad": _recurrent_grad,
    "TfFusedOps>QuantizedMatMulBiasAct": _quantized_matmul,
    "TfFusedOps>WeightOnlyMatMulBiasAct": _weight_only_matmul,
    "TfFusedOps>DequantizedWeights": _dequantized_weights,
    "TfFusedOps>Dropout": _dropout,
    "TfFusedOps>RandomWords": _random_words,
    "TfFusedOps>Softmax": _softmax,
    "TfFusedOps>SoftmaxGrad": _softmax_grad,
    "TfFusedOps>UpdateCache": _update_cache,
    "TfFusedOps>UpdateVariable": _update_variable,
    "TfFusedOps>BatchNormAct": _batch_norm,
    "TfFusedOps>BatchNormActGrad": _batch_norm_grad(
        reference.batch_norm_act_grad, 6, ("training", "data_format")
    ),
    "TfFusedOps>BatchNormMoments": _batch_norm_moments,
    "TfFusedOps>BatchNormApply": _batch_norm_apply,
    "TfFusedOps>BatchNormGradSums": _batch_norm_grad(reference.batch_norm_grad_sums, 6),
    "TfFusedOps>BatchNormGradApply": _batch_norm_grad(reference.batch_norm_grad_apply, 7),
}
