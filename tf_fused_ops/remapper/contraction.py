"""Rules for convolutions and matrix products with bias, side input and activation."""

import abc
import functools
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
            for bias_op in dict.fromkeys(_bias_ops(view, self.product(view, anchor))):
                yield attrs | {"bias_op": bias_op}

    def product(self, view, anchor):
        """Returns the tensor to which the bias is added."""
        return anchor.outputs[0]

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
        if bias.shape[0] is None or bias.shape[0] != product.shape[-1]:
            return f"{bias.name} of shape {bias.shape} may not be a bias of {product.name}"
        return None

    def fuse(self, match, training):
        save = training and self.activation.needs_pre_activation(match.attrs)
        fused = self.forward_op(
            *self._factors(match),
            bias=self._optional(match, "bias"),
            side_input=list(map(self.widen, self._optional(match, "side_input"))),
            save_pre_activation=save,
            name=match.fused_name(),
            **self._attrs(match),
        )
        saved = ()
        if self.activation.name != "none":
            saved = (fused.pre_activation if save else fused.y,)
        return Fused({"y": self.narrow(fused.y)}, saved)

    def fuse_gradient(self, match, fused, dy, wanted):
        a, b = self.contraction
        gradients = self.gradient_op(
            self.widen(dy),
            *self._factors(match),
            saved=list(fused.saved),
            bias_gradient="bias" in wanted,
            side_input_gradient="side_input" in wanted,
            name=match.fused_name("_grad"),
            **{f"{a}_gradient": a in wanted, f"{b}_gradient": b in wanted},
            **self._attrs(match),
        )
        named = zip((a, b, "bias", "side_input"), gradients, strict=True)
        return {name: self.narrow_gradient(name, g) for name, g in named if name in wanted}

    def widen(self, tensor):
        """Gives a tensor of the output's shape the rank that the fused op takes."""
        return tensor

    def narrow(self, tensor):
        """Undoes `widen`."""
        return tensor

    def narrow_gradient(self, name, gradient):
        """Gives the gradient of an operand the operand's rank."""
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

    def check(self, match):
        channels = match.operands["input"].shape[1 if match.attrs["data_format"] == b"NCHW" else -1]
        filters = match.operands["filters"].shape
        if channels is None or channels != filters[-2]:
            return (
                f"a grouped convolution, or its channels are not known: {channels} in the input, "
                f"{filters[-2]} in the filters"
            )
        return super().check(match)


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

    def linear(self, attrs, input, filters, bias=None):
        # As tf.nn.conv1d does it.
        axis = _height(attrs)
        wide = tf.expand_dims(input, axis), tf.expand_dims(filters, 0)
        z = tf.squeeze(Conv2DBiasAct.linear(self, attrs, *wide), [axis])
        return self.add_bias(attrs, z, bias)

    def check(self, match):
        if match.attrs["data_format"] == b"NCHW":
            return "channels first are not supported in one dimension"
        return super().check(match)

    def widen(self, tensor):
        return tf.expand_dims(tensor, 1)

    def narrow(self, tensor):
        return tf.squeeze(tensor, [1])

    def narrow_gradient(self, name, gradient):
        axis = {"input": 1, "filters": 0, "side_input": 1}.get(name)
        return gradient if axis is None else tf.squeeze(gradient, [axis])

    def _factors(self, match):
        return [tf.expand_dims(match.operands["input"], 1),
                tf.expand_dims(match.operands["filters"], 0)]  # fmt: skip


def _height(attrs):
    """Returns where tf.nn.conv1d puts the dimension of size 1."""
    return -2 if attrs["data_format"] == b"NCHW" else -3


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


class EinsumBiasAct(BatchMatMulBiasAct):
    """act(bias_add(einsum("…k,kn->…n", a, b), bias))."""

    family = "einsum_bias"
    anchor = "Einsum"
    captured: ClassVar = {"Einsum": {"equation": b"abc,cd->abd"}}
    keyed = ("equation",)

    def variants(self, view, anchor):
        if len(anchor.inputs) == 2 and _is_dense(anchor.get_attr("equation").decode()):
            yield from super().variants(view, anchor)

    def linear(self, attrs, a, b, bias=None):
        equation = attrs["equation"]
        return self.add_bias(attrs, tf.raw_ops.Einsum(inputs=[a, b], equation=equation), bias)

    def _attrs(self, match):
        return {"activation": self.activation.name} | (
            {"alpha": match.attrs["alpha"]} if "alpha" in match.attrs else {}
        )


def _is_dense(equation):
    """Returns whether an einsum multiplies the last dimension by a matrix."""
    operands, _, result = equation.partition("->")
    a, _, b = operands.partition(",")
    letters = a[:-1] + b
    return (
        len(b) == 2
        and (a[-1:], a[:-1] + b[1]) == (b[0], result)
        and len(set(letters)) == len(letters)
        and letters.isalpha()
    )


class _AddAct(AddSideInput):
    """act(chain + side_input)."""

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
    scalable = True

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
        reshapes = (op for op in view.users(anchor.outputs[0]) if op.type == "Reshape")
        return next((op.outputs[0] for op in reshapes), anchor.outputs[0])

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


def _bias_ops(view, product):
    """Yields the types of the ops that may add a bias to a tensor."""
    for op, port in view.consumers(product):
        if op.type == "BiasAdd" or (op.type in _SUMS and op.inputs[1 - port].shape.rank == 1):
            yield op.type
