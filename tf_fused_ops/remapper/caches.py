"""The rule for caches of keys and values, which decoders take apart and stack together again.

In every step each layer slices its keys and values out of the cache and writes those of the new
positions into them, and all of them are stacked to the cache of the next step: several copies of
what may be larger than the weights. The fused ops, one a layer, write into the cache itself.
"""

from typing import ClassVar, NamedTuple

import tensorflow as tf
from tensorflow.compiler.tf2xla.python import xla

from tf_fused_ops.remapper import shapes
from tf_fused_ops.remapper.candidate import Candidate
from tf_fused_ops.remapper.emission import constant, emit
from tf_fused_ops.remapper.rule import Fused, Match, Rule

# The op that a cache is recognized by.
UPDATE = "XlaDynamicUpdateSlice"
_SLICE = "StridedSlice"
_SPELLING = ("begin_mask", "end_mask", "ellipsis_mask", "new_axis_mask", "shrink_axis_mask")
# What an update brings: its place among the inputs.
_BROUGHT = 1
_PARTS = ("keys", "values")


class _Layer(NamedTuple):
    """The update of one layer's part of a cache.

    Attributes:
        slot: Where in the cache its keys are.
        updates: The ops that write keys and values.
        index: The tensor, or number, of the position that they write at.
        nodes: These ops, the slices before them and, if any, the stack behind them.
    """

    slot: int
    updates: tuple
    index: object
    nodes: tuple


class UpdateCache(Rule):
    """stack([update_slice(cache[:, 0], [0, index, ..], key), the same of values], 1), for each
    layer of the cache if it has several, which are stacked, too."""

    family = "update_cache"
    anchor = "Pack"
    operands: ClassVar = {"cache": (), "key": (), "value": (), "index": (0,)}
    differentiable = ()
    fused_ops = ("TfFusedOps>UpdateCache",)

    def stock(self, attrs, cache, key, value, index):
        start = tf.stack([0, index, *[0] * (key.shape.rank - 2)])
        keys, values = (
            xla.dynamic_update_slice(cache[:, i], part, start)
            for i, part in enumerate((key, value))
        )
        return {"y": tf.stack([keys, values], 1)}

    def check(self, match):
        cache = match.operands["cache"]
        for layer in match.attrs["layers"]:
            parts = [update.inputs[_BROUGHT] for update in layer.updates]
            for part, update in zip(parts, layer.updates, strict=True):
                if part.shape.rank is None:
                    return f"the rank of {part.name} is not known"
                slot = update.inputs[0]
                sizes, wanted = shapes.dimensions(part), shapes.dimensions(slot)
                if sizes[:1] + sizes[2:] != wanted[:1] + wanted[2:]:
                    return (
                        f"{part.name} of shape {part.shape} may not fill positions of {cache.name} "
                        f"of shape {cache.shape}"
                    )
                if None not in (part.shape[1], slot.shape[1]) and part.shape[1] > slot.shape[1]:
                    return f"{part.name} of shape {part.shape} has more positions than {cache.name}"
            lengths = {shapes.dimension(part, 1) for part in parts}
            if len(lengths) > 1:
                named = " and ".join(part.name for part in parts)
                return f"{named} are not known to have as many positions"
        return None

    def fuse(self, match, training):
        cache, outputs = match.operands["cache"], {}
        for layer in match.attrs["layers"]:
            parts = (update.inputs[_BROUGHT] for update in layer.updates)
            index = layer.index
            fused = emit(
                self.fused_ops[0],
                cache,
                *parts,
                constant(index, tf.int64) if isinstance(index, int) else index,
                slot=layer.slot,
                name=f"{layer.updates[0].name}_fused",
            )
            cache = fused["updated"]
            outputs |= {_output(name, layer): fused[name] for name in _PARTS}
        return Fused({"y": cache, **outputs})

    def describe(self, match):
        layers, cache = len(match.attrs["layers"]), match.operands["cache"].op.name
        return "cache of keys and values", f"cache={cache} layers={layers}"


UPDATE_CACHE = UpdateCache()


class CacheCandidate(Candidate):
    """A proposed replacement of all updates of a cache by ops that follow one another."""

    def _cycles(self):
        match, users = self.match, self._users([self.match.outputs["y"]])
        controls = self.controls(self.nodes)
        for layer in reversed(match.attrs["layers"]):
            users |= self._users([match.outputs[_output(name, layer)] for name in _PARTS])
            before = [tensor.op for update in layer.updates for tensor in update.inputs[_BROUGHT:]]
            if self.view.reaches(users, [*before, *controls]):
                return "what is written depends on what was to be written later"
        return None


def candidate(view, stack):
    """Returns the replacement of the updates of a cache that an op stacks, or None.

    Args:
        view: A GraphView.
        stack: A live Pack op.
    """
    cache, layers = _layers(view, stack) or (None, ())
    if not layers:
        return None
    layers = sorted(layers, key=lambda layer: max(map(view.position.get, layer.updates)))
    operands = {"cache": cache}
    outputs = {"y": stack.outputs[0]}
    for layer in layers:
        for name, update in zip(_PARTS, layer.updates, strict=True):
            operands[f"update of {name} {layer.slot}"] = update.inputs[_BROUGHT]
            outputs[_output(name, layer)] = update.outputs[0]
    nodes = dict.fromkeys(node for layer in layers for node in layer.nodes)
    match = Match((*nodes, stack), operands, outputs, {"layers": tuple(layers)})
    return CacheCandidate(UPDATE_CACHE, match, (), view)


def _layers(view, stack):
    """Returns what a stack of updates is the next one of, and its layers in order, or None."""
    pair = _pair(view, stack, 0)
    if pair:
        cache, layer = pair
        return (cache, [layer]) if cache.shape.rank and cache.shape[1] == len(_PARTS) else None
    sources, layers = [], []
    for place, tensor in enumerate(view.inputs[stack]):
        pair = _pair(view, tensor.op, len(_PARTS) * place)
        if pair is None or view.attr(stack, "axis") != 1 or _taken(view, pair[0].op) != place:
            return None
        (part, layer), inner = pair, tensor.op
        layers.append(layer._replace(nodes=(part.op, *layer.nodes, inner)))
        sources.append(view.inputs[part.op][0])
    cache = sources[0]
    # All of it, so that nothing is lost.
    complete = cache.shape.rank and cache.shape[1:3] == [len(layers), len(_PARTS)]
    return (cache, layers) if complete and all(s is cache for s in sources) else None


def _pair(view, stack, slot):
    """Returns what a stack of keys and values, both updated, is the next one of, and the _Layer; or
    None."""
    updates = tuple(tensor.op for tensor in view.inputs[stack])
    if view.types[stack] != UPDATE_CACHE.anchor or view.attr(stack, "axis") != 1:
        return None
    if len(updates) != len(_PARTS) or any(view.types[op] != UPDATE for op in updates):
        return None
    slices = tuple(view.inputs[op][0].op for op in updates)
    first, second = (_index(view, op) for op in updates)
    numbers = isinstance(first, int) and isinstance(second, int)
    same = first == second if numbers else first is second
    if first is None or not same or [_taken(view, op) for op in slices] != [0, 1]:
        return None
    cache, other = (view.inputs[op][0] for op in slices)
    return (cache, _Layer(slot, updates, first, (*slices, *updates))) if cache is other else None


def _index(view, update):
    """Returns the tensor, or the number, of the position at which an op writes, or None."""
    starts = view.inputs[update][2]
    if view.types[starts.op] == "Pack":
        values = view.inputs[starts.op]
        return values[1] if len(values) > 1 else None
    values = view.constant(starts)
    return None if values is None or len(values) < 2 else int(values[1])


def _taken(view, op):
    """Returns which entry of the second axis a slice takes of all else, or None."""
    if view.types[op] != _SLICE:
        return None
    begin, end, strides = (view.constant(tensor) for tensor in view.inputs[op][1:])
    if begin is None or end is None or strides is None or len(begin) < 2:
        return None
    masks = {name: view.attr(op, name) for name in _SPELLING}
    # Whole axes, of which the ellipsis may be several, around the second one.
    whole = sum(1 << i for i in range(len(begin)) if i != 1)
    ellipsis = masks["ellipsis_mask"]
    free = whole & ~ellipsis
    spelled = (
        masks["new_axis_mask"] == 0
        and masks["shrink_axis_mask"] == 2
        and ellipsis in (0, *(1 << i for i in range(2, len(begin))))
        and all(masks[name] & free == free for name in ("begin_mask", "end_mask"))
        and not (masks["begin_mask"] & 2)
        and all(stride == 1 for stride in strides)
    )
    return int(begin[1]) if spelled else None


def _output(name, layer):
    """Returns what a match calls keys or values of a layer."""
    return f"{name} {layer.slot}"
