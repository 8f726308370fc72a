"""Rules for convolutions and matrix products with bias, side input and activation."""

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
            for bias_op in dict.fromkeys(_bias_ops(view, self.product(view, anchor))):
                yield attrs | {"bias_op": bias_op}

    def product(self, view, anchor):
        """Returns the tensor to which the bias is added."""
        return anchor.outputs[0]

    def add_bias(self, attrs, z, bias):
        """The stock addition of the bias."""
        if attrs["bias_op"] == "BiasAdd":
            data_format = attrs.get("data_format", "NHWC")
            return tf.raw_ops.BiasAdd(value=z, bias=bias, data_format=data_format)
        operands = [bias, z] if attrs["bias_first"] else [z, bias]
        return getattr(tf.raw_ops, attrs["bias_op"])(x=operands[0], y=operands[1])

    def observed(self, nodes, operands, attrs):
        sums = (op for op in nodes if op.type in _SUMS)
        first = any(op.inputs[0] is operands["bias"] for op in sums)
        return super().observed(nodes, operands, attrs) | {"bias_first": first}

    def check(self, match):
        if match.attrs["bias_op"] == "BiasAdd":
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
            bias=[match.operands["bias"]],
            side_input=self._side(match),
            save_pre_activation=save,
            name=match.fused_name(),
            **self._attrs(match),
        )
        saved = ()
        if self.activation.name != "none":
            saved = (fused.pre_activation if save else fused.y,)
        return Fused({"y": fused.y}, saved)

    def fuse_gradient(self, match, fused, dy, wanted):
        a, b = self.contraction
        gradients = self.gradient_op(
            dy,
            *self._factors(match),
            saved=list(fused.saved),
            bias_gradient="bias" in wanted,
            side_input_gradient="side_input" in wanted,
            name=match.fused_name("_grad"),
            **{f"{a}_gradient": a in wanted, f"{b}_gradient": b in wanted},
            **self._attrs(match),
        )
        named = zip((a, b, "bias", "side_input"), gradients, strict=True)
        return {name: gradient for name, gradient in named if name in wanted}

    def describe(self, match):
        activation = f"activation={match.outputs['y'].op.name} " if self.activation.label else ""
        parts = ["BiasAdd", *["Add"] * len(self._side(match)), self.activation.label]
        what = f"{self.anchor} with " + " and ".join(filter(None, parts))
        bias_add, contraction = self._sum(match).name, match.node(self.anchor).name
        return what, f"{activation or ' '}bias_add={bias_add} contraction={contraction}"

    def _sum(self, match):
        return match.node(match.attrs["bias_op"])

    def _factors(self, match):
        return [match.operands[name] for name in self.contraction]

    def _side(self, match):
        return [match.operands[name] for name in ("side_input",) if name in match.operands]

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

    forward_op = staticmethod(ops.tf_fused_ops_conv2d_bias_act)
    gradient_op = staticmethod(ops.tf_fused_ops_conv2d_bias_act_grad)

    def stock(self, attrs, input, filters, bias):
        return {"y": self.activate(self.linear(attrs, input, filters, bias), attrs)}

    def linear(self, attrs, input, filters, bias):
        """The chain up to the bias."""
        conv = {name: attrs[name] for name in Conv2DBiasAct.captured["Conv2D"]}
        z = tf.raw_ops.Conv2D(input=input, filter=filters, **conv)
        return self.add_bias(attrs, z, bias)

    def check(self, match):
        channels = match.operands["input"].shape[1 if match.attrs["data_format"] == b"NCHW" else 3]
        if channels != match.operands["filters"].shape[2]:
            return (
                f"a grouped convolution, or its channels are not known: {channels} in the input, "
                f"{match.operands['filters'].shape[2]} in the filters"
            )
        return super().check(match)


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

    def stock(self, attrs, a, b, bias):
        return {"y": self.activate(self.linear(attrs, a, b, bias), attrs)}

    def linear(self, attrs, a, b, bias):
        """The chain up to the bias."""
        z = tf.raw_ops.MatMul(
            a=a, b=b, transpose_a=attrs["transpose_a"], transpose_b=attrs["transpose_b"]
        )
        return self.add_bias(attrs, z, bias)


class _AddAct(AddSideInput):
    """act(chain + side_input)."""

    def stock(self, attrs, side_input, **operands):
        z = self.add(attrs, self.linear(attrs, **operands), side_input)
        return {"y": self.activate(z, attrs)}

    def check(self, match):
        total = self._sum(match).outputs[0]
        return self.check_side_input(match, total) or super().check(match)


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

    def linear(self, attrs, a, b, bias):
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
