"""The rule for attention: two products with a softmax between them."""

from typing import ClassVar, NamedTuple

import tensorflow as tf
from tensorflow.python.framework import tensor_util

from tf_fused_ops.ops.attention import unbroadcast
from tf_fused_ops.remapper import dropout, shapes
from tf_fused_ops.remapper.caches import UPDATE_CACHE
from tf_fused_ops.remapper.emission import emit
from tf_fused_ops.remapper.rule import Fused
from tf_fused_ops.remapper.softmax import SCALES, Softmax, below_cast, scaled_op

_FACTORS = ("query", "key", "value")
_PRODUCTS = ("Einsum", "BatchMatMulV2")
# Where the key is transposed by an op of its own; where query and key are, heads to the front; and
# where Keras multiplies the transposed key and query, and transposes the scores.
_APART, _BESIDE, _FLIPPED = "apart", "beside", "flipped"
_FIRST, _SECOND = "first", "second"
# Heads to the front and back again, and what the queries' depth comes before.
_TO_FRONT, _TO_COLUMNS, _ROWS_TO_COLUMNS = [0, 2, 1, 3], [0, 2, 3, 1], [0, 1, 3, 2]


class Attention(Softmax):
    """dropout(softmax(where(mask, query key^T * scale + bias, masked))) value.

    Variants, by attribute, besides those of the softmax:
        to_scores, to_output: How the products are spelled: ("Einsum", equation, whether key or
            value come first), or ("BatchMatMulV2", how: None, _APART, _BESIDE or _FLIPPED).
        heads_first: Whether heads are a dimension of the batch, not beside the depth.
        rank: That of the operands.
        biased: Which summand the bias is, _FIRST or _SECOND, or None if there is none.
        dropped: Whether there is a dropout, and if so, what `dropout.draws` tells of it.
        sized: Whether its random numbers' shape is asked of the softmax.
    """

    family = "attention"
    operands: ClassVar = {
        **dict.fromkeys((*_FACTORS, "mask", "bias"), ()),
        **dict.fromkeys(dropout.APART, (1,)),
    }
    differentiable = (*_FACTORS, "bias")
    # Of two summands that are products, either may be the scores.
    optional = (*Softmax.optional, "biased")
    unscaled = dropout.APART
    captured: ClassVar = dropout.SEEDS
    fused_ops = ("TfFusedOps>Attention", "TfFusedOps>AttentionGrad")

    def variants(self, view, anchor):
        source = below_cast(anchor.inputs[0].op)
        for attrs in super().variants(view, anchor):
            for scores, product in _products(view, scaled_op(source, attrs), attrs):
                if product is None or product.type not in (*_PRODUCTS, "Transpose"):
                    continue
                spellings = []
                for weights, drop in _weights(view, anchor, attrs):
                    for output in (op for op in view.users(weights) if view.types[op] in _PRODUCTS):
                        found = (drop | spelling for spelling in _spellings(product, output))
                        spellings += [spelling for spelling in found if spelling not in spellings]
                for spelling in spellings:
                    yield attrs | scores | spelling | {"rank": product.inputs[0].shape.rank}

    def present(self, attrs):
        masks = ("mask",) if attrs["masked"] else ()
        masks += ("bias",) if attrs["biased"] else ()
        sizes = ("shape",) if attrs["dropped"] and not attrs["sized"] else ()
        random = dropout.given(attrs) if attrs["dropped"] else ()
        return (*_FACTORS, *masks, *sizes, *random)

    def parameters(self, attrs):
        dropped = dropout.PARAMETERS if attrs["dropped"] else ()
        # The softmax may be of another type than the weights.
        return super().parameters(attrs) | dict.fromkeys(dropped, (0, attrs["half"]))

    def operand_dtype(self, name, dtype, attrs):
        if name in dropout.APART:
            return dropout.random_dtype(name, attrs)
        return super().operand_dtype(name, dtype, attrs)

    def operand_shape(self, name, attrs):
        return [None] * attrs["rank"] if name in _FACTORS else None

    def stock(self, attrs, query, key, value, mask=None, bias=None, shape=None, **random):
        x = _product(attrs["to_scores"], query, key, True)
        weights = super().stock(attrs, x, mask, bias=bias)["y"]
        if attrs["dropped"]:
            if attrs["sized"]:
                shape = tf.raw_ops.Shape(input=weights, out_type=attrs["shape_type"])
            weights = dropout.drop(attrs, weights, shape, **random)
        return {"y": _product(attrs["to_output"], weights, value, False)}

    def shifted(self, attrs, z, bias=None):
        if bias is None:
            return z
        return bias + z if attrs["biased"] == _FIRST else z + bias

    def has_inner_shape(self, match, tensor):
        # Products that are transposed behind have other shapes.
        forms, product = match.attrs, tensor.op.type == "BatchMatMulV2"
        output = forms["to_output"][1] == _FLIPPED and tensor is match.outputs["y"].op.inputs[0]
        flipped = product and forms["to_scores"][1] == _FLIPPED
        return super().has_inner_shape(match, tensor) and not (output or flipped)

    def inner_shape(self, match, dtype):
        queries, keys = (tf.shape(match.operands[name], dtype) for name in ("query", "key"))
        if match.attrs["heads_first"]:
            return tf.concat([queries[:-1], keys[-2:-1]], 0)
        return tf.stack([queries[0], queries[2], queries[1], keys[1]])

    def check(self, match):
        attrs, operands = match.attrs, match.operands
        query, key, value = (operands[name] for name in _FACTORS)
        queries, keys = shapes.dimensions(query), shapes.dimensions(key)
        leading = slice(-2) if attrs["heads_first"] else slice(0, 3, 2)
        # Products of batches broadcast; letters of an einsum have one size, or it fails.
        for other in (key, value) if attrs["to_scores"][0] == "BatchMatMulV2" else ():
            if shapes.dimensions(other)[leading] != queries[leading]:
                return f"{other.name} of shape {other.shape} may not go with {query.name}"
        sequence = -2 if attrs["heads_first"] else 1
        sizes = [*queries[leading], queries[sequence], keys[sequence]]
        for name in (name for name in ("mask", "bias") if name in operands):
            scores = f"the scores of {query.name}"
            reason = self.broadcast_objection(name, operands[name], sizes, scores)
            if reason:
                return reason
        if attrs["dropped"]:
            if not attrs["sized"] and not dropout.is_shape(operands["shape"], sizes):
                return f"{operands['shape'].name} is not known to be the shape of the scores"
            reason = dropout.objection(match, query.dtype)
            if reason:
                return reason
        return self.number_objection(attrs, query)

    def fuse(self, match, training):
        attrs = match.attrs
        query, random = match.operands["query"], self._random(match)
        key, value, slot = self._keys_and_values(match, training)
        outputs = emit(
            self.fused_ops[0],
            *(query, key, value),
            self.mask_of(match),
            self._bias_of(match),
            *_lists(random),
            U=tf.float64 if query.dtype == tf.float64 else tf.float32,
            scale=self.scale_of(attrs),
            zero_masked=attrs["zeroed"],
            heads_first=attrs["heads_first"],
            slot=slot,
            name=match.fused_name(),
            **self.masked_of(attrs),
            **_dropout_of(attrs),
        )
        saved = tuple(outputs[name] for name in ("y", "largest", "inverse_sum"))
        return Fused({"y": outputs["y"]}, (*saved, *random))

    def fuse_gradient(self, match, fused, dy, wanted):
        attrs = match.attrs
        outputs = emit(
            self.fused_ops[1],
            dy,
            *self._factors(match),
            *fused.saved[:3],
            self.mask_of(match),
            self._bias_of(match),
            *_lists(fused.saved[3:]),
            bias_gradient="bias" in wanted,
            scale=self.scale_of(attrs),
            zero_masked=attrs["zeroed"],
            heads_first=attrs["heads_first"],
            name=match.fused_name("_grad"),
            **self.masked_of(attrs),
            **_dropout_of(attrs),
        )
        gradients = {name: outputs[f"{name}_grad"] for name in _FACTORS}
        if "bias" in wanted:
            gradients["bias"] = unbroadcast(outputs["bias_grad"], match.operands["bias"])
        return gradients

    def describe(self, match):
        attrs = match.attrs
        scores, output = (attrs[name][0] for name in ("to_scores", "to_output"))
        parts = [
            scores,
            attrs["scaled"],
            "AddV2" if attrs["biased"] else None,
            "SelectV2" if attrs["masked"] else None,
            "Softmax",
            "Dropout" if attrs["dropped"] else None,
            output,
        ]
        query = match.operands["query"].op.name
        return " + ".join(filter(None, parts)), f"attention={match.fused_name()} query={query}"

    def _factors(self, match):
        return [match.operands[name] for name in _FACTORS]

    def _keys_and_values(self, match, training):
        """Returns keys and values where they lie: before heads that share them are repeated, and,
        with the slot, or -1, in the cache of a decoder."""
        found = self._factors(match)[1:]
        if match.attrs["heads_first"]:
            return *found, -1
        single = [_single(tensor) for tensor in found]
        shared = None not in single and single[0].shape[2] == single[1].shape[2]
        key, value = single if shared else found
        op = key.op
        if training or op is not value.op or op.type != UPDATE_CACHE.fused_ops[0]:
            return key, value, -1
        cache, *slots = op.outputs
        in_place = key is slots[0] and value is slots[1]
        return (cache, cache, op.get_attr("slot")) if in_place else (key, value, -1)

    def _bias_of(self, match):
        return [match.operands["bias"]] if "bias" in match.operands else []

    def _random(self, match):
        """Key and counter of a dropout, if there is one."""
        shape = match.operands.get("shape")

        def make_shape():
            # Scores and weights, of which it may be asked, are gone.
            if shape is None or shape.op.type == "Shape":
                return self.inner_shape(match, match.attrs["shape_type"])
            return shape

        return dropout.words(match, make_shape) if match.attrs["dropped"] else ()


def _single(repeated):
    """Returns the keys or values of which each head is repeated, as by `tf.repeat` over the third
    axis, or None."""
    found, tensor = [], repeated
    for op_type in ("Reshape", "Tile", "ExpandDims"):
        if tensor.op.type != op_type or tensor.shape.rank is None:
            return None
        found.append(tensor.op)
        tensor = tensor.op.inputs[0]
    _, tile, expand = found
    if tensor.shape.rank != 4 or repeated.shape.rank != 4:
        return None
    if tensor_util.constant_value(expand.inputs[1]) not in (3, -2):
        return None
    times = tensor_util.constant_value(tile.inputs[1], partial=True)
    if times is None or any(times[axis] != 1 for axis in (0, 1, 2, 4)):
        return None
    (heads, depth), shared = tensor.shape[2:], tile.outputs[0].shape[3]
    if None in (heads, depth, shared) or repeated.shape[2:] != [heads * shared, depth]:
        return None
    same = shapes.dimensions(repeated)[:2] == shapes.dimensions(tensor)[:2]
    return tensor if same else None


def _lists(random):
    """Returns key and counter as optional inputs of an op: two lists of one each, or of none."""
    return [[words] for words in random] or [[], []]


def _dropout_of(attrs):
    """Returns the attributes that say what is dropped out, if anything is."""
    if not attrs["dropped"]:
        return {}
    rate, scale = dropout.numbers(attrs)
    return {"dropout_rate": rate, "dropout_scale": scale}


def _products(view, scores, attrs):
    """Yields ({attribute: value}, the product or None) for what a mask may be applied to."""
    if attrs["scaled"]:
        yield {"biased": None}, _product_under(view, scores)
        return
    yield {"biased": None}, scores
    if scores.type == "AddV2":
        for place, tensor in zip((_SECOND, _FIRST), scores.inputs, strict=True):
            # The op takes a bias of the query's type.
            biased = {"biased": place, "late": bool(attrs["half"])}
            if tensor.op.type in SCALES:
                yield biased | {"scaled": tensor.op.type}, _product_under(view, tensor.op)
            yield biased, tensor.op


def _product_under(view, scaling):
    """Returns the op whose output is scaled, or None."""
    found = [below_cast(tensor.op) for tensor in scaling.inputs if view.constant(tensor) is None]
    return found[0] if len(found) == 1 else None


def _weights(view, anchor, attrs):
    """Yields (tensor, {attribute: value}) for what a softmax makes weights of, which may be masked,
    cast and dropped out."""
    tensors = [anchor.outputs[0]]
    for op_type in ("SelectV2",) * attrs["zeroed"] + ("Cast",) * bool(attrs["half"]):
        users = (op for tensor in tensors for op in view.users(tensor))
        tensors = [op.outputs[0] for op in users if view.types[op] == op_type]
    for tensor in tensors:
        yield tensor, {"dropped": False}
        for dropped, draw in dropout.over(view, tensor):
            shape = draw.inputs[0].op
            sized = view.types[shape] == "Shape" and shape.inputs[0] is tensor
            for form in dropout.draws(view, draw):
                yield dropped, {"dropped": True, "sized": sized} | form


class _Roles(NamedTuple):
    """What an einsum's operands are.

    Attributes:
        heads_first: Whether they have batch and heads in front of the other dimensions.
        swapped: Whether the right factor comes first.
    """

    heads_first: bool
    swapped: bool


def _spellings(product, output):
    """Yields {attribute: value} of the products' spellings."""
    if product.inputs[0].shape.rank is None:
        return
    if product.type == "Transpose":
        yield from _flipped(product, output)
        return
    if product.type != output.type:
        return
    rank = product.inputs[0].shape.rank
    if any(t.shape.rank != rank for op in (product, output) for t in op.inputs):
        return
    if product.type == "Einsum":
        equations = [op.get_attr("equation") for op in (product, output)]
        scores, values = (
            _einsum_roles(equation.decode(), to_scores)
            for equation, to_scores in zip(equations, (True, False), strict=True)
        )
        if scores and values and scores.heads_first == values.heads_first:
            yield {
                "to_scores": ("Einsum", equations[0], scores.swapped),
                "to_output": ("Einsum", equations[1], values.swapped),
                "heads_first": scores.heads_first,
            }
    elif rank >= 3 and not any(
        (product.get_attr("adj_x"), output.get_attr("adj_x"), output.get_attr("adj_y"))
    ):
        apart = None if product.get_attr("adj_y") else _APART
        if not apart or product.inputs[1].op.type == "Transpose":
            if apart and _are_transposed(*product.inputs, output.inputs[-1]):
                yield _by_matmul(_BESIDE, _FLIPPED)
            yield _by_matmul(apart, None)


def _flipped(scores, output):
    """Yields the spelling of transposed scores, as Keras has them, if they are the transposed."""
    product = scores.inputs[0].op
    transposed = _are_transposed(*product.inputs, output.inputs[-1])
    if product.type == output.type == "BatchMatMulV2" and transposed:
        yield _by_matmul(_FLIPPED, _FLIPPED)


def _are_transposed(*factors):
    """Returns whether tensors may be transposed ones of heads beside the depth."""
    return all(f.op.type == "Transpose" and f.shape.rank == 4 for f in factors)


def _by_matmul(to_scores, to_output):
    """Returns {attribute: value} of products by BatchMatMulV2."""
    return {
        "to_scores": ("BatchMatMulV2", to_scores),
        "to_output": ("BatchMatMulV2", to_output),
        "heads_first": to_output is not _FLIPPED,
    }


def _einsum_roles(equation, to_scores):
    """Returns the _Roles of an equation that makes scores, or that sums values by weights, or
    None."""
    inputs, _, result = equation.partition("->")
    factors = inputs.split(",")
    if len(factors) != 2 or not (inputs.replace(",", "") + result).isalpha():
        return None
    for swapped, (left, right) in ((False, factors), (True, factors[::-1])):
        for heads_first in (False, True):
            if (left, right, result) == _letters(left, right, heads_first, to_scores):
                return _Roles(heads_first, swapped)
    return None


def _letters(left, right, heads_first, to_scores):
    """Returns the letters that factors and result of a product of attention have, if the left
    factor has these and the right one a new one where it has to; or None."""
    if len(left) != len(right) or len(left) < 3 or (not heads_first and len(left) != 4):
        return None
    if to_scores:
        # left is the query, right the key.
        if heads_first:
            *batch, queries, depth = left
            keys = right[-2]
            found = ([*batch, queries, depth], [*batch, keys, depth], [*batch, queries, keys])
        else:
            b, queries, h, depth = left
            keys = right[1]
            found = ([b, queries, h, depth], [b, keys, h, depth], [b, h, queries, keys])
    elif heads_first:
        *batch, queries, keys = left
        depth = right[-1]
        found = ([*batch, queries, keys], [*batch, keys, depth], [*batch, queries, depth])
    else:
        b, h, queries, keys = left
        depth = right[3]
        found = ([b, h, queries, keys], [b, keys, h, depth], [b, queries, h, depth])
    distinct = len(set(left + right)) == len(left) + 1
    return tuple("".join(letters) for letters in found) if distinct else None


def _product(spelling, left, right, to_scores):
    """Computes a product as its spelling says."""
    if spelling[0] == "Einsum":
        _, equation, swapped = spelling
        inputs = [right, left] if swapped else [left, right]
        return tf.raw_ops.Einsum(inputs=inputs, equation=equation)
    _, how = spelling
    if how == _BESIDE:
        left, right = tf.transpose(left, _TO_FRONT), tf.transpose(right, _TO_COLUMNS)
        return tf.raw_ops.BatchMatMulV2(x=left, y=right)
    if how == _FLIPPED:
        right = tf.transpose(right, _TO_FRONT)
        if to_scores:
            product = tf.raw_ops.BatchMatMulV2(x=right, y=tf.transpose(left, _TO_COLUMNS))
            return tf.transpose(product, _ROWS_TO_COLUMNS)
        return tf.transpose(tf.raw_ops.BatchMatMulV2(x=left, y=right), _TO_FRONT)
    if how == _APART:
        rank = right.shape.rank
        right = tf.transpose(right, [*range(rank - 2), rank - 1, rank - 2])
    return tf.raw_ops.BatchMatMulV2(x=left, y=right, adj_y=to_scores and how is None)
