"""What a Keras model is made of: models in it, their steps, and layers that other layers hold."""

import collections
import dataclasses

import keras
from keras.src.models.functional import Functional, functional_like_constructor


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """One call of a layer or operation in a model.

    Attributes:
        operation: The layer or operation.
        inputs: The symbolic tensors that it reads.
        outputs: The symbolic tensors that it makes.
        node: Keras's node, or None in a sequential model.
    """

    operation: object
    inputs: tuple
    outputs: tuple
    node: object = None


class Survey:
    """A model with the models in it.

    Attributes:
        steps: {id of model: its steps, inputs first}.
        calls: {id of layer: number of its calls} over all models.
        held: Pairs (layer, holder) of the layers that are called by other layers.
    """

    def __init__(self, model, opens, verb):
        """Looks through a model.

        Args:
            model: The model.
            opens: Tells of a layer whether the `layer` in it counts as part of the model.
            verb: What the survey is for, for messages.

        Raises:
            ValueError: The model or one in it is a subclassed one, or a layer that has weights is
                in more than one place of which one is another layer.
        """
        self.steps = {}
        self.calls = collections.Counter()
        self._opens = opens
        self._verb = verb
        self._holders = {}
        self._model(model)
        for layer, holder in self.held:
            if id(layer) in self.calls:
                self._refuse_shared(layer, holder)

    @property
    def held(self):
        return tuple(self._holders.values())

    def _model(self, model):
        if id(model) in self.steps:
            return
        if type(model) is keras.Sequential:
            steps = _sequential_steps(model)
        elif isinstance(model, Functional) and functional_like_constructor(type(model)):
            steps = _functional_steps(model)
        else:
            raise ValueError(
                f"{self._verb} knows functional and sequential models, and {model.name} of class "
                f"{type(model).__name__} is a subclassed one: use tf_fused_ops.accelerate(model) "
                "instead."
            )
        self.steps[id(model)] = steps
        for step in steps:
            self._call(step.operation)

    def _call(self, operation):
        self.calls[id(operation)] += 1
        if isinstance(operation, keras.Model):
            self._model(operation)
        elif self._opens(operation):
            self._call(operation.layer)
        elif isinstance(operation, keras.Layer):
            for layer in operation._flatten_layers(include_self=False):
                self._hold(layer, operation)

    def _hold(self, layer, holder):
        known = self._holders.setdefault(id(layer), (layer, holder))
        if known[1] is not holder:
            self._refuse_shared(layer, holder)

    def _refuse_shared(self, layer, holder):
        if layer.weights:
            raise ValueError(
                f"{self._verb} cannot keep the weights of layer {layer.name} shared, which is in "
                f"layer {holder.name} of class {type(holder).__name__} and is used outside of it, "
                "too: use tf_fused_ops.accelerate(model) instead."
            )


def _sequential_steps(model):
    # No layer of a sequential model reads anything but the one before it.
    tensors = [object() for _ in range(len(model.layers) + 1)]
    return [Step(layer, (tensors[i],), (tensors[i + 1],)) for i, layer in enumerate(model.layers)]


def _functional_steps(model):
    depths = sorted(model._nodes_by_depth, reverse=True)
    nodes = [node for depth in depths for node in model._nodes_by_depth[depth]]
    return [
        Step(node.operation, tuple(node.input_tensors), tuple(node.outputs), node)
        for node in nodes
        if not node.is_input
    ]
