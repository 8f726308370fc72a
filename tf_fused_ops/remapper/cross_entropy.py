"""The rule for cross entropy of logits and numbers of classes."""

from typing import ClassVar

import tensorflow as tf

from tf_fused_ops.remapper.emission import emit
from tf_fused_ops.remapper.rule import Fused, Rule


class SparseSoftmaxCrossEntropy(Rule):
    """TensorFlow's op, which computes the gradient along with the loss.

    Variants, by attribute:
        labels_type: The dtype of the labels.
    """

    family = "sparse_cross_entropy"
    anchor = "SparseSoftmaxCrossEntropyWithLogits"
    operands: ClassVar = {"logits": (2,), "labels": (1,)}
    differentiable = ("logits",)
    fused_ops = (
        "TfFusedOps>SparseSoftmaxCrossEntropy",
        "TfFusedOps>SparseSoftmaxCrossEntropyGrad",
    )

    def variants(self, view, anchor):
        yield {"labels_type": anchor.inputs[1].dtype}

    def operand_dtype(self, name, dtype, attrs):
        return attrs["labels_type"] if name == "labels" else dtype

    def scalable(self, attrs, shapes):
        return True

    def stock(self, attrs, logits, labels):
        op = tf.raw_ops.SparseSoftmaxCrossEntropyWithLogits(features=logits, labels=labels)
        return {"y": op.loss}

    def fuse(self, match, training):
        logits, labels = self._inputs(match)
        outputs = emit(
            self.fused_ops[0],
            logits,
            labels,
            U=tf.float64 if logits.dtype == tf.float64 else tf.float32,
            name=match.fused_name(),
        )
        return Fused({"y": outputs["loss"]}, (outputs["largest"], outputs["inverse_sum"]))

    def fuse_gradient(self, match, fused, dy, wanted):
        outputs = emit(
            self.fused_ops[1],
            dy,
            *self._inputs(match),
            *fused.saved,
            name=match.fused_name("_grad"),
        )
        return {"logits": outputs["logits_grad"]}

    def describe(self, match):
        logits = match.operands["logits"].op.name
        op = match.node(self.anchor)
        return op.type, f"cross_entropy={op.name} logits={logits}"

    def _inputs(self, match):
        return [match.operands[name] for name in ("logits", "labels")]
