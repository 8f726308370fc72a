"""Finds the rules' patterns in a graph: forward passes, and the gradients that belong to them.

Forward patterns do not depend on sizes and are traced once per dtype. What autodiff makes of a rule
does depend on them, so the pattern of forward and backward is traced for exactly the shapes and
attributes of a forward match.
"""

import functools

import tensorflow as tf

from tf_fused_ops.remapper import pattern, rules, spellings
from tf_fused_ops.remapper.candidate import Backward
from tf_fused_ops.remapper.matcher import Matcher

# Joint patterns in memory; a large model has a few hundred different layers.
_JOINT_PATTERNS = 4096


def forward_matches(view, anchor, options):
    """Yields the rules that fit at an anchor, longest first.

    Args:
        view: A GraphView.
        anchor: The op at which to look.
        options: RemapOptions.

    Yields:
        (Rule, Match, the one constant or attribute that differs in words or None).
    """
    for rule, traced in _usable(view, anchor, options):
        binding = Matcher(traced, view, allow_mismatch=True).match(anchor, traced.outputs)
        if binding is not None:
            yield rule, _match(rule, traced, binding), binding.mismatch


def backward_matches(view, rule, match):
    """Returns the gradient computations of a forward match that are part of the graph.

    Args:
        view: A GraphView.
        rule: The rule that was matched.
        match: Its Match.

    Returns:
        A tuple of Backward, one per incoming gradient.
    """
    inside = set(match.nodes)
    values = [*match.operands.values(), *(t for op in match.nodes for t in op.outputs)]
    if all(op in inside for tensor in values for op, _ in view.consumers(tensor)):
        return ()
    specs = tuple((n, tf.TensorSpec(t.shape, t.dtype)) for n, t in match.operands.items())
    traced = _joint_pattern(rule, specs, _hashable(match.attrs))
    matcher = Matcher(traced, view)
    forward = matcher.match(match.node(rule.anchor), match.outputs)
    names = sorted(traced.outputs.keys() - match.outputs.keys())
    found, used = [], set()
    while forward is not None:
        binding = _extend(matcher, forward, names, used)
        nodes = [op for node, op in sorted(binding.nodes.items()) if node not in forward.nodes]
        if not nodes:
            break
        used.update(nodes)
        gradients = {
            name.removeprefix("d_"): _tensor(traced, binding, name)
            for name in names
            if traced.outputs[name].node in binding.nodes
        }
        found.append(Backward(tuple(nodes), binding.operands["dy"], gradients))
    return tuple(found)


def _usable(view, anchor, options):
    """Returns (rule, forward pattern) pairs whose op types the graph has, longest first."""
    dtype = anchor.outputs[0].dtype
    if not dtype.is_floating:
        return []
    found = []
    for rule in rules.BY_ANCHOR[anchor.type]:
        if options.allows(rule.name) and view.has(spellings.op_types(rule.spelling, dtype)):
            keyed = tuple((name, anchor.get_attr(name)) for name in rule.keyed)
            found.append((rule, _forward_pattern(rule, dtype, keyed)))
    return sorted(found, key=lambda item: len(item[1].nodes), reverse=True)


def _extend(matcher, binding, names, used):
    """Returns a binding with all named outputs that exist; one may lead to another."""
    missing, progress = list(names), True
    while progress:
        progress = False
        for name in list(missing):
            extended = matcher.extend(binding, name, excluded=used)
            if extended:
                binding, progress = extended, True
                missing.remove(name)
    return binding


def _match(rule, traced, binding):
    """Turns a matcher's binding into what rules work with."""
    attrs = rule.default_attrs()
    for op in binding.nodes.values():
        attrs |= {name: op.get_attr(name) for name in rule.captured.get(op.type, ())}
    return rules.Match(
        nodes=tuple(op for _, op in sorted(binding.nodes.items())),
        operands=binding.operands,
        outputs={name: _tensor(traced, binding, name) for name in traced.outputs},
        attrs=attrs,
    )


def _tensor(traced, binding, name):
    """Returns the graph tensor that a pattern output stands for."""
    port = traced.outputs[name]
    return binding.nodes[port.node].outputs[port.port]


@functools.cache
def _forward_pattern(rule, dtype, keyed):
    """Traces a rule's stock code for operands of unknown size."""
    free = {(op_type, name) for op_type, group in rule.captured.items() for name in group}
    free -= {(rule.anchor, name) for name, _ in keyed}
    specs = {
        name: tf.TensorSpec([None] * rank, rule.operand_dtype(name, dtype))
        for name, rank in rule.operands.items()
    }
    stock = functools.partial(rule.stock, rule.default_attrs() | dict(keyed))
    return pattern.trace(stock, specs, rule.anchor, free)


@functools.lru_cache(maxsize=_JOINT_PATTERNS)
def _joint_pattern(rule, specs, attrs):
    """Traces a rule's stock code with its gradient, for operands of exactly these static shapes."""
    attrs = {name: list(value) if isinstance(value, tuple) else value for name, value in attrs}
    stock = functools.partial(rule.stock, attrs)
    return pattern.trace_joint(stock, dict(specs), rule.differentiable, rule.anchor)


def _hashable(attrs):
    return tuple((name, tuple(v) if isinstance(v, list) else v) for name, v in attrs.items())
