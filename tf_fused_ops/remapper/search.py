"""Finds the rules' patterns in a graph: forward passes, and the gradients that belong to them.

Forward patterns do not depend on sizes and are traced once per dtype. What autodiff makes of a rule
does depend on them, so the pattern of forward and backward is traced for exactly the shapes and
attributes of a forward match.
"""

import dataclasses
import functools
import itertools

import tensorflow as tf

from tf_fused_ops.remapper import pattern, rules, spellings
from tf_fused_ops.remapper.candidate import Backward
from tf_fused_ops.remapper.matcher import Matcher
from tf_fused_ops.remapper.rule import Match, Rule

# Stand for sizes while a joint pattern is traced: whatever constant they divide is made of sizes.
_PRIMES = (11, 13, 17, 19, 23, 29, 31)
# The operand of a backward pass that is its forward pass's pre-activation or output.
_KEPT = "kept"
# Joint patterns in memory; a large model has a few hundred different layers.
_JOINT_PATTERNS = 4096


@dataclasses.dataclass(frozen=True)
class Branch:
    """A rule and those that add to it.

    Attributes:
        rule: The Rule.
        usable: Whether it is to be matched for its own sake.
        longer: Branches, one per rule that adds to this one.
    """

    rule: Rule
    usable: bool
    longer: tuple


def usable_rules(view, op_type, dtype, options, turn):
    """Returns the rules that can match in a graph at an anchor, as far as the op types in it tell.

    Args:
        view: A GraphView.
        op_type: The anchor's type.
        dtype: Its output's tf.DType.
        options: RemapOptions.
        turn: When those have their turn that are to be returned; see `rule`.

    Returns:
        A tuple of Branch, one per rule that adds to no other.
    """
    if not dtype.is_floating:
        return ()
    groups = rules.by_anchor(options.added_rules, turn)[op_type]

    cores = (core for core in groups if core.core is core)
    return tuple(_branches(view, groups, cores, dtype, options))


# Not within `usable_rules`: a function that knows itself would keep the view until it is collected.
def _branches(view, groups, found, dtype, options):
    """Yields a Branch for each of some rules that can match."""
    for rule in found:
        if _has_activation(view, rule, dtype):
            more = (other for other in groups.get(rule, ()) if other is not rule)
            longer = tuple(_branches(view, groups, more, dtype, options))
            usable = rule in groups[rule.core] and options.allows(rule.name)
            if usable or longer:
                yield Branch(rule, usable, longer)


def _has_activation(view, rule, dtype):
    """Returns whether a graph has all op types of a rule's activation."""
    if rule.activation is spellings.NONE:
        return True
    if not any(view.has([op_type]) for op_type in rule.activation.ops):
        return False
    return view.has(spellings.traced(rule.activation, rule.spelling, dtype).op_types)


def forward_matches(view, anchor, branches):
    """Returns what fits at an anchor, longest first.

    Args:
        view: A GraphView.
        anchor: The op at which to look.
        branches: What `usable_rules` returned for such an anchor.

    Returns:
        A list of (Rule, Match, the one constant or attribute that differs in words or None).
    """
    families = (_family_matches(view, anchor, branch) for branch in branches)
    found = itertools.chain.from_iterable(families)
    return sorted(found, key=lambda item: len(item[1].nodes), reverse=True)


def _family_matches(view, anchor, branch):
    """Yields what `forward_matches` returns for the rules of a branch."""
    dtype = anchor.outputs[0].dtype
    for variant in branch.rule.variants(view, anchor):
        traced = _forward_pattern(branch.rule, dtype, _hashable(variant))
        binding = Matcher(traced, view, allow_mismatch=True).match(anchor, traced.outputs)
        if binding is not None:
            yield from _longer_matches(view, dtype, branch, variant, traced, binding)
            if binding.mismatch is None and not any(map(variant.get, branch.rule.optional)):
                break


def _longer_matches(view, dtype, branch, variant, traced, binding):
    """Yields what `forward_matches` returns for a branch whose rule's pattern is bound."""
    if branch.usable:
        yield branch.rule, _match(view, branch.rule, variant, traced, binding), binding.mismatch
    if not branch.longer:
        return
    readers = {view.types[op] for op, _ in view.consumers(_tensor(traced, binding, "y"))}
    for longer in branch.longer:
        rule = longer.rule
        for form in ({},) if rule.adds_activation else rule.forms(view):
            traced = _forward_pattern(rule, dtype, _hashable(variant | form))
            if not traced.entry <= readers:
                continue
            # The code of the core runs first, so its nodes are the first ones.
            found = Matcher(traced, view, allow_mismatch=True).resume(binding, traced.outputs)
            if found is not None:
                yield from _longer_matches(view, dtype, longer, variant | form, traced, found)


def backward_matches(view, rule, match):
    """Returns the gradient computations of a forward match that are part of the graph.

    Args:
        view: A GraphView.
        rule: The rule that was matched.
        match: Its Match.

    Returns:
        A tuple of Backward, one per incoming gradient.
    """
    if not rule.differentiable:
        return ()
    inside = set(match.nodes)
    values = [*match.operands.values(), *(t for op in match.nodes for t in op.outputs)]
    if all(op in inside for tensor in values for op, _ in view.consumers(tensor)):
        return ()
    specs = tuple((n, tf.TensorSpec(t.shape, t.dtype)) for n, t in match.operands.items())
    if any(spec.shape.rank is None for _, spec in specs):
        return ()
    traced = _joint_pattern(rule, specs, _hashable(match.attrs))
    matcher = Matcher(traced, view)
    forward = matcher.assume(match.nodes, match.operands, match.outputs)
    forward = forward or matcher.match(match.node(rule.anchor), match.outputs)
    later = {node.type for node in traced.nodes[len(match.nodes) :]}
    # The gradient with the longest way leaves least choice for the others.
    names = sorted(traced.outputs.keys() - match.outputs.keys())
    names.sort(key=lambda name: len(traced.ancestors([name])), reverse=True)
    found, used = [], set()
    while forward is not None and any(
        op not in inside and view.types[op] in later and op not in used
        for tensor in values
        for op, _ in view.consumers(tensor)
    ):
        binding = _extend(matcher, forward, names, used)
        nodes = [op for node, op in sorted(binding.nodes.items()) if node not in forward.nodes]
        if not nodes:
            break
        used.update(nodes)
        one = _backward(matcher, traced, binding, names, nodes)
        # Layers with the same input have gradients of the filters of the same form.
        shared = any(
            op not in nodes and view.types[op] in later for op, _ in view.consumers(one.dy)
        )
        if not (found and shared and len(one.gradients) < len(found[0].gradients)):
            found.append(one)
    return tuple(found)


def kept_tensor(view, rule, match):
    """Returns the tensor of a stock forward pass that the fused gradient op takes, None if none."""
    nodes = rule.kept_nodes(match.attrs, match.outputs["y"].dtype)
    tensors = [match.nodes[node].outputs[0] for node in nodes]
    return min(tensors, key=view.is_withheld, default=None)


def lone_backward_matches(view, op, group):
    """Returns the backward passes at a stock gradient op whose forward pass need not be there.

    Of the forward pass they read the operands and the one tensor that the fused gradient op takes,
    too. So both compute the same of them, whatever they are.

    Args:
        view: A GraphView.
        op: The op at which to look.
        group: Rules with `gradient_ops` of this type.

    Returns:
        A list of (Rule, Match of the operands, Backward, what the fused gradient op takes of the
        forward pass or None), longest first.
    """
    found = []
    for rule in group:
        for attrs, shapes in rule.backward_variants(view, op):
            specs = tuple((n, tf.TensorSpec(s, op.outputs[0].dtype)) for n, s in shapes.items())
            traced = _backward_pattern(rule, specs, _hashable(attrs), rule.gradient_ops[op.type])
            if traced is None:
                continue
            matcher = Matcher(traced, view)
            start = matcher.match(op, [f"d_{rule.gradient_ops[op.type]}"])
            if start is None:
                continue
            binding = _extend(matcher, start, list(traced.outputs), set())
            nodes = [node for _, node in sorted(binding.nodes.items())]
            backward = _backward(matcher, traced, binding, traced.outputs, nodes)
            operands = {name: t for name, t in binding.operands.items() if name in rule.operands}
            match = Match(tuple(nodes), operands, {"y": op.outputs[0]}, attrs)
            found.append((rule, match, backward, binding.operands.get(_KEPT)))
    return sorted(found, key=lambda item: len(item[1].nodes), reverse=True)


def _backward(matcher, traced, binding, names, nodes):
    """Returns the Backward of the nodes that a binding has found."""
    gradients = {
        name.removeprefix("d_"): _tensor(traced, binding, name)
        for name in names
        if traced.outputs[name].node in binding.nodes
    }
    spare = {name: matcher.spare(binding, traced.outputs[f"d_{name}"].node) for name in gradients}
    return Backward(tuple(nodes), binding.operands["dy"], gradients, spare)


def _extend(matcher, binding, names, used):
    """Returns a binding with all named outputs that exist; one may lead to another."""
    everything = matcher.extend(binding, names, excluded=used)
    if everything:
        return everything
    missing, progress = list(names), True
    while progress:
        progress = False
        for name in list(missing):
            extended = matcher.extend(binding, [name], excluded=used)
            if extended:
                binding, progress = extended, True
                missing.remove(name)
    return binding


def _match(view, rule, variant, traced, binding):
    """Turns a matcher's binding into what rules work with."""
    nodes = tuple(op for _, op in sorted(binding.nodes.items()))
    attrs = rule.default_attrs() | variant
    for op in nodes:
        attrs |= {name: view.attr(op, name) for name in rule.captured.get(view.types[op], ())}
    attrs |= {name: value.tolist() for name, value in binding.parameters.items()}
    return Match(
        nodes=nodes,
        operands=binding.operands,
        outputs={name: _tensor(traced, binding, name) for name in traced.outputs},
        attrs=attrs | rule.observed(nodes, binding.operands, attrs),
    )


def _tensor(traced, binding, name):
    """Returns the graph tensor that a pattern output stands for."""
    port = traced.outputs[name]
    return binding.nodes[port.node].outputs[port.port]


@functools.cache
def _forward_pattern(rule, dtype, variant):
    """Returns the pattern of a variant of a rule's stock code for operands of unknown size."""
    if rule.added:
        chain = _forward_pattern(rule.core, dtype, _split(variant, rule.added_attrs)[0])
        return pattern.join(chain, _added_pattern(rule, chain.spec.dtype, variant))
    attrs = rule.default_attrs() | _unhashed(variant)
    free = {(op_type, name) for op_type, group in rule.captured.items() for name in group}
    free -= {(rule.anchor, name) for name, _ in variant}
    specs = {
        name: tf.TensorSpec(rule.operand_shape(name, attrs), rule.operand_dtype(name, dtype, attrs))
        for name in rule.present(attrs)
    }
    parameters = {
        name: tf.TensorSpec([None] * rank, known or dtype)
        for name, (rank, known) in rule.parameters(attrs).items()
    }

    def stock(constants, **operands):
        return rule.stock(attrs | constants, **operands)

    return pattern.trace(stock, specs, rule.anchor, free, parameters)


def _added_pattern(rule, dtype, variant):
    """Returns the pattern of what a rule's stock code does after that of its core."""
    if rule.adds_activation:
        return spellings.traced(rule.activation, rule.spelling, dtype)
    attrs = rule.default_attrs() | dict(variant)
    added = tuple((name, attrs[name]) for name in rule.added_attrs)
    return _traced(rule.added, ("z", *rule.added_operands), dtype, added)


@functools.cache
def _traced(code, names, dtype, attrs):
    """Returns the pattern of what rules add to their cores, for operands of unknown shape."""

    def stock(_, z, **operands):
        return {"y": code(z, **operands, **dict(attrs))}

    return pattern.trace(stock, {name: tf.TensorSpec(None, dtype) for name in names})


@functools.lru_cache(maxsize=_JOINT_PATTERNS)
def _joint_pattern(rule, specs, attrs):
    """Returns the pattern of a rule's stock code with its gradient, for operands of exactly these
    static shapes."""
    shapes = {name: spec.shape.as_list() for name, spec in specs if name not in rule.unscaled}
    # In order of appearance, so that layers that differ in their sizes alone share a pattern.
    sizes = dict.fromkeys(n for shape in shapes.values() for n in shape if n not in (None, 0, 1))
    if len(sizes) > len(_PRIMES) or not rule.scalable(_unhashed(attrs), shapes):
        return pattern.matchable(_trace_joint(rule, specs, attrs))
    primes = dict(zip(sizes, _PRIMES, strict=False))
    scaled = tuple(
        (name, tf.TensorSpec([primes.get(size, size) for size in spec.shape], spec.dtype))
        if name in shapes
        else (name, spec)
        for name, spec in specs
    )
    try:
        joint = _trace_joint(rule, scaled, _hashable(rule.scale(_unhashed(attrs), primes)))
    except ValueError:  # one size is a product of others
        return pattern.matchable(_trace_joint(rule, specs, attrs))
    traced = pattern.matchable(joint)
    return pattern.rescale(traced, {prime: size for size, prime in primes.items()})


@functools.lru_cache(maxsize=_JOINT_PATTERNS)
def _trace_joint(rule, specs, attrs):
    """Traces a rule's stock code with its gradient."""
    if rule.added:
        (specs, added_specs), (attrs, added_attrs) = (
            _split(specs, rule.added_operands),
            _split(attrs, rule.added_attrs),
        )
        core = _trace_joint(rule.core, specs, attrs)
        specs = (("z", core.spec), *added_specs)
        return pattern.join(core, _added_joint(rule.added, specs, added_attrs))
    stock = functools.partial(rule.stock, _unhashed(attrs))
    specs = dict(specs)
    differentiable = [name for name in rule.differentiable if name in specs]
    return pattern.trace_joint(stock, specs, differentiable, rule.anchor)


@functools.lru_cache(maxsize=_JOINT_PATTERNS)
def _added_joint(code, specs, attrs):
    """Traces what rules add to their cores' stock code, with its gradient."""

    def stock(z, **operands):
        return {"y": code(z, **operands, **_unhashed(attrs))}

    specs = dict(specs)
    return pattern.trace_joint(stock, specs, specs, None)


@functools.lru_cache(maxsize=_JOINT_PATTERNS)
def _backward_pattern(rule, specs, attrs, name):
    """Returns the pattern of the backward pass alone, beginning at the gradient of an operand; None
    if it reads more of the forward pass than the fused gradient op."""
    try:
        joint = _joint_pattern(rule, specs, attrs)
    except ValueError:  # the shapes do not fit each other
        return None
    forward = len(joint.ancestors(["y"]))
    kept = rule.kept_nodes(_unhashed(attrs), specs[0][1].dtype)
    given = {pattern.Port(forward + node, 0): _KEPT for node in kept}
    return pattern.backward_part(joint, forward, given, f"d_{name}")


def _split(items, names):
    """Returns the (name, value) pairs of all other names, and those of these."""
    inside = tuple(item for item in items if item[0] in names)
    return tuple(item for item in items if item[0] not in names), inside


def _hashable(attrs):
    return tuple((name, _frozen(value)) for name, value in attrs.items())


def _unhashed(attrs):
    return {name: _thawed(value) for name, value in attrs}


def _frozen(value):
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def _thawed(value):
    return list(map(_thawed, value)) if isinstance(value, tuple) else value
