"""Tells the custom gradient that products with quantized weights have: that of the product with the
numbers that the weights stand for, as if nothing were rounded.

In a program it is known by the code of Keras's layers, in a SavedModel by what it computes.
"""

import functools
import itertools
import sys
import types

import numpy as np
import tensorflow as tf

# Keras's layers that have it, and the method in which they define it.
_LAYERS = (
    ("keras.src.layers.core.dense", "Dense"),
    ("keras.src.layers.core.einsum_dense", "EinsumDense"),
)
_METHOD, _NAME = "_int8_call", "grad_fn"
_PRODUCTS = frozenset({"MatMul", "BatchMatMulV2", "Einsum"})
# Of these, one product and one division, nothing can be made but a form that is linear in dy and in
# the quotients: if it agrees with another for random numbers, it is the same.
_LINEAR = frozenset(
    {"Cast", "Const", "Identity", "Placeholder", "RealDiv", "Reshape", "Squeeze", "Transpose"}
    | {"ConcatV2", "ExpandDims", "GatherV2", "Pack", "Prod", "Shape", "StridedSlice"}
)
# Stands for a size that is not known.
_SIZE = 2
# Numbers in a row of dy that are not zero: so few have sums that are exact in bfloat16.
_NUMBERS = 8


def of_keras():
    """Returns the codes of the gradients that Keras's layers define."""
    methods = (
        getattr(getattr(sys.modules.get(module), layer, None), _METHOD, None)
        for module, layer in _LAYERS
    )
    nested = itertools.chain.from_iterable(_nested(m.__code__) for m in methods if m is not None)
    return [code for code in nested if code.co_name == _NAME]


def _nested(code):
    for value in code.co_consts:
        if isinstance(value, types.CodeType):
            yield value
            yield from _nested(value)


@functools.cache
def saved(contracted, order):
    """Returns the code that stands for the gradient in a SavedModel.

    Args:
        contracted: Over how many dimensions the product sums.
        order: In which it takes the dimensions of the weights, those that it sums over first; None
            for their own.
    """
    return _never_called.__code__.replace(co_name=f"gradient_{contracted}_{order}")


def _never_called(*gradients):
    raise NotImplementedError


def function(code):
    """Returns a function of some code that is there to be compared, not to be called."""
    cells = tuple(types.CellType() for _ in code.co_freevars)
    return types.FunctionType(code, {}, closure=cells)


def identify(body):
    """Returns the code that `saved` has for the body of a saved gradient, or None.

    Args:
        body: A FuncGraph: of dy, then of the arguments of the function that has the gradient: a, b
            and the scale of b, then of those of them that it reads once more.
    """
    ops = body.get_operations()
    types_ = [op.type for op in ops]
    if sum(t in _PRODUCTS for t in types_) != 1 or types_.count("RealDiv") != 1:
        return None
    if not _LINEAR.union(_PRODUCTS).issuperset(types_) or len(body.inputs) < 4:
        return None
    dy, a, b, scale = body.inputs[:4]
    if None in (dy.shape.rank, a.shape.rank) or b.dtype != tf.int8 or not dy.dtype.is_floating:
        return None
    if not (b.shape.is_fully_defined() and scale.shape.is_fully_defined()):
        return None
    given = _numbers(dy, b, scale)
    feeds = {id(t): value for t, value in zip((dy, b, scale), given, strict=True)}
    feeds[id(a)] = np.zeros(_sizes(a))
    for again in body.inputs[4:]:
        twin = b if again.dtype == tf.int8 else scale
        if again.shape.as_list() != twin.shape.as_list() or again.dtype != twin.dtype:
            return None
        feeds[id(again)] = feeds[id(twin)]
    found = _run(body, [feeds[id(t)] for t in body.inputs])
    if found is None or list(found.shape) != _sizes(a):
        return None
    for contracted, order in _forms(a.shape.rank, b.shape.rank):
        expected = _expected(*given, _sizes(a), contracted, order)
        if expected is not None and np.array_equal(found, expected):
            return saved(contracted, order)
    return None


def _sizes(tensor):
    return [_SIZE if size is None else size for size in tensor.shape]


def _numbers(dy, b, scale):
    """Returns random numbers for them, with which everything is exact."""
    rng = np.random.default_rng(0)
    rows = np.zeros((int(np.prod(_sizes(dy)[:1])), int(np.prod(_sizes(dy)[1:]))))
    for row in rows:
        row[rng.permutation(row.size)[:_NUMBERS]] = rng.choice([-1, 1])
    weights = rng.integers(-8, 8, b.shape.as_list())
    scales = np.exp2(rng.integers(0, 3, scale.shape.as_list()))
    return rows.reshape(_sizes(dy)), weights, scales


def _run(body, values):
    """Returns the only gradient that a body computes, in float64, or None."""
    floating = [t for t in body.outputs if t.dtype.is_floating]
    if len(floating) != 1:
        return None
    dtypes = (t.dtype.as_numpy_dtype for t in body.inputs)
    feeds = {t.name: v.astype(d) for t, v, d in zip(body.inputs, values, dtypes, strict=True)}
    try:
        with tf.compat.v1.Session(graph=body) as session:
            return session.run(floating[0], feeds).astype(np.float64)
    except tf.errors.OpError:
        return None


def _forms(a_rank, b_rank):
    """Yields how many dimensions may be contracted, and which order those of b may have."""
    own = tuple(range(b_rank))
    for contracted in range(1, min(a_rank, b_rank)):
        for order in itertools.permutations(own):
            yield contracted, None if order == own else order


def _expected(dy, b, scale, sizes, contracted, order):
    """Returns the gradient by a, or None where sizes do not fit."""
    b = b if order is None else b.transpose(order)
    rows, depth, columns = sizes[:-contracted], b.shape[:contracted], b.shape[contracted:]
    scale = scale.reshape(scale.shape[max(scale.ndim - len(columns), 0) :])
    if (*rows, *depth) != tuple(sizes) or (*rows, *columns) != dy.shape or scale.shape != columns:
        return None
    weights = (b / scale).reshape(np.prod(depth), -1)
    return (dy.reshape(-1, weights.shape[1]) @ weights.T).reshape(sizes)
