"""What the remapper did to a graph, and why it left the rest."""

import collections
import dataclasses

from tf_fused_ops.remapper.source import Origin


@dataclasses.dataclass(frozen=True)
class Fusion:
    """One replacement.

    Attributes:
        rule: Name of the rule.
        nodes: Names of the replaced nodes.
        fused: Names of the nodes that replaced them: the forward op, unless the forward pass stays
            as it is, then the gradient ops.
        messages: The lines that the log prints, one per pass forward or backward.
        gradients: Number of backward passes that were fused.
        origin: Where in the user's code the nodes were made.
    """

    rule: str
    nodes: tuple[str, ...]
    fused: tuple[str, ...]
    messages: tuple[str, ...]
    gradients: int = 0
    origin: Origin | None = dataclasses.field(default=None, repr=False, compare=False)

    @property
    def source(self):
        """The line of user code that made the nodes, "file:line", while their graph is there."""
        return self.origin and self.origin.line()


@dataclasses.dataclass(frozen=True)
class Refusal:
    """One near miss.

    Attributes:
        rule: Name of the rule that almost applied.
        nodes: Names of the nodes that it would have replaced.
        reason: Why it did not, in words.
    """

    rule: str
    nodes: tuple[str, ...]
    reason: str


@dataclasses.dataclass
class Report:
    """The remapper's work on one graph.

    Attributes:
        graph: Name of the graph.
        fused: The replacements.
        refused: The near misses.
        skipped: Why the graph was left alone altogether, if it was.
        seconds: Time spent.
    """

    graph: str
    fused: list[Fusion] = dataclasses.field(default_factory=list)
    refused: list[Refusal] = dataclasses.field(default_factory=list)
    skipped: str | None = None
    seconds: float = 0.0

    @classmethod
    def of_all(cls, reports):
        """Returns all of some reports in one, named as the last."""
        return cls(
            graph=reports[-1].graph,
            fused=[fusion for report in reports for fusion in report.fused],
            refused=[refusal for report in reports for refusal in report.refused],
            seconds=sum(report.seconds for report in reports),
        )

    def counts(self):
        """Returns {rule name: number of fusions}."""
        return dict(collections.Counter(fusion.rule for fusion in self.fused))

    def __str__(self):
        gradients = sum(fusion.gradients for fusion in self.fused)
        lines = [
            f"{self.graph}: {len(self.fused)} fused ({gradients} with gradients), "
            f"{len(self.refused)} refused, {self.seconds * 1e3:.1f} ms"
        ]
        if self.skipped:
            lines.append(f"  left alone: {self.skipped}")
        for fusion in self.fused:
            where = f" ({fusion.source})" if fusion.source else ""
            lines += [f"  {message}{where}" for message in fusion.messages]
        for refusal in self.refused:
            lines.append(f"  not {refusal.rule} at {refusal.nodes[-1]}: {refusal.reason}")
        return "\n".join(lines)
