"""The rule for attention whose queries have a dimension for the heads that share keys."""

from typing import ClassVar

import tensorflow as tf

from tf_fused_ops.remapper import shapes
from tf_fused_ops.remapper.attention import Attention
from tf_fused_ops.remapper.emission import emit, reshape
from tf_fused_ops.remapper.rule import Fused
from tf_fused_ops.remapper.softmax import Softmax, below_cast, scaled_op

# Groups and heads of a group to the front, and back.
_TO_FRONT, _TO_BACK = [0, 2, 3, 1, 4], [0, 3, 1, 2, 4]
# To what queries, scores, weights and the products with values are reshaped.
_RESHAPES = ("rows", "scores", "weights", "sums")


class GroupedAttention(Attention):
    """softmax(where(mask, einsum("btkgh,bskh->bkgts", query, key) * scale, masked)) times value.

    In inference, with the einsums as Keras makes products of batches of them.

    Variants, by attribute: those of the softmax.
    """

    family = "grouped_attention"
    operands: ClassVar = {"query": (5,), "key": (4,), "value": (4,), "mask": ()}
    differentiable = ()
    optional = Softmax.optional
    unscaled = ()
    captured: ClassVar = {}
    fused_ops = Attention.fused_ops[:1]

    def default_attrs(self):
        return super().default_attrs() | {"heads_first": False}

    def variants(self, view, anchor):
        for attrs in Softmax.variants(self, view, anchor):
            scores = scaled_op(below_cast(anchor.inputs[0].op), attrs)
            if attrs["scaled"]:
                scores = next((t.op for t in scores.inputs if t.op.type == "Reshape"), scores)
            if scores.type == "Reshape" and scores.inputs[0].op.type == "BatchMatMulV2":
                yield attrs

    def present(self, attrs):
        return ("query", "key", "value", *["mask"] * attrs["masked"])

    def parameters(self, attrs):
        shapes_of = dict.fromkeys(_RESHAPES, (1, tf.int32))
        return Softmax.parameters(self, attrs) | shapes_of

    def operand_shape(self, name, attrs):
        return None if name == "mask" else [None] * self.operands[name][0]

    def stock(self, attrs, query, key, value, mask=None):
        rows = tf.reshape(tf.transpose(query, _TO_FRONT), attrs["rows"])
        x = tf.raw_ops.BatchMatMulV2(x=rows, y=tf.transpose(key, [0, 2, 3, 1]))
        weights = Softmax.stock(self, attrs, tf.reshape(x, attrs["scores"]), mask)["y"]
        y = tf.raw_ops.BatchMatMulV2(
            x=tf.reshape(weights, attrs["weights"]), y=tf.transpose(value, [0, 2, 1, 3])
        )
        return {"y": tf.transpose(tf.reshape(y, attrs["sums"]), _TO_BACK)}

    def has_inner_shape(self, match, tensor):
        return False

    def check(self, match):
        attrs, operands = match.attrs, match.operands
        query, key, value = (operands[name] for name in ("query", "key", "value"))
        _, queries, groups, shared, depth = query.shape
        keys, width = key.shape[1], value.shape[3]
        known = key.shape[2:] == [groups, depth] and value.shape[1:3] == [keys, groups]
        if not known or None in (queries, groups, shared, depth, keys, width):
            return f"the sizes of {query.name} and {key.name} are not known to fit"
        rows = [-1, groups, shared * queries]
        apart = [-1, groups, shared, queries]
        expected = ([*rows, depth], [*apart, keys], [*rows, keys], [*apart, width])
        if tuple(list(attrs[name]) for name in _RESHAPES) != expected:
            return f"what {query.name} is reshaped to is not groups of heads"
        batch = [shapes.dimension(tensor, 0) for tensor in (query, key, value)]
        if len(set(batch)) > 1:
            return f"{key.name} of shape {key.shape} may not go with {query.name}"
        mask = operands.get("mask")
        if mask is not None:
            sizes = [batch[0], groups, shared, queries, keys]
            reason = self.broadcast_objection("mask", mask, sizes, f"the scores of {query.name}")
            if reason:
                return reason
            if mask.shape.rank > 2 and mask.shape[-4:-2] not in ([1, 1], [1]):
                return f"mask {mask.name} of shape {mask.shape} is not the same for all heads"
        return self.number_objection(attrs, query)

    def fuse(self, match, training):
        query, attrs = match.operands["query"], match.attrs
        _, queries, groups, shared, depth = query.shape
        key, value, slot = self._keys_and_values(match, training)
        outputs = emit(
            self.fused_ops[0],
            reshape(query, [-1, queries, groups * shared, depth]),
            *(key, value),
            [tf.squeeze(t, [1]) if t.shape.rank == 5 else t for t in self.mask_of(match)],
            *([], [], []),
            U=tf.float64 if query.dtype == tf.float64 else tf.float32,
            scale=self.scale_of(attrs),
            zero_masked=attrs["zeroed"],
            slot=slot,
            name=match.fused_name(),
            **self.masked_of(attrs),
        )
        width = match.operands["value"].shape[3]
        return Fused({"y": reshape(outputs["y"], [-1, queries, groups, shared, width])})

    def describe(self, match):
        query = match.operands["query"].op.name
        return "grouped attention", f"attention={match.fused_name()} query={query}"
