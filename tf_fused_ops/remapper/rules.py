"""The table of rules.

A rule states in one place the stock TensorFlow code it stands for, when it is legal, and the fused
call. Everything else follows from that: the pattern of the forward pass, and the pattern that
autodiff makes of forward and backward, are traced from `stock`.
"""

import abc
import dataclasses
from typing import ClassVar

import tensorflow as tf

from tf_fused_ops._library import ops
from tf_fused_ops.remapper import shapes, spellings


@dataclasses.dataclass(frozen=True)
class Match:
    """A place in a graph that a rule fits.

    Attributes:
        nodes: The matched ops, inputs first.
        operands: Operand name -> tensor.
        outputs: Output name -> tensor.
        attrs: Captured attribute name -> value.
    """

    nodes: tuple
    operands: dict
    outputs: dict
    attrs: dict

    def node(self, op_type):
        """Returns the first matched op of a type."""
        return next(op for op in self.nodes if op.type == op_type)


@dataclasses.dataclass(frozen=True)
class Fused:
    """A fused forward op: outputs by the match's names, what the gradient op reads."""

    outputs: dict
    saved: tuple = ()


class Rule(abc.ABC):
    """One chain of stock ops with one spelling of one activation.

    Attributes:
        family: First part of the name.
        anchor: The op type at which matching begins.
        operands: Operand name -> rank.
        differentiable: Operands that may have a gradient.
        captured: {op type: {attribute: default}}: attributes that a match may have any value of.
        keyed: Attributes among them that other nodes of the chain depend on: one pattern per value.
        fused_ops: The op types that are emitted: forward, gradient.
    """

    family: str
    anchor: str
    operands: ClassVar[dict]
    differentiable: tuple
    captured: ClassVar[dict]
    keyed: tuple = ()
    fused_ops: tuple

    def __init__(self, activation, spelling):
        self.activation = activation
        self.spelling = spelling
        self.captured = type(self).captured | activation.captured
        self.name = f"{self.family}_{activation.name}" if activation.label else self.family

    def activate(self, x, attrs):
        """Applies the activation's stock spelling."""
        names = [name for group in self.activation.captured.values() for name in group]
        return self.spelling(x, **{name: attrs[name] for name in names})

    def default_attrs(self):
        """Returns the captured attributes with their defaults, by name."""
        return {name: value for group in self.captured.values() for name, value in group.items()}

    @abc.abstractmethod
    def stock(self, attrs, **operands):
        """The stock code, as a dict of the outputs that code outside may use."""

    def operand_dtype(self, name, dtype):
        """Returns an operand's dtype, given that of the anchor's output."""
        return dtype

    def check(self, match):
        """Returns why the fused call would not be equivalent, in words, or None."""
        return None

    @abc.abstractmethod
    def fuse(self, match, training):
        """Emits the fused forward op; `training` says that a gradient op follows."""

    @abc.abstractmethod
    def fuse_gradient(self, match, fused, dy, wanted):
        """Emits the fused gradient op and returns {operand: gradient} for the wanted operands."""

    @abc.abstractmethod
    def describe(self, match):
        """Returns (what is fused, which nodes) as grappler's remapper words it."""


class _ContractionBiasAct(Rule):
    """act(bias_add(contraction, bias))."""

    contraction: tuple

    def fuse(self, match, training):
        save = training and self.activation.needs_pre_activation(match.attrs)
        bias = match.operands["bias"]
        fused = self.forward_op(
            *self._factors(match),
            bias=[bias],
            side_input=[],
            save_pre_activation=save,
            name=_fused_name(match),
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
            side_input_gradient=False,
            name=_fused_name(match, "_grad"),
            **{f"{a}_gradient": a in wanted, f"{b}_gradient": b in wanted},
            **self._attrs(match),
        )
        named = zip((a, b, "bias", "side_input"), gradients, strict=True)
        return {name: gradient for name, gradient in named if name in wanted}

    def describe(self, match):
        activation = f"activation={match.outputs['y'].op.name} " if self.activation.label else ""
        what = f"{self.anchor} with BiasAdd" + (
            f" and {self.activation.label}" if activation else ""
        )
        bias_add, contraction = match.node("BiasAdd").name, match.node(self.anchor).name
        return what, f"{activation or ' '}bias_add={bias_add} contraction={contraction}"

    def _factors(self, match):
        return [match.operands[name] for name in self.contraction]

    def _attrs(self, match):
        return {**match.attrs, "activation": self.activation.name}


class Conv2DBiasAct(_ContractionBiasAct):
    """act(bias_add(conv2d(input, filters), bias))."""

    family = "conv2d_bias"
    anchor = "Conv2D"
    operands: ClassVar = {"input": 4, "filters": 4, "bias": 1}
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
        conv = {name: attrs[name] for name in self.captured["Conv2D"]}
        z = tf.raw_ops.Conv2D(input=input, filter=filters, **conv)
        z = tf.raw_ops.BiasAdd(value=z, bias=bias, data_format=attrs["data_format"])
        return {"y": self.activate(z, attrs)}

    def check(self, match):
        channels = match.operands["input"].shape[1 if match.attrs["data_format"] == b"NCHW" else 3]
        if channels != match.operands["filters"].shape[2]:
            return (
                f"a grouped convolution, or its channels are not known: {channels} in the input, "
                f"{match.operands['filters'].shape[2]} in the filters"
            )
        return None


class MatMulBiasAct(_ContractionBiasAct):
    """act(bias_add(matmul(a, b), bias))."""

    family = "matmul_bias"
    anchor = "MatMul"
    operands: ClassVar = {"a": 2, "b": 2, "bias": 1}
    contraction = ("a", "b")
    differentiable = ("a", "b", "bias")
    captured: ClassVar = {"MatMul": {"transpose_a": False, "transpose_b": False}}
    fused_ops = ("TfFusedOps>MatMulBiasAct", "TfFusedOps>MatMulBiasActGrad")

    forward_op = staticmethod(ops.tf_fused_ops_mat_mul_bias_act)
    gradient_op = staticmethod(ops.tf_fused_ops_mat_mul_bias_act_grad)

    def stock(self, attrs, a, b, bias):
        z = tf.raw_ops.MatMul(
            a=a, b=b, transpose_a=attrs["transpose_a"], transpose_b=attrs["transpose_b"]
        )
        return {"y": self.activate(tf.raw_ops.BiasAdd(value=z, bias=bias), attrs)}


class BatchNormAct(Rule):
    """act(fused_batch_norm(x))."""

    family = "batch_norm"
    anchor = "FusedBatchNormV3"
    operands: ClassVar = {"x": 4, "scale": 1, "offset": 1, "mean": 1, "variance": 1}
    differentiable = ("x", "scale", "offset")
    captured: ClassVar = {
        "FusedBatchNormV3": {
            "epsilon": 1e-3,
            "exponential_avg_factor": 1.0,
            "data_format": b"NHWC",
            "is_training": True,
        }
    }
    fused_ops = ("TfFusedOps>BatchNormAct", "TfFusedOps>BatchNormActGrad")

    def operand_dtype(self, name, dtype):
        # The statistics of a half precision batch norm are float32.
        return dtype if name in ("x", "side_input") else tf.float32

    def stock(self, attrs, x, scale, offset, mean, variance):
        names = self.captured["FusedBatchNormV3"]
        y, new_mean, new_variance, *_ = tf.raw_ops.FusedBatchNormV3(
            x=x,
            scale=scale,
            offset=offset,
            mean=mean,
            variance=variance,
            **{name: attrs[name] for name in names},
        )
        outputs = {"new_mean": new_mean, "new_variance": new_variance}
        return {"y": self.activate(y, attrs), **outputs}

    def check(self, match):
        data_format = match.attrs["data_format"]
        if data_format not in (b"NHWC", b"NCHW"):
            return f"data format {data_format.decode()} is not supported"
        return None

    def fuse(self, match, training):
        attrs, operands = match.attrs, match.operands
        mean, variance = operands["mean"], operands["variance"]
        if attrs["is_training"] and attrs["exponential_avg_factor"] == 1.0:
            # Stock then ignores the moving statistics, which may be empty.
            mean = variance = tf.zeros_like(operands["scale"])
        side = self._side(match)
        save_mask = training and bool(side) and self.activation.name == "relu"
        fused = ops.tf_fused_ops_batch_norm_act(
            operands["x"],
            operands["scale"],
            operands["offset"],
            mean,
            variance,
            side,
            epsilon=attrs["epsilon"],
            momentum=1.0 - attrs["exponential_avg_factor"],
            training=attrs["is_training"],
            unbiased=True,
            save_mask=save_mask,
            name=_fused_name(match),
            **self._shared(match),
        )
        outputs = {"y": fused.y, "new_mean": fused.new_mean, "new_variance": fused.new_variance}
        masks = [fused.mask] if save_mask else []
        return Fused(outputs, (fused.saved_mean, fused.saved_inv_std, masks))

    def fuse_gradient(self, match, fused, dy, wanted):
        operands = match.operands
        mean, inv_std, masks = fused.saved
        side = [] if masks or self.activation.name == "none" else self._side(match)
        gradients = ops.tf_fused_ops_batch_norm_act_grad(
            dy,
            operands["x"],
            operands["scale"],
            operands["offset"],
            mean,
            inv_std,
            side,
            masks,
            training=match.attrs["is_training"],
            side_input_gradient="side_input" in wanted,
            name=_fused_name(match, "_grad"),
            **self._shared(match),
        )
        named = zip(("x", "scale", "offset", "side_input"), gradients, strict=True)
        return {name: gradient for name, gradient in named if name in wanted}

    def describe(self, match):
        side = match.operands.get("side_input")
        invalidated = match.node("AddV2").name if side is not None else "<none>"
        return (
            f"{self.activation.label} with FusedBatchNorm",
            f"activation={match.outputs['y'].op.name} "
            f"side_input={'<none>' if side is None else side.op.name} invalidated={invalidated} "
            f"fused_batch_norm={match.node(self.anchor).name}",
        )

    def _side(self, match):
        return []

    def _shared(self, match):
        shared = {"data_format": match.attrs["data_format"], "activation": self.activation.name}
        return shared | ({"alpha": match.attrs["alpha"]} if "alpha" in match.attrs else {})


class BatchNormAddAct(BatchNormAct):
    """act(fused_batch_norm(x) + side_input)."""

    family = "batch_norm_add"
    operands: ClassVar = BatchNormAct.operands | {"side_input": 4}
    differentiable = (*BatchNormAct.differentiable, "side_input")

    def stock(self, attrs, side_input, **operands):
        normalize = BatchNormAct(spellings.NONE, spellings.NONE.spellings[0])
        outputs = normalize.stock(attrs, **operands)
        return {
            **outputs,
            "y": self.activate(tf.raw_ops.AddV2(x=outputs["y"], y=side_input), attrs),
        }

    def check(self, match):
        x, side = match.operands["x"], match.operands["side_input"]
        if not shapes.same_shape(x, side):
            return f"{side.name} of shape {side.shape} may broadcast to {x.name} of shape {x.shape}"
        return super().check(match)

    def _side(self, match):
        return [match.operands["side_input"]]


def _fused_name(match, suffix=""):
    return f"{match.outputs['y'].op.name}_fused{suffix}"


def _table():
    for activation in spellings.ACTIVATIONS:
        for spelling in activation.spellings:
            yield Conv2DBiasAct(activation, spelling)
            yield MatMulBiasAct(activation, spelling)
            if activation is not spellings.NONE:
                yield BatchNormAct(activation, spelling)
                yield BatchNormAddAct(activation, spelling)


RULES = tuple(_table())
BY_ANCHOR = {
    anchor: [r for r in RULES if r.anchor == anchor] for anchor in {r.anchor: None for r in RULES}
}
