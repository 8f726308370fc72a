"""The rule for rows of a table whose integers of 4 bits are packed."""

from typing import ClassVar

import tensorflow as tf
from tensorflow.python.framework import tensor_util

from tf_fused_ops.ops import reference
from tf_fused_ops.remapper import quantized_weights, shapes
from tf_fused_ops.remapper.emission import reshape
from tf_fused_ops.remapper.rule import Fused, Rule


class PackedLookup(Rule):
    """cast(gather(table, indices)), the table being all that packed integers make.

    Stock code unpacks the whole table first. Operand `table` are the integers; how they are
    unpacked is not part of the chain. The rows are taken as bytes, and these are unpacked.

    Variants, by attribute:
        dtype: That of the result.
        table, indices: The tf.DType of the operands.
        rank: That of the indices.
    """

    family = "packed_lookup"
    anchor = "Cast"
    operands: ClassVar = {"table": (2,), "indices": ()}
    differentiable = ()
    fused_ops = ()

    def variants(self, view, anchor):
        op = anchor.inputs[0].op
        if op.type != "GatherV2" or view.attr(op, "batch_dims"):
            return
        table, indices, axis = op.inputs
        known = indices.shape.rank is not None and tensor_util.constant_value(axis) == 0
        if known and quantized_weights.find_packed(table) is not None:
            dtypes = {"dtype": anchor.outputs[0].dtype, "indices": indices.dtype}
            yield dtypes | {"table": table.dtype, "rank": indices.shape.rank}

    def operand_dtype(self, name, dtype, attrs):
        return attrs[name]

    def operand_shape(self, name, attrs):
        return [None] * (2 if name == "table" else attrs["rank"])

    def stock(self, attrs, table, indices):
        rows = tf.raw_ops.GatherV2(params=table, indices=indices, axis=0)
        return {"y": tf.cast(rows, attrs["dtype"])}

    def check(self, match):
        table = match.operands["table"]
        weights = quantized_weights.find_packed(table)
        if weights is None or weights.transposed or weights.packed_axis != 1:
            return f"rows of {table.name} are no rows of bytes"
        return None

    def fuse(self, match, training):
        table, indices = match.operands["table"], match.operands["indices"]
        b, size = quantized_weights.find_packed(table).b, table.shape[1]
        rows = tf.gather(b, reshape(indices, [-1]), name=match.fused_name())
        sizes = shapes.sizes(indices)
        shape = [*sizes, size] if isinstance(sizes, list) else tf.concat([sizes, [size]], 0)
        numbers = reshape(reference.unpacked(rows, 1, size), shape)
        return Fused({"y": tf.cast(numbers, match.attrs["dtype"])})

    def describe(self, match):
        gather = match.node("GatherV2")
        return "GatherV2 with unpacking", f"gather={gather.name} table={gather.inputs[0].name}"
