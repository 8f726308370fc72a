"""The pass: finds the rules' patterns in a graph and replaces them in place.

As in grappler's remapper, anchors are swept from the outputs to the inputs and the longest rule is
tried first, until a sweep changes nothing. A match is replaced only if `Candidate.objection` finds
nothing against it; what it finds goes into the report.
"""

import contextlib
import dataclasses
import fnmatch
import functools
import gc
import time

import tensorflow as tf

from tf_fused_ops._devices import device_type
from tf_fused_ops.remapper import (
    alone,
    caches,
    compiled_convs,
    conv_moments,
    custom_gradients,
    depthwise,
    dilated,
    emission,
    hiding,
    log,
    rules,
    search,
    slices,
    source,
    variable_updates,
)
from tf_fused_ops.remapper.candidate import Candidate
from tf_fused_ops.remapper.convolution import GROUPED
from tf_fused_ops.remapper.graph import GraphView
from tf_fused_ops.remapper.report import Fusion, Refusal, Report
from tf_fused_ops.remapper.rule import FIRST, LAST, TOGETHER, Rule


@dataclasses.dataclass(frozen=True)
class RemapOptions:
    """What the remapper may do.

    Attributes:
        disable: Names of rules that are switched off; shell wildcards are allowed ("conv2d_*").
        rules: Rules of one's own, instances of `Rule`, that are tried beside those of the table.
        winograd: Whether convolutions may be computed by Winograd's algorithm, in less time and
            with larger rounding errors; see `tf_fused_ops.conv2d_bias_act`. Those without bias and
            activation, too.

    Raises:
        TypeError: One of `rules` is not a `Rule`.
    """

    disable: tuple[str, ...] = ()
    rules: tuple[Rule, ...] = ()
    winograd: bool = False

    def __post_init__(self):
        # Part of the key under which traces are kept, so a list will not do.
        object.__setattr__(self, "disable", tuple(self.disable))
        object.__setattr__(self, "rules", tuple(self.rules))
        object.__setattr__(self, "winograd", bool(self.winograd))
        for rule in self.rules:
            if not isinstance(rule, Rule):
                raise TypeError(
                    f"rules must be instances of tf_fused_ops.remapper.Rule; got {rule}"
                )

    @property
    def added_rules(self):
        """The rules that are tried beside those of the table."""
        return (*self.rules, *([rules.WINOGRAD] if self.winograd else []))

    def allows(self, name):
        """Returns whether a rule is switched on."""
        return not any(fnmatch.fnmatchcase(name, entry) for entry in self.disable)


def remap_graph(
    graph,
    outputs,
    options=None,
    name=None,
    identify_gradient=custom_gradients.identify,
    withheld=(),
    in_program_order=False,
    find_function=None,
):
    """Rewrites a graph in place.

    Args:
        graph: A tf.Graph, possibly still being traced.
        outputs: The tensors that leave it. Only what they and stateful ops need is looked at.
        options: RemapOptions.
        name: What the report calls the graph.
        identify_gradient: What tells the overridden gradients of ops apart: one of the functions of
            `custom_gradients`.
        withheld: Tensors that fused ops must not read.
        in_program_order: Whether the ops were made in the order in which they take effect, and get
            control dependencies that keep it only later.
        find_function: What `compiled_convs.inline` finds functions by, if not the graph's own.

    Returns:
        (outputs, each replaced by its fused counterpart if it has one; Report).
    """
    start = time.perf_counter()
    options = options or RemapOptions()
    view = functools.partial(GraphView, identify_gradient=identify_gradient, withheld=withheld)
    find_function = find_function or graph._get_function
    rewriter = _Rewriter(graph, outputs, options, name or graph.name, view, find_function)
    with _collector_paused():
        outputs, report = rewriter.run(in_program_order)
        # So that there is little to look through when the collector goes on.
        del rewriter
    report.seconds = time.perf_counter() - start
    return outputs, report


class _Rewriter:
    """The state of one run over one graph."""

    def __init__(self, graph, outputs, options, name, make_view, find_function):
        self.graph = graph
        self.outputs = list(outputs)
        self.report = Report(name)
        self._options = options
        self._make_view = make_view
        self._find_function = find_function
        self._gradient_ops = rules.by_gradient_op(options.added_rules)
        self._groups = {}
        self._refused = {}
        # Backward passes that could not be replaced with their forward pass, and why.
        self._left = []
        # Dilated convolutions, and gradients of such, -> by which rule they are there.
        self._dilated = {}
        self._successors = {}

    def run(self, in_program_order):
        """Sweeps with the rules of each turn until nothing changes, then once for updates of
        variables; returns what `remap_graph` does."""
        begins = set(self._gradient_ops).union(*map(self._anchors, (FIRST, TOGETHER, LAST)))
        updates = variable_updates.ANCHORS if in_program_order else ()
        begins |= {*updates, caches.UPDATE}
        if not any(
            op.type in begins or op.type in depthwise.OPS or compiled_convs.is_compiled_call(op)
            for op in self.graph.get_operations()
        ):
            return self.outputs, self.report
        self.view = self._make_view(self.graph, self.outputs)
        with emission.outside(self.graph):
            inlined = compiled_convs.inline(self.view, self._options, self._find_function)
            replaced = self._renew_view(inlined) if inlined else []
            regrouped = depthwise.regroup(self.view, self._options)
            if self.view.has([caches.UPDATE]) and self._options.allows(caches.UPDATE_CACHE.name):
                for stack in self._upwards([caches.UPDATE_CACHE.anchor]):
                    self._try(caches.candidate(self.view, stack))
            while self._sweep(FIRST):
                pass
            while self._sweep(TOGETHER) or self._sweep_backward():
                pass
            self.view.bury()
            if self.view.has([slices.PADDED.anchor]) and self._options.allows(slices.JOINED.name):
                for add in self._upwards([slices.JOINED.anchor]):
                    self._try(slices.candidate(self.view, add))
            while self._sweep(LAST):
                pass
            for op in filter(self.view.is_live, [*inlined, *regrouped]):
                self._fuse_alone(op, GROUPED.name, "grouped")
            for op in filter(self.view.is_live, self._dilated):
                self._fuse_alone(op, f"{self._dilated[op]}_alone", "dilated")
            for anchor in self._upwards(updates):
                self._try_update(anchor)
        self.outputs = self.view.outputs
        for candidate, reason in self._left:
            if all(map(self.view.is_live, candidate.nodes)):
                self._refuse(candidate, reason)
        self.report.refused = list(self._refused.values())
        if self.report.fused or replaced:
            # They read what is replaced now.
            hiding.hide(self.graph, [*replaced, *self.view.leftovers()], self._successors)
        return self.outputs, self.report

    def _renew_view(self, inlined):
        """Indexes the graph anew, with inlined ops where those are in whose stead they are.

        Args:
            inlined: {inlined op: the op in whose stead it is}.

        Returns:
            The latter, consumers before producers.
        """
        places = self.view.position
        replaced = sorted(set(inlined.values()), key=places.get, reverse=True)
        places |= {op: places[old] for op, old in inlined.items()}
        self.view = self._make_view(self.graph, self.view.outputs, places=places)
        return replaced

    def _anchors(self, turn):
        return rules.by_anchor(self._options.added_rules, turn).keys()

    def _sweep(self, turn):
        """Tries every anchor once; returns whether anything was replaced."""
        before = len(self.report.fused)
        for anchor in self._upwards(self._anchors(turn)):
            self._try_rules(anchor, turn)
        return len(self.report.fused) > before

    def _sweep_backward(self):
        """Tries every stock gradient op that is left; returns whether anything was replaced."""
        before = len(self.report.fused)
        for op in self._upwards(self._gradient_ops):
            group = self._gradient_ops[op.type]
            found = search.lone_backward_matches(self.view, op, group)
            for rule, match, backward, kept in found:
                if self._try_backward(Candidate(rule, match, (backward,), self.view, False, kept)):
                    break
        return len(self.report.fused) > before

    def _upwards(self, op_types):
        """Yields the ops of some types that are live, consumers first."""
        found = [op for op_type in op_types for op in self.view.ops(op_type)]
        for op in sorted(found, key=self.view.position.get, reverse=True):
            if self.view.is_live(op):
                yield op

    def _try_rules(self, anchor, turn, normalized=None):
        """Replaces the longest legal match at an anchor.

        Args:
            anchor: An op.
            turn: That of the rules to try.
            normalized: A tensor whose moments are wanted if it is the match's output.
        """
        for rule, match, mismatch in search.forward_matches(
            self.view, anchor, self._usable(anchor.type, anchor.outputs[0].dtype, turn)
        ):
            if mismatch:
                self._refuse(Candidate(rule, match, (), self.view), mismatch)
                continue
            backward = search.backward_matches(self.view, rule, match)
            candidate, reason = self._legal(rule, match, backward)
            if reason is None:
                self._replace(candidate, normalized)
                return
            self._refuse(candidate, reason)
            # Without an activation, a shorter chain has the same gradient op.
            if rule.backward_alone and rule.activation.name != "none":
                kept = search.kept_tensor(self.view, rule, match)
                for one in backward:
                    self._try_backward(Candidate(rule, match, (one,), self.view, False, kept))

    def _legal(self, rule, match, backward):
        """Returns the Candidate with as many of the backward passes as may be replaced, and what
        there is to say against it.

        A gradient of the filters does not tell whose it is: layers with the same input have such
        gradients of the same form.
        """
        candidate = Candidate(rule, match, backward, self.view)
        reason = candidate.objection()
        if reason is None or not backward:
            return candidate, reason
        alone = {one: Candidate(rule, match, (one,), self.view).objection() for one in backward}
        for some in ([one for one, found in alone.items() if found is None], []):
            fewer = Candidate(rule, match, tuple(some), self.view)
            if fewer.objection() is None:
                self._left += [
                    (Candidate(rule, match, (one,), self.view, False), found or reason)
                    for one, found in alone.items()
                    if one not in some
                ]
                return fewer, None
        return candidate, reason

    def _try_backward(self, candidate):
        """Replaces a backward pass whose forward pass stays as it is; returns whether it did."""
        (backward,) = candidate.backward
        # One op is no chain, but what rules for training alone are for.
        no_chain = len(backward.nodes) == 1 and candidate.rule.forward_alone
        if no_chain or not candidate.wanted(backward):
            return False
        if not all(map(self._options.allows, (candidate.rule.name, candidate.name))):
            return False
        reason = candidate.objection()
        if reason:
            self._refuse(candidate, reason)
        else:
            self._replace(candidate)
        return reason is None

    def _try(self, candidate):
        """Makes a replacement that is no pattern's, if there is one; see `caches` and `slices`."""
        if candidate is None:
            return
        reason = candidate.objection()
        if reason:
            self._refuse(candidate, reason)
        else:
            self._replace(candidate)

    def _try_update(self, anchor):
        """Replaces the update of a variable that ends at an op."""
        refused = []
        for candidate in variable_updates.candidates(self.view, anchor, self._options):
            reason = candidate.objection()
            if reason is None:
                self._replace_update(candidate)
                return
            refused.append((candidate, reason))
        # Of a rule with ops for several devices, why the last one is none.
        alike = [item for item in refused if item[0].rule.name == refused[0][0].rule.name]
        for candidate, reason in alike[-1:]:
            self._refuse(candidate, reason)

    def _replace_update(self, candidate):
        rule, match = candidate.rule, candidate.match
        message = "Fuse {}: {}".format(*rule.describe(match))
        self.view.remove(candidate.nodes)
        with emission.emitting(candidate.nodes[-1], candidate.controls(candidate.nodes)):
            fused = rule.fuse(match, training=False)
        replaced = [op for op in candidate.nodes if not op.outputs]
        self.view.adopt(fused, replaced[0])
        self._successors |= dict.fromkeys(replaced, fused)
        self._record(candidate, (message,), (fused.name,), 0)

    def _fuse_alone(self, op, name, kind):
        """Replaces an op that no rule has taken and that stock may have no kernel for.

        Args:
            op: A convolution or gradient of one that is none of the graph that was given.
            name: The rule by which it got there.
            kind: What kind of convolution it is, in words.
        """
        self.view.remove([op])
        with emission.emitting(op, op.control_inputs):
            tensor, message = alone.fuse_alone(op, kind)
        self.view.swap([(op.outputs[0], tensor)])
        log.vlog(log.FUSION, message)
        gradients, origin = int(op.type in alone.SIZES), source.Origin(op)
        name = f"{name}_grad" if gradients else name
        self.report.fused.append(
            Fusion(name, (op.name,), (tensor.op.name,), (message,), gradients, origin)
        )

    def _record(self, candidate, messages, fused, gradients):
        """Puts a replacement into the log and the report."""
        for message in messages:
            log.vlog(log.FUSION, message)
        nodes, origin = candidate.nodes, source.Origin(candidate.match.nodes[0])
        names = tuple(op.name for op in nodes)
        self.report.fused.append(Fusion(candidate.name, names, fused, messages, gradients, origin))

    def _usable(self, *kind):
        if kind not in self._groups:
            op_type, dtype, turn = kind
            self._groups[kind] = search.usable_rules(self.view, op_type, dtype, self._options, turn)
        return self._groups[kind]

    def _replace(self, candidate, normalized=None):
        """Emits the fused ops and redirects the users of what they replace."""
        rule, match = candidate.rule, self._complete(candidate, normalized)
        wanted = [candidate.wanted(backward) for backward in candidate.backward]
        messages = _messages(candidate, wanted)
        self.view.remove(candidate.nodes)
        with emission.emitting(candidate.nodes[0], candidate.controls(candidate.forward_nodes)):
            if candidate.forward:
                taken = match.separated() if any(wanted) and rule.autodiff else match
                fused = rule.fuse(taken, training=any(wanted))
            else:
                taken, fused = match, rule.stock_forward(match, candidate.kept)
        for op in candidate.shape_users:
            self.view.remove([op])
            with emission.emitting(op, op.control_inputs):
                shape = rule.inner_shape(match, op.outputs[0].dtype)
            self.view.swap([(op.outputs[0], shape)])
        emitted = []
        if candidate.forward:
            self._swap(match.outputs, fused.outputs)
            emitted += _makers(fused.outputs)
        # The gradient of an output may be that output itself.
        moved = {tensor.ref(): fused.outputs[name] for name, tensor in match.outputs.items()}
        for backward, names in zip(candidate.backward, wanted, strict=True):
            if names:
                with emission.emitting(backward.nodes[0], candidate.controls(backward.nodes)):
                    dy = moved.get(backward.dy.ref(), backward.dy)
                    gradients = rule.fuse_gradient(taken, fused, dy, names)
                    for name in gradients.keys() & match.operands.keys():
                        if not gradients[name].shape.is_fully_defined():
                            gradients[name].set_shape(match.operands[name].shape)
                    emitted += _makers(gradients)
                    for name, others in backward.spare.items():
                        if others and name in gradients:
                            gradients[name] = tf.add_n([gradients[name], *others])
                self._swap(names, gradients)
        if rule in dilated.RULES and device_type(candidate.root.device) == "CPU":
            self._dilated |= dict.fromkeys(emitted, rule.name)
        names = tuple(op.name for op in emitted)
        self._record(candidate, messages, names, sum(map(bool, wanted)))
        if match.attrs["moments"] is not None:
            pair = conv_moments.joined(match.operands["x"], fused.outputs["y"])
            message = "Fuse {}: {}".format(*conv_moments.CONV_MOMENTS.describe(pair))
            pair = Candidate(conv_moments.CONV_MOMENTS, pair, (), self.view)
            self._record(pair, (message,), tuple(op.name for op in pair.nodes), 0)

    def _complete(self, candidate, normalized):
        """Returns a candidate's match with the attributes that are needed when ops are emitted.

        A convolution with bias whose output is normalized is fused first, to yield the moments. If
        both may be replaced, so may they together: what depends on either and leads to either
        would also lead from the normalization to what it reads.
        """
        match, moments = candidate.match, None
        x = candidate.rule.takes_moments_of(match) if candidate.forward else None
        conv = None if x is None else conv_moments.convolution(self.view, x, self._options)
        if conv is not None:
            reader, port = next(use for use in self.view.consumers(x) if use[0] in match.nodes)
            self._try_rules(conv, TOGETHER, normalized=x)
            fused = self.view.inputs[reader][port]
            match, moments = match.reading(fused, instead_of=x), conv_moments.moments(fused)
        attrs = {
            "winograd": self._options.winograd,
            "take_moments": match.outputs["y"] is normalized,
            "moments": moments,
        }
        return dataclasses.replace(match, attrs=attrs | match.attrs)

    def _swap(self, old, new):
        """Replaces old tensors by the new ones of the same names."""
        self.view.swap([(tensor, new[name]) for name, tensor in old.items()])

    def _refuse(self, candidate, reason):
        name, root = candidate.name, candidate.root
        if (name, root) not in self._refused:
            nodes = tuple(op.name for op in candidate.forward_nodes or candidate.nodes)
            self._refused[name, root] = Refusal(name, nodes, reason)
            label = candidate.rule.label(candidate.match)
            log.vlog(log.NEAR_MISS, f"Not fused: {label} at {root.name}: {reason}")


@contextlib.contextmanager
def _collector_paused():
    """Puts garbage collection off, and restores it however the pass ends.

    Hardly anything becomes garbage, but so many objects are made that Python would look through all
    there are: 0.4 s of the 2.2 s that the pass took in the first trace of a ResNet-152 train step.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _makers(tensors):
    """Returns the fused ops that the named tensors come from."""
    made = list(dict.fromkeys(_before_reshaping(tensor.op) for tensor in tensors.values()))
    return [op for op in made if op.type.startswith("TfFusedOps>")] or made


def _before_reshaping(op):
    """Returns the op whose result another one has made narrower, or summed up to an operand's
    shape."""
    while op.type in ("Squeeze", "Reshape", "Sum", "Cast"):
        op = op.inputs[0].op
    return op


def _messages(candidate, wanted):
    """Returns the log lines of a replacement: the forward pass, then each backward pass."""
    what, messages = candidate.rule.label(candidate.match), []
    if candidate.forward:
        messages.append("Fuse {}: {}".format(*candidate.rule.describe(candidate.match)))
    for tensors in filter(None, wanted):
        gradients = dict.fromkeys(candidate.rule.differentiable, "<none>")
        gradients |= {name: tensor.op.name for name, tensor in tensors.items()}
        named = " ".join(f"{name}={op}" for name, op in gradients.items())
        messages.append(f"Fuse gradient of {what}: {named}")
    return tuple(messages)
