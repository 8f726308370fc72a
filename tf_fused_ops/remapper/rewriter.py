"""The pass: finds the rules' patterns in a graph and replaces them in place.

As in grappler's remapper, anchors are swept from the outputs to the inputs and the longest rule is
tried first, until a sweep changes nothing. A match is replaced only if `Candidate.objection` finds
nothing against it; what it finds goes into the report.
"""

import contextlib
import dataclasses
import fnmatch
import functools
import time

import tensorflow as tf
from tensorflow.python.eager import record

from tf_fused_ops.remapper import hiding, log, pattern, rules, source, spellings
from tf_fused_ops.remapper.candidate import Backward, Candidate
from tf_fused_ops.remapper.graph import GraphView
from tf_fused_ops.remapper.matcher import Matcher
from tf_fused_ops.remapper.report import Fusion, Refusal, Report

# Joint patterns are kept per rule, static shapes and attributes; a large model has a few hundred of
# these.
_JOINT_PATTERNS = 4096


@dataclasses.dataclass(frozen=True)
class RemapOptions:
    """What the remapper may do.

    Attributes:
        disable: Names of rules that are switched off; shell wildcards are allowed ("conv2d_*").
    """

    disable: tuple[str, ...] = ()

    def __post_init__(self):
        # Part of the key under which traces are kept, so a list will not do.
        object.__setattr__(self, "disable", tuple(self.disable))

    def allows(self, name):
        """Returns whether a rule is switched on."""
        return not any(fnmatch.fnmatchcase(name, entry) for entry in self.disable)


def remap_graph(graph, outputs, options=None, name=None):
    """Rewrites a graph in place.

    Args:
        graph: A tf.Graph, possibly still being traced.
        outputs: The tensors that leave it. Only what they and stateful ops need is looked at.
        options: RemapOptions.
        name: What the report calls the graph.

    Returns:
        (outputs, each replaced by its fused counterpart if it has one; Report).
    """
    start = time.perf_counter()
    rewriter = _Rewriter(graph, outputs, options or RemapOptions(), name or graph.name)
    rewriter.run()
    rewriter.report.seconds = time.perf_counter() - start
    return rewriter.outputs, rewriter.report


class _Rewriter:
    """The state of one run over one graph."""

    def __init__(self, graph, outputs, options, name):
        self.graph = graph
        self.outputs = list(outputs)
        self.report = Report(name)
        self._options = options
        self._refused = {}

    def run(self):
        """Sweeps until nothing changes."""
        if not any(op.type in rules.BY_ANCHOR for op in self.graph.get_operations()):
            return
        self.view = GraphView(self.graph, self.outputs)
        while self._sweep():
            pass
        self.report.refused = list(self._refused.values())
        if self.report.fused:
            hiding.hide(self.graph, self.view.leftovers(self.outputs))

    def _sweep(self):
        """Tries every anchor once; returns whether anything was replaced."""
        anchors = [op for op_type in rules.BY_ANCHOR for op in self.view.ops(op_type)]
        before = len(self.report.fused)
        for anchor in sorted(anchors, key=self.view.position.get, reverse=True):
            if self.view.is_live(anchor):
                self._try_rules(anchor)
        return len(self.report.fused) > before

    def _try_rules(self, anchor):
        """Replaces the longest legal match at an anchor."""
        for rule, traced in self._usable(anchor):
            binding = Matcher(traced, self.view, allow_mismatch=True).match(anchor, traced.outputs)
            if binding is None:
                continue
            match = _match(rule, traced, binding)
            candidates = [Candidate(rule, match, (), self.view)]
            if binding.mismatch:
                self._refuse(rule, match, binding.mismatch)
                continue
            if backward := self._backward(rule, match):
                candidates.insert(0, Candidate(rule, match, backward, self.view))
            objections = []
            for candidate in candidates:
                objections.append(candidate.objection())
                if objections[-1] is None:
                    self._replace(candidate)
                    return
            self._refuse(rule, match, objections[0])

    def _usable(self, anchor):
        """Returns (rule, forward pattern) pairs for an anchor, longest first."""
        dtype = anchor.outputs[0].dtype
        if not dtype.is_floating:
            return []
        found = []
        for rule in rules.BY_ANCHOR[anchor.type]:
            # The types that the spelling needs are compared first: most are not in the graph at
            # all.
            if self._options.allows(rule.name) and self.view.has(
                spellings.op_types(rule.spelling, dtype)
            ):
                keyed = tuple((name, anchor.get_attr(name)) for name in rule.keyed)
                found.append((rule, _forward_pattern(rule, dtype, keyed)))
        return sorted(found, key=lambda item: len(item[1].nodes), reverse=True)

    def _backward(self, rule, match):
        """Returns the gradient computations of a forward match that are part of the graph."""
        inside = set(match.nodes)
        values = [*match.operands.values(), *(t for op in match.nodes for t in op.outputs)]
        if all(op in inside for tensor in values for op, _ in self.view.consumers(tensor)):
            return ()
        specs = tuple((n, tf.TensorSpec(t.shape, t.dtype)) for n, t in match.operands.items())
        traced = _joint_pattern(rule, specs, _hashable(match.attrs))
        matcher = Matcher(traced, self.view)
        forward = matcher.match(match.node(rule.anchor), match.outputs)
        found, used = [], set()
        while forward is not None:
            binding = _extend(matcher, forward, traced.outputs.keys() - match.outputs.keys(), used)
            nodes = tuple(
                op for node, op in sorted(binding.nodes.items()) if node not in forward.nodes
            )
            if not nodes:
                break
            used.update(nodes)
            gradients = {
                name.removeprefix("d_"): binding.nodes[port.node].outputs[port.port]
                for name, port in traced.outputs.items()
                if name not in match.outputs and port.node in binding.nodes
            }
            found.append(Backward(nodes, binding.operands["dy"], gradients))
        return tuple(found)

    def _replace(self, candidate):
        """Emits the fused ops and redirects the users of what they replace."""
        rule, match = candidate.rule, candidate.match
        wanted = [candidate.wanted(backward) for backward in candidate.backward]
        messages = _messages(candidate, wanted)
        self.view.remove(candidate.nodes)
        with self._emitting(candidate, match.nodes):
            fused = rule.fuse(match, training=any(wanted))
        emitted = [self._swap(match.outputs, fused.outputs)]
        for backward, names in zip(candidate.backward, wanted, strict=True):
            if names:
                with self._emitting(candidate, backward.nodes):
                    gradients = rule.fuse_gradient(match, fused, backward.dy, names)
                emitted.append(self._swap(names, gradients))
        for message in messages:
            log.vlog(log.FUSION, message)
        nodes, names = (tuple(op.name for op in ops) for ops in (candidate.nodes, emitted))
        line = source.user_line(match.nodes[0])
        self.report.fused.append(Fusion(rule.name, nodes, names, messages, line))

    @contextlib.contextmanager
    def _emitting(self, candidate, nodes):
        """New ops replace `nodes`: same device, same control inputs, unseen by tapes."""
        with (
            self.graph.as_default(),
            tf.control_dependencies(None),
            tf.device(None),
            tf.device(nodes[0].device or None),
            tf.control_dependencies(candidate.controls(nodes)),
            record.stop_recording(),
        ):
            yield

    def _swap(self, old, new):
        """Redirects old tensors to new ones by name; returns the op that makes these."""
        for name, tensor in old.items():
            new[name].set_shape(tensor.shape)
            self.outputs = [new[name] if output is tensor else output for output in self.outputs]
            self.view.redirect(tensor, new[name])
        op = next(iter(new.values())).op
        self.view.adopt(op)
        return op

    def _refuse(self, rule, match, reason):
        root = match.outputs["y"].op
        if (rule.name, root) not in self._refused:
            nodes = tuple(op.name for op in match.nodes)
            self._refused[rule.name, root] = Refusal(rule.name, nodes, reason)
            log.vlog(
                log.NEAR_MISS, f"Not fused: {rule.describe(match)[0]} at {root.name}: {reason}"
            )


def _extend(matcher, binding, names, used):
    """Returns a binding with all named outputs that exist; one may lead to another."""
    missing = sorted(names)
    progress = True
    while progress:
        progress = False
        for name in list(missing):
            extended = matcher.extend(binding, name, excluded=used)
            if extended:
                binding, progress = extended, True
                missing.remove(name)
    return binding


def _messages(candidate, wanted):
    """Returns the log lines of a replacement: the forward pass, then each backward pass."""
    what, which = candidate.rule.describe(candidate.match)
    messages = [f"Fuse {what}: {which}"]
    for tensors in filter(None, wanted):
        gradients = dict.fromkeys(candidate.rule.differentiable, "<none>")
        gradients |= {name: tensor.op.name for name, tensor in tensors.items()}
        named = " ".join(f"{name}={op}" for name, op in gradients.items())
        messages.append(f"Fuse gradient of {what}: {named}")
    return tuple(messages)


def _match(rule, traced, binding):
    """Turns a matcher's binding into what rules work with."""
    attrs = {name: value for group in rule.captured.values() for name, value in group.items()}
    for op in binding.nodes.values():
        attrs |= {name: op.get_attr(name) for name in rule.captured.get(op.type, ())}
    return rules.Match(
        nodes=tuple(op for _, op in sorted(binding.nodes.items())),
        operands=binding.operands,
        outputs={
            n: binding.nodes[port.node].outputs[port.port] for n, port in traced.outputs.items()
        },
        attrs=attrs,
    )


@functools.cache
def _forward_pattern(rule, dtype, keyed):
    """Traces a rule's stock code for operands of unknown size."""
    attrs = {name: value for group in rule.captured.values() for name, value in group.items()}
    free = {(op_type, name) for op_type, group in rule.captured.items() for name in group}
    free -= {(rule.anchor, name) for name, _ in keyed}
    specs = {
        name: tf.TensorSpec([None] * rank, rule.operand_dtype(name, dtype))
        for name, rank in rule.operands.items()
    }
    stock = functools.partial(rule.stock, attrs | dict(keyed))
    return pattern.trace(stock, specs, rule.anchor, free)


@functools.lru_cache(maxsize=_JOINT_PATTERNS)
def _joint_pattern(rule, specs, attrs):
    """Traces a rule's stock code with its gradient, for operands of exactly these static shapes."""
    attrs = {name: list(value) if isinstance(value, tuple) else value for name, value in attrs}
    stock = functools.partial(rule.stock, attrs)
    return pattern.trace_joint(stock, dict(specs), rule.differentiable, rule.anchor)


def _hashable(attrs):
    return tuple((name, tuple(v) if isinstance(v, list) else v) for name, v in attrs.items())
