"""Rules for convolutions and matrix products with bias, side input and activation."""

import abc
import functools
import math
from typing import ClassVar

import tensorflow as tf

from tf_fused_ops._library import ops
from tf_fused_ops.remapper import shapes
from tf_fused_ops.remapper.rule import AddSideInput, Fused, Rule

# Additions that are a bias if the other operand is a vector of the right length.
_SUMS = ("AddV2", "Add")


class _ContractionBiasAct(Rule):
    """act(bias_add(contraction, bias)).

    Variants, by attribute:
        bias_op: The type of the op that adds the bias.
        bias_first: Whether the bias is its first operand.
    """

    contraction: tuple

    def default_attrs(self):
        return super().default_attrs() | {"bias_op": "BiasAdd", "bias_first": False}

    def variants(self, view, anchor):
        for attrs in super().variants(view, anchor):
            if "bias" not in self.operands:
                yield attrs | {"bias_op": None}
                continue
            product, rank = self.product(view, anchor), self.bias_rank(anchor)
            for bias_op in dict.fromkeys(_bias_ops(view, product, rank)):
                yield attrs | {"bias_op": bias_op}

    def product(self, view, anchor):
        """Returns the tensor to which the bias is added."""
        return anchor.outputs[0]

    def bias_rank(self, anchor):
        """Returns the rank of the bias."""
        return 1

    def stock(self, attrs, **operands):
        return {"y": self.activate(self.linear(attrs, **operands), attrs)}

    @abc.abstractmethod
    def linear(self, attrs, **operands):
        """The stock chain up to the bias."""

    def add_bias(self, attrs, z, bias):
        """The stock addition of the bias, if there is one."""
        if bias is None:
            return z
        if attrs["bias_op"] == "BiasAdd":
            data_format = attrs.get("data_format", "NHWC")
            return tf.raw_ops.BiasAdd(value=z, bias=bias, data_format=data_format)
        operands = [bias, z] if attrs["bias_first"] else [z, bias]
        return getattr(tf.raw_ops, attrs["bias_op"])(x=operands[0], y=operands[1])

    def observed(self, nodes, operands, attrs):
        sums = (op for op in nodes if op.type in _SUMS and "bias" in operands)
        first = any(op.inputs[0] is operands["bias"] for op in sums)
        return super().observed(nodes, operands, attrs) | {"bias_first": first}

    def check(self, match):
        if match.attrs["bias_op"] not in _SUMS:
            return None
        bias, product = match.operands["bias"], match.node(self.anchor).outputs[0]
        if match.attrs.get("data_format") == b"NCHW":
            return f"{bias.name} is added to the last dimension, which is not that of channels"
        if not bias.shape.is_fully_defined() or bias.shape != self.channels(match):
            return f"{bias.name} of shape {bias.shape} may not be a bias of {product.name}"
        return None

    def channels(self, match):
        """Returns the shape that the bias must have."""
        return match.node(self.anchor).outputs[0].shape[-1:]

    def fuse(self, match, training):
        save = training and self.activation.needs_pre_activation(match.attrs)
        fused = self.forward_op(
            *self._factors(match),
            bias=[self.flat_bias(t) for t in self._optional(match, "bias")],
            side_input=[self.widen(match, t) for t in self._optional(match, "side_input")],
            save_pre_activation=save,
            name=match.fused_name(),
            **self._attrs(match),
        )
        saved = ()
        if self.activation.name != "none":
            saved = (fused.pre_activation if save else fused.y,)
        return Fused({"y": self.narrow(match, fused.y)}, saved)

    def fuse_gradient(self, match, fused, dy, wanted):
        a, b = self.contraction
        gradients = self.gradient_op(
            self.widen(match, dy),
            *self._factors(match),
            saved=list(fused.saved),
            bias_gradient="bias" in wanted,
            side_input_gradient="side_input" in wanted,
            name=match.fused_name("_grad"),
            **{f"{a}_gradient": a in wanted, f"{b}_gradient": b in wanted},
            **self._attrs(match),
        )
        named = zip((a, b, "bias", "side_input"), gradients, strict=True)
        return {name: self.narrow_gradient(match, name, g) for name, g in named if name in wanted}

    def flat_bias(self, bias):
        """Gives the bias the rank that the fused op takes."""
        return bias

    def widen(self, match, tensor):
        """Gives a tensor of the output's shape the rank that the fused op takes."""
        return tensor

    def narrow(self, match, tensor):
        """Undoes `widen`."""
        return tensor

    def narrow_gradient(self, match, name, gradient):
        """Gives the gradient of an operand the operand's shape."""
        return gradient

    def describe(self, match):
        activation = f"activation={match.outputs['y'].op.name} " if self.activation.label else ""
        parts = [
            *["BiasAdd"] * ("bias" in match.operands),
            *["Add"] * ("side_input" in match.operands),
            self.activation.label,
        ]
        what = f"{self.anchor} with " + " and ".join(filter(None, parts))
        bias_add = f"bias_add={self._linear_end(match).name} " if "bias" in match.operands else ""
        contraction = match.node(self.anchor).name
        return what, f"{activation or ' '}{bias_add}contraction={contraction}"

    def _linear_end(self, match):
        """Returns the op that the side input or the activation follows."""
        return match.node(match.attrs["bias_op"] or self.anchor)

    def _factors(self, match):
        return [match.operands[name] for name in self.contraction]

    def _optional(self, match, name):
        return [match.operands[name]] if name in match.operands else []

    def _attrs(self, match):
        names = [name for group in self.captured.values() for name in group]
        return {name: match.attrs[name] for name in names} | {"activation": self.activation.name}


class Conv2DBiasAct(_ContractionBiasAct):
    """act(bias_add(conv2d(input, filters), bias))."""

    family = "conv2d_bias"
    anchor = "Conv2D"
    operands: ClassVar = {"input": (4,), "filters": (4,), "bias": (1,)}
    contraction = ("input", "filters")
    differentiable = ("input", "filters", "bias")
    captured: ClassVar = {
        "Conv2D": {
            "strides": [1, 1, 1, 1],
            "padding": b"SAME",
            "explicit_paddings": [],
            "dilations": [1, 1, 1, 1],
            "data_format": b"NHWC",
        }
    }
    keyed = ("data_format",)
    fused_ops = ("TfFusedOps>Conv2DBiasAct", "TfFusedOps>Conv2DBiasActGrad")

    forward_op = staticmethod(functools.partial(ops.tf_fused_ops_conv2d_bias_act, scale=[]))
    gradient_op = staticmethod(ops.tf_fused_ops_conv2d_bias_act_grad)

    def linear(self, attrs, input, filters, bias=None):
        conv = {name: attrs[name] for name in Conv2DBiasAct.captured["Conv2D"]}
        z = tf.raw_ops.Conv2D(input=input, filter=filters, **conv)
        return self.add_bias(attrs, z, bias)

    def scalable(self, attrs, shapes):
        # Windows stay inside the image, and the sizes of the result enter no constant.
        *window, channels, _ = shapes["filters"]
        fits = attrs["padding"] == b"SAME" or window == [1, 1]
        grouped = shapes["input"][_channel_axis(attrs)] != channels
        return fits and not grouped and attrs["bias_op"] not in _SUMS

    def check(self, match):
        channels = match.operands["input"].shape[_channel_axis(match.attrs)]
        filters = match.operands["filters"].shape
        if channels is None or channels != filters[-2]:
            return (
                f"a grouped convolution, or its channels are not known: {channels} in the input, "
                f"{filters[-2]} in the filters"
            )
        return super().check(match)


def _channel_axis(attrs):
    return 1 if attrs["data_format"] == b"NCHW" else -1


class Conv2DAct(Conv2DBiasAct):
    """act(conv2d(input, filters))."""

    family = "conv2d"
    operands: ClassVar = {"input": (4,), "filters": (4,)}
    differentiable = ("input", "filters")


class PadConv2DBiasAct(Conv2DBiasAct):
    """act(bias_add(conv2d(pad(input, paddings), filters), bias))."""

    family = "pad_conv2d_bias"
    captured: ClassVar = {"Conv2D": Conv2DBiasAct.captured["Conv2D"] | {"padding": b"VALID"}}

    def default_attrs(self):
        return super().default_attrs() | {"paddings": [[0, 0]] * 4}

    def variants(self, view, anchor):
        return super().variants(view, anchor) if anchor.inputs[0].op.type == "Pad" else ()

    def parameters(self, attrs):
        return {"paddings": (2, tf.int32)}

    def scalable(self, attrs, shapes):
        return False

    def linear(self, attrs, input, filters, bias=None):
        padded = tf.raw_ops.Pad(input=input, paddings=attrs["paddings"])
        return super().linear(attrs, padded, filters, bias)

    def check(self, match):
        channel = 1 if match.attrs["data_format"] == b"NCHW" else 3
        paddings = match.attrs["paddings"]
        if match.attrs["padding"] != b"VALID":
            return f"a padded convolution that pads again: {match.attrs['padding'].decode()}"
        if any(paddings[0] + paddings[channel]) or min(map(min, paddings)) < 0:
            return f"paddings {paddings} are not those of a convolution"
        return super().check(match)

    def _attrs(self, match):
        amounts = [amount for pair in match.attrs["paddings"] for amount in pair]
        return super()._attrs(match) | {"padding": "EXPLICIT", "explicit_paddings": amounts}


class Conv1DBiasAct(Conv2DBiasAct):
    """act(bias_add(conv1d(input, filters), bias)): conv2d between expand_dims and squeeze."""

    family = "conv1d_bias"
    operands: ClassVar = {"input": (3,), "filters": (3,), "bias": (1,)}

    def variants(self, view, anchor):
        if anchor.inputs[0].op.type == anchor.inputs[1].op.type == "ExpandDims":
            yield from super().variants(view, anchor)

    def product(self, view, anchor):
        squeezes = (op for op in view.users(anchor.outputs[0]) if op.type == "Squeeze")
        return next((op.outputs[0] for op in squeezes), anchor.outputs[0])

    def scalable(self, attrs, shapes):
        return False

    def linear(self, attrs, input, filters, bias=None):
        # As tf.nn.conv1d does it.
        axis = _height(attrs) - 4
        wide = tf.expand_dims(input, axis), tf.expand_dims(filters, 0)
        z = tf.squeeze(Conv2DBiasAct.linear(self, attrs, *wide), [axis])
        return self.add_bias(attrs, z, bias)

    def widen(self, match, tensor):
        return tf.expand_dims(tensor, _height(match.attrs))

    def narrow(self, match, tensor):
        return tf.squeeze(tensor, [_height(match.attrs)])

    def narrow_gradient(self, match, name, gradient):
        height = _height(match.attrs)
        axis = {"input": height, "filters": 0, "side_input": height}.get(name)
        return gradient if axis is None else tf.squeeze(gradient, [axis])

    def _factors(self, match):
        return [self.widen(match, match.operands["input"]),
                tf.expand_dims(match.operands["filters"], 0)]  # fmt: skip


def _height(attrs):
    """Returns the axis that tf.nn.conv1d adds."""
    return 2 if attrs["data_format"] == b"NCHW" else 1


class MatMulBiasAct(_ContractionBiasAct):
    """act(bias_add(matmul(a, b), bias))."""

    family = "matmul_bias"
    anchor = "MatMul"
    operands: ClassVar = {"a": (2,), "b": (2,), "bias": (1,)}
    contraction = ("a", "b")
    differentiable = ("a", "b", "bias")
    captured: ClassVar = {"MatMul": {"transpose_a": False, "transpose_b": False}}
    fused_ops = ("TfFusedOps>MatMulBiasAct", "TfFusedOps>MatMulBiasActGrad")

    forward_op = staticmethod(ops.tf_fused_ops_mat_mul_bias_act)
    gradient_op = staticmethod(ops.tf_fused_ops_mat_mul_bias_act_grad)

    def linear(self, attrs, a, b, bias=None):
        z = tf.raw_ops.MatMul(
            a=a, b=b, transpose_a=attrs["transpose_a"], transpose_b=attrs["transpose_b"]
        )
        return self.add_bias(attrs, z, bias)


class BatchMatMulBiasAct(MatMulBiasAct):
    """act(bias_add(matmul(a, b), bias)) with one matrix b for a batch of matrices a."""

    family = "batch_matmul_bias"
    anchor = "BatchMatMulV2"
    operands: ClassVar = {"a": (3, 4, 5, 6), "b": (2,), "bias": (1,)}
    captured: ClassVar = {"BatchMatMulV2": {"adj_x": False, "adj_y": False}}

    def variants(self, view, anchor):
        # What autodiff makes of a batch depends on the ranks.
        ranks = {"a_rank": anchor.inputs[0].shape.rank}
        if ranks["a_rank"] in self.operands["a"] and anchor.inputs[1].shape.rank == 2:
            yield from (attrs | ranks for attrs in super().variants(view, anchor))

    def operand_shape(self, name, attrs):
        if name == "a" or name == "side_input":
            return [None] * attrs["a_rank"]
        return super().operand_shape(name, attrs)

    def linear(self, attrs, a, b, bias=None):
        z = tf.raw_ops.BatchMatMulV2(x=a, y=b, adj_x=attrs["adj_x"], adj_y=attrs["adj_y"])
        return self.add_bias(attrs, z, bias)

    def _attrs(self, match):
        attrs = super()._attrs(match)
        attrs |= {"transpose_a": attrs.pop("adj_x"), "transpose_b": attrs.pop("adj_y")}
        return attrs


class _ReshapedBiasAct(MatMulBiasAct):
    """A product of matrices once its operands are reshaped; the bias may have several dimensions.

    A variant also says the ranks of the operands, on which depends what autodiff makes of the sum.
    """

    captured: ClassVar = {}

    def operand_shape(self, name, attrs):
        return [None] * attrs[f"{name}_rank"]

    def check(self, match):
        b = match.operands["b"]
        if not b.shape.is_fully_defined():
            return f"the shape of {b.name} is not known: {b.shape}"
        return super().check(match)

    @abc.abstractmethod
    def channels(self, match):
        """Returns the dimensions that b adds."""

    @abc.abstractmethod
    def shape(self, match):
        """Returns the shape of the result for `tf.reshape`."""

    def widen(self, match, tensor):
        return tf.reshape(tensor, [-1, self.channels(match).num_elements()])

    def flat_bias(self, bias):
        return tf.reshape(bias, [-1])

    def narrow(self, match, tensor):
        return tf.reshape(tensor, self.shape(match))

    def narrow_gradient(self, match, name, gradient):
        return tf.reshape(gradient, _sizes(match.operands[name]))

    def _factors(self, match):
        b, columns = match.operands["b"], self.channels(match).num_elements()
        rows = b.shape.num_elements() // max(columns, 1)
        return [tf.reshape(match.operands["a"], [-1, rows]), tf.reshape(b, [rows, columns])]


class EinsumBiasAct(_ReshapedBiasAct):
    """act(einsum("…K,KN->…N", a, b) + bias); K and N are one or more dimensions each."""

    family = "einsum_bias"
    anchor = "Einsum"
    operands: ClassVar = {"a": (2, 3, 4, 5, 6), "b": (2, 3, 4), "bias": (1, 2, 3)}
    keyed = ("equation",)

    def default_attrs(self):
        return super().default_attrs() | {"equation": b"abc,cd->abd"}

    def variants(self, view, anchor):
        if _contracted(anchor.get_attr("equation")):
            tensors = (anchor.inputs[0], anchor.inputs[1])
            ranks = {f"{k}_rank": t.shape.rank for k, t in zip("ab", tensors, strict=True)}
            ranks["bias_rank"] = self.bias_rank(anchor)
            yield from (attrs | ranks for attrs in super().variants(view, anchor))

    def bias_rank(self, anchor):
        return anchor.inputs[1].shape.rank - _contracted(anchor.get_attr("equation"))

    def linear(self, attrs, a, b, bias=None):
        equation = attrs["equation"]
        return self.add_bias(attrs, tf.raw_ops.Einsum(inputs=[a, b], equation=equation), bias)

    def channels(self, match):
        return match.operands["b"].shape[_contracted(match.attrs["equation"]) :]

    def shape(self, match):
        sizes = _sizes(match.operands["a"])[: -_contracted(match.attrs["equation"])]
        channels = self.channels(match).as_list()
        return sizes + channels if isinstance(sizes, list) else tf.concat([sizes, channels], 0)


class HeadsBiasAct(_ReshapedBiasAct):
    """act(reshape(matmul(a, b), shape) + bias), as Keras spells an einsum onto several heads."""

    family = "heads_bias"
    anchor = "BatchMatMulV2"
    operands: ClassVar = {"a": (3, 4, 5, 6), "b": (2,), "bias": (2,)}

    def default_attrs(self):
        return super().default_attrs() | {"bias_op": "AddV2", "shape": [-1, 1, 1]}

    def variants(self, view, anchor):
        ranks = {"a_rank": anchor.inputs[0].shape.rank, "b_rank": 2, "bias_rank": 2}
        if anchor.inputs[1].shape.rank == 2:
            yield from (attrs | ranks for attrs in super().variants(view, anchor))

    def parameters(self, attrs):
        return {"shape": (1, tf.int32)}

    def bias_rank(self, anchor):
        return 2

    def product(self, view, anchor):
        return _reshaped(view, anchor)

    def linear(self, attrs, a, b, bias=None):
        z = tf.reshape(tf.raw_ops.BatchMatMulV2(x=a, y=b), attrs["shape"])
        return self.add_bias(attrs, z, bias)

    def check(self, match):
        columns = match.operands["b"].shape[-1]
        if math.prod(match.attrs["shape"][-2:]) != columns:
            return f"reshaping to {match.attrs['shape']} mixes the {columns} columns with the rows"
        return super().check(match)

    def channels(self, match):
        return tf.TensorShape(match.attrs["shape"][-2:])

    def shape(self, match):
        return match.attrs["shape"]


def _contracted(equation):
    """Returns over how many dimensions an einsum "…K,KN->…N" sums; 0 for other ones."""
    operands, _, result = equation.decode().partition("->")
    a, _, b = operands.partition(",")
    for count in range(1, min(len(a), len(b))):
        letters = a[:-count] + b
        if (
            a[-count:] == b[:count]
            and result == a[:-count] + b[count:]
            and len(set(letters)) == len(letters)
            and letters.isalpha()
        ):
            return count
    return 0


def _reshaped(view, anchor):
    """Returns the product as its consumers see it: reshaped, if it is."""
    reshapes = (op for op in view.users(anchor.outputs[0]) if op.type == "Reshape")
    return next((op.outputs[0] for op in reshapes), anchor.outputs[0])


class _AddAct(AddSideInput):
    """act(chain + side_input)."""

    def scalable(self, attrs, shapes):
        return False

    def stock(self, attrs, side_input, **operands):
        z = self.add(attrs, self.linear(attrs, **operands), side_input)
        return {"y": self.activate(z, attrs)}

    def check(self, match):
        total = self._linear_end(match).outputs[0]
        return self.check_side_input(match, total) or super().check(match)


class Conv2DAddAct(_AddAct, Conv2DAct):
    """act(conv2d(input, filters) + side_input)."""

    family = "conv2d_add"
    operands: ClassVar = Conv2DAct.operands | {"side_input": (4,)}
    differentiable = (*Conv2DAct.differentiable, "side_input")


class Conv1DBiasAddAct(_AddAct, Conv1DBiasAct):
    """act(bias_add(conv1d(input, filters), bias) + side_input)."""

    family = "conv1d_bias_add"
    operands: ClassVar = Conv1DBiasAct.operands | {"side_input": (3,)}
    differentiable = (*Conv1DBiasAct.differentiable, "side_input")


class Conv2DBiasAddAct(_AddAct, Conv2DBiasAct):
    """act(bias_add(conv2d(input, filters), bias) + side_input)."""

    family = "conv2d_bias_add"
    operands: ClassVar = Conv2DBiasAct.operands | {"side_input": (4,)}
    differentiable = (*Conv2DBiasAct.differentiable, "side_input")


class MatMulBiasAddAct(_AddAct, MatMulBiasAct):
    """act(bias_add(matmul(a, b), bias) + side_input)."""

    family = "matmul_bias_add"
    operands: ClassVar = MatMulBiasAct.operands | {"side_input": (2,)}
    differentiable = (*MatMulBiasAct.differentiable, "side_input")


class DenseBiasAct(MatMulBiasAct):
    """act(bias_add(tensordot(a, b), bias)): a dense layer on rank > 2.

    Variants, by attribute:
        a_shape, b_shape: The static shapes; what tensordot emits depends on them.
    """

    family = "dense_bias"
    operands: ClassVar = {"a": (3, 4, 5, 6), "b": (2,), "bias": (1,)}
    captured: ClassVar = {}

    def scalable(self, attrs, shapes):
        return True

    def variants(self, view, anchor):
        flat, b = anchor.inputs
        if flat.op.type != "Reshape" or b.shape.rank != 2:
            return
        a = flat.op.inputs[0]
        if a.op.type == "Transpose":
            a = a.op.inputs[0]
        if a.shape.rank in self.operands["a"] and a.shape[-1:].is_compatible_with(b.shape[:1]):
            known = {"a_shape": a.shape.as_list(), "b_shape": b.shape.as_list()}
            yield from (attrs | known for attrs in super().variants(view, anchor))

    def product(self, view, anchor):
        return _reshaped(view, anchor)

    def operand_shape(self, name, attrs):
        return attrs.get(f"{name}_shape", super().operand_shape(name, attrs))

    def scale(self, attrs, sizes):
        scaled = {
            name: [sizes.get(size, size) for size in attrs[name]] for name in ("a_shape", "b_shape")
        }
        return attrs | scaled

    def linear(self, attrs, a, b, bias=None):
        return self.add_bias(attrs, tf.tensordot(a, b, 1), bias)


class DenseBiasAddAct(_AddAct, DenseBiasAct):
    """act(bias_add(tensordot(a, b), bias) + side_input)."""

    scalable = DenseBiasAct.scalable

    family = "dense_bias_add"
    operands: ClassVar = DenseBiasAct.operands | {"side_input": (3, 4, 5, 6)}
    differentiable = (*DenseBiasAct.differentiable, "side_input")

    def operand_shape(self, name, attrs):
        if name == "side_input":
            return [*attrs["a_shape"][:-1], attrs["b_shape"][1]]
        return super().operand_shape(name, attrs)

    def check(self, match):
        a, b, side = (match.operands[name] for name in ("a", "b", "side_input"))
        rank = a.shape.rank
        sizes = [*(shapes.dimension(a, axis) for axis in range(rank - 1)), b.shape[1]]
        if side.shape.rank != rank or sizes != [shapes.dimension(side, i) for i in range(rank)]:
            return f"{side.name} of shape {side.shape} may broadcast to the product with {a.name}"
        return DenseBiasAct.check(self, match)


def _bias_ops(view, product, rank):
    """Yields the types of the ops that may add a bias of a rank to a tensor."""
    for op, port in view.consumers(product):
        is_sum = op.type in _SUMS and op.inputs[1 - port].shape.rank == rank
        if is_sum or (op.type == "BiasAdd" and rank == 1):
            yield op.type


def _sizes(tensor):
    """Returns the shape of a tensor for `tf.reshape`, which is left one unknown size to find."""
    sizes = tensor.shape.as_list()
    if sizes.count(None) > 1:
        return tf.shape(tensor)
    return [-1 if size is None else size for size in sizes]
