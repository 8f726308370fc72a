"""The rules for cross entropy of logits, with numbers of classes or a number for each class."""

from typing import ClassVar

import tensorflow as tf

from tf_fused_ops.remapper import shapes
from tf_fused_ops.remapper.emission import emit
from tf_fused_ops.remapper.rule import Fused, Rule


class _CrossEntropy(Rule):
    """An op of TensorFlow's, which computes the gradient along with the loss."""

    differentiable = ("logits",)

    def scalable(self, attrs, shapes):
        return True

    def stock(self, attrs, logits, labels):
        op = getattr(tf.raw_ops, self.anchor)(features=logits, labels=labels)
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


class SparseSoftmaxCrossEntropy(_CrossEntropy):
    """With numbers of classes.

    Variants, by attribute:
        labels_type: The dtype of the labels.
    """

    family = "sparse_cross_entropy"
    anchor = "SparseSoftmaxCrossEntropyWithLogits"
    operands: ClassVar = {"logits": (2,), "labels": (1,)}
    fused_ops = (
        "TfFusedOps>SparseSoftmaxCrossEntropy",
        "TfFusedOps>SparseSoftmaxCrossEntropyGrad",
    )

    def variants(self, view, anchor):
        yield {"labels_type": anchor.inputs[1].dtype}

    def operand_dtype(self, name, dtype, attrs):
        return attrs["labels_type"] if name == "labels" else dtype


class SoftmaxCrossEntropy(_CrossEntropy):
    """With a number for each class. The gradient of those, where it is wanted, stays stock's."""

    family = "cross_entropy"
    anchor = "SoftmaxCrossEntropyWithLogits"
    operands: ClassVar = {"logits": (2,), "labels": (2,)}
    fused_ops = ("TfFusedOps>SoftmaxCrossEntropy", "TfFusedOps>SoftmaxCrossEntropyGrad")
    devices = ("CPU",)

    def check(self, match):
        # A single row stands for all in the fused op, too.
        logits, labels = self._inputs(match)
        if shapes.dimension(logits, 1) == shapes.dimension(labels, 1):
            return None
        return (
            f"{logits.name} of shape {logits.shape} and {labels.name} of shape {labels.shape} may "
            "have other numbers of classes, one of which broadcasts"
        )
