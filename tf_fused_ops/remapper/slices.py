"""The rules for gradients of slices, which stock code writes element by element."""

import itertools
from typing import ClassVar, NamedTuple

import tensorflow as tf
from tensorflow.python.framework import tensor_util

from tf_fused_ops._devices import device_type
from tf_fused_ops.remapper.candidate import Candidate
from tf_fused_ops.remapper.rule import LAST, Fused, Match, Rule

_MASKS = ("begin_mask", "end_mask", "ellipsis_mask", "new_axis_mask", "shrink_axis_mask")
_INDICES = ("begin", "end", "strides")
_WHAT = "StridedSliceGrad"
# On others there is nothing known to gain.
_DEVICES = ("CPU",)
# Of what TensorFlow pads.
_MAX_RANK = 8


class _Cut(NamedTuple):
    """What a slice leaves of a dimension.

    Attributes:
        before, after: How much it leaves out; None for all that the other does.
        shrinks: Whether the dimension, of which one index is left, is gone.
        step: Of how many indices between these it takes one each.
        place: Which of them.
    """

    before: int | None = 0
    after: int | None = 0
    shrinks: bool = False
    step: int = 1
    place: int = 0

    @property
    def keeps_all(self):
        return (self.before, self.after, self.step) == (0, 0, 1)


class _Unknown(Exception):
    """Why it is not known before running what a slice leaves."""


class SliceGradient(Rule):
    """The gradient of x[1:, ::2, ..., :5, 0]: zeros, but for dy where x was taken from.

    Stock code fills with zeros and then writes dy by an index for each element; padding dy copies
    whole rows. Where indices are left out between others, they become a dimension meanwhile.

    Variants, by attribute:
        index: The tf.DType of the indices.
    """

    family = "slice_gradient"
    # Behind all rules that know the gradients of slices as part of theirs.
    turn = LAST
    anchor = _WHAT
    operands: ClassVar = {"dy": (), "shape": (1,)} | dict.fromkeys(_INDICES, (1,))
    differentiable = ()
    captured: ClassVar = {_WHAT: dict.fromkeys(_MASKS, 0)}
    fused_ops = ()
    devices = _DEVICES

    def variants(self, view, anchor):
        if _is_tried(view, anchor):
            yield {"index": anchor.inputs[0].dtype}

    def operand_dtype(self, name, dtype, attrs):
        return dtype if name == "dy" else attrs["index"]

    def stock(self, attrs, **operands):
        masks = {name: attrs[name] for name in _MASKS}
        return {"y": tf.raw_ops.StridedSliceGrad(**operands, **masks)}

    def check(self, match):
        try:
            _read(match)
        except _Unknown as reason:
            return str(reason)
        return None

    def fuse(self, match, training):
        cuts, added = _read(match)
        dy = _spread(match.operands["dy"], cuts, added)
        y = _padded(dy, cuts, match.operands["shape"], match.fused_name())
        y.set_shape(match.outputs["y"].shape)
        return Fused({"y": y})

    def describe(self, match):
        return _WHAT, f"gradient={match.outputs['y'].op.name}"


PADDED = SliceGradient()


class JoinedSliceGradients(Rule):
    """The sum of the gradients of slices that make up x: every dy, one behind the other.

    The slices follow each other along one dimension. What else is added is added then.
    """

    family = "joined_slice_gradients"
    anchor = "AddN"
    operands: ClassVar = {}
    differentiable = ()
    fused_ops = ()
    devices = _DEVICES

    def stock(self, attrs, **parts):
        gradients = [PADDED.stock(attrs, **operands)["y"] for operands in parts.values()]
        return {"y": tf.add_n(gradients)}

    def fuse(self, match, training):
        parts = match.attrs["parts"]
        pieces = [_spread(part.dy, part.cuts, part.added) for part in parts]
        joined = tf.concat(pieces, parts[0].axis, name=match.fused_name())
        joined.set_shape(match.outputs["y"].shape)
        others = match.attrs["others"]
        return Fused({"y": tf.add_n([joined, *others]) if others else joined})

    def describe(self, match):
        named = " ".join(f"part={part.op.name}" for part in match.attrs["parts"])
        return f"{_WHAT} + AddN", f"sum={match.outputs['y'].op.name} {named}"


JOINED = JoinedSliceGradients()


class _Part(NamedTuple):
    """The gradient of a slice that cuts one dimension of a known size.

    Attributes:
        axis, begin, end: The dimension, and what of it the slice takes.
        op: The stock op.
        dy, cuts, added: What it spreads over x, and how; see `_read`.
    """

    axis: int
    begin: int
    end: int
    op: object
    dy: object
    cuts: list
    added: list


def candidate(view, add):
    """Returns the replacement of a sum of gradients of slices that make up a tensor, or None.

    Args:
        view: A GraphView.
        add: A live AddN op.
    """
    summands = view.inputs[add]
    found = [part for tensor in summands if (part := _part(view, tensor.op)) is not None]
    found.sort(key=lambda part: (part.axis, part.begin))
    for axis, group in itertools.groupby(found, key=lambda part: part.axis):
        parts = list(group)
        ends = [0, *(part.end for part in parts)]
        whole = ends[-1] == add.outputs[0].shape[axis]
        if whole and [part.begin for part in parts] == ends[:-1]:
            ops = [part.op for part in parts]
            others = [tensor for tensor in summands if tensor.op not in ops]
            operands = {f"dy of {part.op.name}": part.dy for part in parts}
            operands |= {f"summand {i}": tensor for i, tensor in enumerate(others)}
            attrs = {"parts": parts, "others": others}
            match = Match((*ops, add), operands, {"y": add.outputs[0]}, attrs)
            return Candidate(JOINED, match, (), view)
    return None


def _part(view, op):
    """Returns the _Part that an op is, or None."""
    if view.types[op] != _WHAT or not _is_tried(view, op):
        return None
    operands = dict(zip(("shape", *_INDICES, "dy"), view.inputs[op], strict=True))
    masks = {name: view.attr(op, name) for name in _MASKS}
    try:
        cuts, added = _read(Match((op,), operands, {"y": op.outputs[0]}, masks))
    except _Unknown:
        return None
    cut = [axis for axis, cut in enumerate(cuts) if not cut.keeps_all]
    sizes = [op.outputs[0].shape[axis] for axis in cut]
    if len(cut) != 1 or None in sizes or cuts[cut[0]].step > 1:
        return None
    (axis,), (size,) = cut, sizes
    end = size - cuts[axis].after
    return _Part(axis, cuts[axis].before, end, op, operands["dy"], cuts, added)


def _is_tried(view, op):
    return device_type(view.signature(op).device) in _DEVICES


def _spread(dy, cuts, added):
    """Returns dy with the dimensions of what was sliced."""
    if added:
        dy = tf.squeeze(dy, added)
    for axis, cut in enumerate(cuts):
        if cut.shrinks:
            dy = tf.expand_dims(dy, axis)
    return dy


def _apart(dy, cuts):
    """Returns dy with zeros between what a slice takes in steps."""
    spread, paddings = dy, []
    for axis, cut in reversed(list(enumerate(cuts))):
        if cut.step > 1:
            spread = tf.expand_dims(spread, axis + 1)
    for cut in cuts:
        paddings += [[0, 0]] + [[cut.place, cut.step - 1 - cut.place]] * (cut.step > 1)
    sizes = tf.shape(dy, tf.int64) * [cut.step for cut in cuts]
    return tf.reshape(tf.pad(spread, paddings), sizes)


def _padded(dy, cuts, shape, name):
    """Returns dy with zeros for all that the slice leaves out of a shape."""
    if any(cut.step > 1 for cut in cuts):
        dy = _apart(dy, cuts)
    if all((cut.before, cut.after) == (0, 0) for cut in cuts):
        return tf.identity(dy, name)
    rest = [None] * len(cuts)
    if any(None in cut for cut in cuts):
        rest = tf.unstack(shape - tf.shape(dy, shape.dtype), len(cuts))
    return tf.pad(dy, list(map(_paddings, cuts, rest)), name=name)


def _paddings(cut, rest):
    """Returns how many zeros are before and after dy, `rest` being how many there are."""
    before = rest - cut.after if cut.before is None else cut.before
    return [before, rest - cut.before if cut.after is None else cut.after]


def _read(match):
    """Returns (a _Cut for each dimension, the dimensions of dy that the slice has added).

    Raises:
        _Unknown: That depends on what is known only when running, or padding would not do.
    """
    shape, attrs = match.outputs["y"].shape, match.attrs
    if shape.rank is None:
        raise _Unknown(f"the rank of {match.outputs['y'].name} is not known")
    values = [tensor_util.constant_value(match.operands[name]) for name in _INDICES]
    for name, value in zip(_INDICES, values, strict=True):
        if value is None:
            raise _Unknown(f"{name} {match.operands[name].name} is no constant")
    masks = [[bool(attrs[name] >> i & 1) for name in _MASKS] for i in range(len(values[0]))]
    entries = list(zip(*(value.tolist() for value in values), masks, strict=True))
    # What is not told is all there is, as are the dimensions that an ellipsis stands for.
    if not any(mask[2] for mask in masks):
        entries.append((0, 0, 1, [True, True, True, False, False]))
    told = sum(not (ellipsis or new) for _, _, _, (_, _, ellipsis, new, _) in entries)
    cuts, added, position = [], [], 0
    for begin, end, step, (from_start, to_end, ellipsis, new, shrinks) in entries:
        if ellipsis:
            cuts += [_Cut()] * (shape.rank - told)
            position += shape.rank - told
        elif new:
            added.append(position)
            position += 1
        else:
            size = shape[len(cuts)]
            if step != 1 and not shrinks and len(cuts) == shape.rank - 1:
                # Elements between others take as long as stock code.
                raise _Unknown("the last dimension is cut in steps")
            cuts.append(
                _index(begin, size)
                if shrinks
                else _range(None if from_start else begin, None if to_end else end, step, size)
            )
            position += not shrinks
    if shape.rank + sum(cut.step > 1 for cut in cuts) > _MAX_RANK:
        raise _Unknown(f"there would be more than {_MAX_RANK} dimensions")
    return cuts, added


def _index(index, size):
    """Returns the _Cut of an index, given the dimension's size or None."""
    if index < 0:
        return _Cut(None if size is None else size + index, -index - 1, True)
    return _Cut(index, None if size is None else size - index - 1, True)


def _range(begin, end, step, size):
    """Returns the _Cut of begin:end, either of which may be None for all there is on that side."""
    if step != 1:
        return _steps(begin, end, step, size)
    if size is not None:
        first, last, _ = slice(begin, end).indices(size)
        return _Cut(first, size - max(first, last))
    if begin and end is not None:
        raise _Unknown("a dimension of unknown size is cut on both sides")
    if begin:
        return _Cut(None, 0)
    return _Cut() if end is None else _Cut(0, None)


def _steps(begin, end, step, size):
    """Returns the _Cut of begin:end:step with another step than one."""
    if step < 0:
        raise _Unknown(f"the step {step} is negative")
    if size is None:
        raise _Unknown("a dimension of unknown size is cut in steps")
    taken = range(*slice(begin, end, step).indices(size))
    if len(taken) < 2:
        return _Cut(taken.start, size - taken.start - len(taken))
    # So that the last of them is inside.
    place = max(0, taken.start + len(taken) * step - size)
    before = taken.start - place
    if before < 0:
        raise _Unknown(f"{size} indices are no whole number of steps of {step}")
    return _Cut(before, size - before - len(taken) * step, False, step, place)
