"""The rule for weights of few bits as numbers, for whatever reads them."""

from typing import ClassVar

import tensorflow as tf

from tf_fused_ops._devices import device_type
from tf_fused_ops.remapper import quantized_weights
from tf_fused_ops.remapper.emission import emit
from tf_fused_ops.remapper.rule import LAST, Fused, Rule

_DTYPES = (tf.float16, tf.bfloat16, tf.float32)


class DequantizedWeights(Rule):
    """difference * scales, where integers, less the zeros of their groups, have scales of these.

    What products have not taken themselves. How the operands are made is not part of the chain.

    Variants, by attribute:
        scale_first: Whether the scales are the first factor.
    """

    family = "dequantized_weights"
    anchor = "Mul"
    operands: ClassVar = {"difference": (2,), "scales": (2,)}
    differentiable = ()
    fused_ops = ("TfFusedOps>DequantizedWeights",)
    turn = LAST

    def variants(self, view, anchor):
        if quantized_weights.find_groups(anchor.outputs[0]) is not None:
            yield {"scale_first": anchor.inputs[0].op.type == "GatherV2"}

    def stock(self, attrs, difference, scales):
        factors = (scales, difference) if attrs["scale_first"] else (difference, scales)
        return {"y": tf.multiply(*factors)}

    def check(self, match):
        y = match.outputs["y"]
        device = device_type(y.op.device)
        if device != "CPU":
            return f"weights of few bits are TensorFlow's on {device}"
        return None if y.dtype in _DTYPES else f"{y.name} is of {y.dtype.name}"

    def fuse(self, match, training):
        y = match.outputs["y"]
        weights, transposed = quantized_weights.find_groups(y)
        shape = y.shape.as_list()
        b, scale, zero, group = quantized_weights.inputs(
            weights, shape[::-1] if transposed else shape
        )
        outputs = emit(
            self.fused_ops[0],
            *(b, scale, zero, *group),
            T=y.dtype,
            transpose_b=weights.transposed,
            bits=weights.bits,
            packed_axis=weights.packed_axis or 0,
            name=match.fused_name(),
        )
        swapped = weights.transposed != transposed
        return Fused({"y": tf.transpose(outputs["w"]) if swapped else outputs["w"]})

    def describe(self, match):
        return "weights of few bits", f"numbers={match.outputs['y'].op.name}"
