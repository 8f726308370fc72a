"""Rules for a convolution and the batch normalization with given statistics that follows it.

The normalization becomes a scale and a bias of the convolution, two vectors that stock ops compute
anew in every call, since statistics may change between calls. Measured on two cores with AVX2,
beside a fused convolution and a fused batch norm: 0.82 of the time for 1x1 filters, 64 to 256
channels and 16 images of 40x40; 0.94 to 0.98 for later layers; 0.88 to 1.02 for one image, where
the vectors cost what is saved. Taking in the pad, too, needs 0.75 to 0.93 of the time that the
convolution and a stock pad do.
"""

import dataclasses
from typing import ClassVar

import tensorflow as tf

from tf_fused_ops.remapper.batch_norm import BatchNormAct
from tf_fused_ops.remapper.contraction import constant_filters, emit_gradients
from tf_fused_ops.remapper.convolution import Conv2DBiasAct
from tf_fused_ops.remapper.emission import emit
from tf_fused_ops.remapper.lines import Conv1DBiasAct
from tf_fused_ops.remapper.moments import GivenBatchNormAct
from tf_fused_ops.remapper.padded_convs import PadConv1DBiasAct, PadConv2DBiasAct
from tf_fused_ops.remapper.rule import AddSideInput, Fused, Rule

_CONV = Conv2DBiasAct()
_BIAS_OPS = ("BiasAdd", "AddV2", "Add")
_VECTORS = ("scale", "offset", "mean", "variance")
_ATTRIBUTES = {"epsilon": 1e-3, "exponential_avg_factor": 1.0}
_IMAGES = ("input", "filters", "bias", "side_input")


class _ConvBatchNorm(Rule):
    """act(normalization(bias_add(conv2d(pad(input), filters), bias))).

    Variants are those of the normalization, and by attribute:
        padded: Whether there is a pad.
        bias_op: The type of the op that adds the bias, None where there is none.
        data_format: The convolution's.

    Attributes:
        convs: The rules for the convolution, by whether its input is padded by an op of its own.
        last: The type of the op that the bias follows.
    """

    convs: ClassVar = {False: _CONV, True: PadConv2DBiasAct()}
    last = "Conv2D"
    operands: ClassVar = _CONV.operands | dict.fromkeys(_VECTORS, (1,))
    differentiable = (*_CONV.differentiable, "scale", "offset")
    optional = ("padded",)
    fused_ops = _CONV.fused_ops
    normalization: Rule

    def default_attrs(self):
        defaults = self.normalization.default_attrs() | _CONV.default_attrs()
        return defaults | super().default_attrs() | {"padded": False}

    def present(self, attrs):
        names = (*_IMAGES, *self.normalization.present(attrs))
        return tuple(
            name for name in self.operands if name in names and (name != "bias" or attrs["bias_op"])
        )

    def parameters(self, attrs):
        convolution = self.convs[attrs["padded"]]
        return self.normalization.parameters(attrs) | convolution.parameters(attrs)

    def operand_dtype(self, name, dtype, attrs):
        name = "x" if name in _IMAGES else name
        return self.normalization.operand_dtype(name, dtype, attrs)

    def stock(self, attrs, **operands):
        return {"y": self.activate(self.normalized(attrs, **operands), attrs)}

    def normalized(self, attrs, input, filters, bias=None, **vectors):
        """The stock chain up to the normalization."""
        x = self.convolved(attrs, input, filters, bias)
        return self.normalization.normalize(attrs, x=x, **vectors)["y"]

    def convolved(self, attrs, input, filters, bias):
        """The stock chain up to the bias."""
        return self.convs[attrs["padded"]].linear(attrs, input, filters, bias)

    def observed(self, nodes, operands, attrs):
        return super().observed(nodes, operands, attrs) | _CONV.observed(nodes, operands, attrs)

    def check(self, match):
        normalization = self._normalization(match)
        return self.conv(match).check(match) or self.normalization.check_channels(normalization)

    def fuse(self, match, training):
        vectors, attrs = self.normalization.arguments(self._normalization(match))
        scale, offset, mean, variance = vectors
        save = training and self.activation.needs_pre_activation(match.attrs)
        with tf.name_scope(match.fused_name("_vectors")):
            inv_std = tf.math.rsqrt(variance + attrs["epsilon"])
            scale = scale * inv_std
            shift = -mean
            if "bias" in match.operands:
                shift = tf.cast(match.operands["bias"], mean.dtype) - mean
            dtype = match.operands["input"].dtype
            factors, bias = (tf.cast(v, dtype) for v in (scale, offset + shift * scale))
        conv = self.conv(match)
        side_inputs = [match.operands[name] for name in ("side_input",) if name in match.operands]
        fused = emit(
            self.fused_ops[0],
            *conv.factors(match),
            [bias],
            [conv.widen(match, tensor) for tensor in side_inputs],
            [factors],
            save_pre_activation=save,
            name=match.fused_name(),
            **constant_filters(match, "filters"),
            **self._attrs(match),
        )
        saved = [fused["pre_activation"] if save else fused["y"]]
        return Fused({"y": conv.narrow(match, fused["y"])}, (factors, shift, inv_std, saved))

    def fuse_gradient(self, match, fused, dy, wanted):
        factors, shift, inv_std, saved = fused.saved
        conv = self.conv(match)
        input, filters = conv.factors(match)
        # The convolution with scaled filters has the same gradients.
        found = emit_gradients(
            self.fused_ops[1],
            conv.widen(match, dy),
            input,
            filters * factors,
            [] if self.activation.name == "none" else saved,
            switches={
                "input": "input" in wanted,
                "filters": not wanted.keys().isdisjoint(["filters", "scale"]),
                "bias": not wanted.keys().isdisjoint(["bias", "offset", "scale"]),
                "side_input": "side_input" in wanted,
            },
            wanted=wanted,
            device=match.nodes[0].device,
            name=match.fused_name("_grad"),
            **self._attrs(match),
        )
        names = ("input", "filters", "bias", "side_input")
        dinput, dscaled, dbias, dside = map(found.get, names)
        wide = inv_std.dtype
        gradients = {
            "input": lambda: dinput,
            "filters": lambda: dscaled * factors,
            "bias": lambda: dbias * factors,
            "offset": lambda: tf.cast(dbias, wide),
            "scale": lambda: inv_std * (
                tf.reduce_sum(tf.cast(dscaled, wide) * tf.cast(filters, wide), [0, 1, 2])
                + tf.cast(dbias, wide) * shift
            ),
            "side_input": lambda: dside,
        }  # fmt: skip
        return {name: conv.narrow_gradient(match, name, gradients[name]()) for name in wanted}

    def _attrs(self, match):
        names = (name for group in self.activation.captured.values() for name in group)
        attrs = {name: match.attrs[name] for name in names} | {"activation": self.activation.name}
        return self.conv(match).attributes(match) | attrs

    def describe(self, match):
        parts = [
            *["BiasAdd"] * ("bias" in match.operands),
            "BatchNorm",
            *["Add"] * ("side_input" in match.operands),
            self.activation.label,
        ]
        activation = f"activation={match.outputs['y'].op.name} " if self.activation.label else ""
        return (
            "Conv2D with " + " and ".join(filter(None, parts)),
            f"{activation}batch_norm={match.node(self.anchor).name} "
            f"contraction={match.node('Conv2D').name}",
        )

    def convolutions(self, view, tensor):
        """Yields the attributes of the variants whose convolution may have made a tensor."""
        op = tensor.op.inputs[0].op if tensor.op.type == "Cast" else tensor.op
        bias_op, last = None, op
        if op.type in _BIAS_OPS:
            (rank,) = self.operands["input"]
            products = [t.op for t in op.inputs if t.shape.rank == rank]
            bias_op, last = op.type, products[0] if len(products) == 1 else op
        if last.type == self.last:
            conv = last if self.last == "Conv2D" else last.inputs[0].op
            if conv.type == "Conv2D":
                form = {"bias_op": bias_op, "data_format": view.attr(conv, "data_format")}
                is_padded = self.convs[True].padded(conv).op.type == "Pad"
                for padded in (True, False) if is_padded else (False,):
                    yield form | {"padded": padded}

    def conv(self, match):
        """Returns the rule for the convolution alone."""
        return self.convs[match.attrs["padded"]]

    def product(self, match):
        """Returns the output of the convolution with its bias."""
        return match.node(match.attrs["bias_op"] or self.last).outputs[0]

    def _normalization(self, match):
        """Returns the match of the normalization alone."""
        return dataclasses.replace(match, operands=match.operands | {"x": self.product(match)})


class ConvBatchNormAct(_ConvBatchNorm):
    """act(fused_batch_norm(bias_add(conv2d(input, filters), bias))): inference."""

    family = "conv2d_batch_norm"
    anchor = "FusedBatchNormV3"
    captured: ClassVar = _CONV.captured | {anchor: _ATTRIBUTES}
    normalization = BatchNormAct()

    def default_attrs(self):
        return super().default_attrs() | {"is_training": False}

    def variants(self, view, anchor):
        if not view.attr(anchor, "is_training"):
            for form in self.convolutions(view, anchor.inputs[0]):
                yield form | {"is_training": False}

    def normalized(self, attrs, input, filters, bias=None, **vectors):
        stock = getattr(tf.raw_ops, self.anchor)
        names = (*_ATTRIBUTES, "data_format", "is_training")
        x = self.convolved(attrs, input, filters, bias)
        return stock(x=x, **vectors, **{name: attrs[name] for name in names}).y


class ConvBatchNormV2Act(ConvBatchNormAct):
    """act(fused_batch_norm_v2(bias_add(conv2d(input, filters), bias))): inference."""

    family = "conv2d_batch_norm_v2"
    anchor = "FusedBatchNormV2"
    captured: ClassVar = _CONV.captured | {anchor: _ATTRIBUTES}


class ConvBatchNormV1Act(ConvBatchNormAct):
    """act(fused_batch_norm_v1(bias_add(conv2d(input, filters), bias))): inference."""

    family = "conv2d_batch_norm_v1"
    anchor = "FusedBatchNorm"
    captured: ClassVar = _CONV.captured | {anchor: _ATTRIBUTES}


class ConvGivenBatchNormAct(_ConvBatchNorm):
    """act(batch_normalization(bias_add(conv2d(input, filters), bias), mean, variance))."""

    family = "conv2d_given_batch_norm"
    anchor = "Rsqrt"
    captured: ClassVar = _CONV.captured
    normalization = GivenBatchNormAct()

    def variants(self, view, anchor):
        variants = list(self.normalization.variants(view, anchor))
        if variants:
            forms = [form for x in _factors(view, anchor) for form in self.convolutions(view, x)]
            yield from (attrs | form for attrs in variants for form in forms)

    def check(self, match):
        normalization = self._normalization(match)
        channels = (
            1 if match.attrs["data_format"] == b"NCHW" else self.product(match).shape.rank - 1
        )
        reason = super().check(match)
        if reason is None and self.normalization.axis(normalization) != channels:
            reason = f"the channels of {normalization.operands['x'].name} are not those normalized"
        return reason


class _AddAct(AddSideInput):
    """act(chain + side_input)."""

    def stock(self, attrs, side_input, **operands):
        total = self.add(attrs, self.normalized(attrs, **operands), side_input)
        return {"y": self.activate(total, attrs)}

    def check(self, match):
        return self.check_side_input(match, self.product(match)) or super().check(match)


class ConvBatchNormAddAct(_AddAct, ConvBatchNormAct):
    """act(fused_batch_norm(bias_add(conv2d(input, filters), bias)) + side_input): inference."""

    family = "conv2d_batch_norm_add"
    operands: ClassVar = ConvBatchNormAct.operands | {"side_input": (4,)}
    differentiable = (*ConvBatchNormAct.differentiable, "side_input")


class ConvBatchNormV2AddAct(_AddAct, ConvBatchNormV2Act):
    """act(fused_batch_norm_v2(bias_add(conv2d(input, filters), bias)) + side_input): inference."""

    family = "conv2d_batch_norm_v2_add"
    operands: ClassVar = ConvBatchNormAddAct.operands
    differentiable = ConvBatchNormAddAct.differentiable


class ConvBatchNormV1AddAct(_AddAct, ConvBatchNormV1Act):
    """act(fused_batch_norm_v1(bias_add(conv2d(input, filters), bias)) + side_input): inference."""

    family = "conv2d_batch_norm_v1_add"
    operands: ClassVar = ConvBatchNormAddAct.operands
    differentiable = ConvBatchNormAddAct.differentiable


class ConvGivenBatchNormAddAct(_AddAct, ConvGivenBatchNormAct):
    """act(batch_normalization(bias_add(conv2d(input, filters), bias), ..) + side_input)."""

    family = "conv2d_given_batch_norm_add"
    operands: ClassVar = ConvGivenBatchNormAct.operands | {"side_input": (4,)}
    differentiable = (*ConvGivenBatchNormAct.differentiable, "side_input")


class Conv1DGivenBatchNormAct(ConvGivenBatchNormAct):
    """act(batch_normalization(bias_add(conv1d(input, filters), bias), mean, variance)).

    Measured on two cores with AVX-512 in times of a fused batch norm behind the convolution: a
    residual network of 20 convolutions of 1000 pixels 0.82 for one line and 0.93 for 16, a temporal
    network of 9 convolutions of 512 pixels 0.95 and 1.01; a convolution alone, beside which nothing
    else runs, 0.96 to 1.01 if its vectors are constant and 1.01 to 1.16 if they are not.
    """

    family = "conv1d_given_batch_norm"
    convs: ClassVar = {False: Conv1DBiasAct(), True: PadConv1DBiasAct()}
    last = "Squeeze"
    operands: ClassVar = Conv1DBiasAct.operands | dict.fromkeys(_VECTORS, (1,))


class Conv1DGivenBatchNormAddAct(_AddAct, Conv1DGivenBatchNormAct):
    """act(batch_normalization(bias_add(conv1d(input, filters), bias), ..) + side_input)."""

    family = "conv1d_given_batch_norm_add"
    operands: ClassVar = Conv1DGivenBatchNormAct.operands | {"side_input": (3,)}
    differentiable = (*Conv1DGivenBatchNormAct.differentiable, "side_input")


def _factors(view, rsqrt):
    """Returns what the output of a Rsqrt, or a product of that, is multiplied by."""
    first = [op for op in view.users(rsqrt.outputs[0]) if op.type == "Mul"]
    second = (user for op in first for user in view.users(op.outputs[0]) if user.type == "Mul")
    return [tensor for op in (*first, *second) for tensor in op.inputs]
