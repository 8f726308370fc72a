"""Builds a Keras model anew with some of its layers replaced, keeping its state."""

import collections
import warnings

import keras
from keras import tree
from keras.src.models.functional import Functional, functional_like_constructor

from tf_fused_ops.layers.runs import Step


class Rebuild:
    """One conversion of a model with the models in it.

    A subclass says what becomes of the layers of one model.

    Attributes:
        calls: {id of layer: number of its calls} over all models.
    """

    def __init__(self, verb):
        """Starts with nothing converted.

        Args:
            verb: What the conversion does, for messages.
        """
        self.calls = collections.Counter()
        self._verb = verb
        self._steps = {}
        self._made = {}
        self._holders = {}

    def plan(self, steps, outputs):
        """Decides about a functional model.

        Args:
            steps: Its steps, inputs first.
            outputs: The symbolic tensors that leave it.

        Returns:
            {step: function from {id of symbolic tensor: new tensor} to the new outputs, or None to
            leave the step out}. Steps that are missing are cloned.
        """
        raise NotImplementedError

    def plan_sequence(self, steps):
        """Decides about a sequential model.

        Returns:
            {step: list of layers in its place}. Steps that are missing are cloned.
        """
        raise NotImplementedError

    def opens(self, wrapper):
        """Returns whether the layer in a `TimeDistributed` is converted."""
        return True

    def keeps(self, layer, holder):
        """Is told of every layer that stays as it is, since another one holds it."""

    def run(self, model):
        """Returns the converted model, with the state and the compilation of the given one."""
        self._survey(model)
        for layer, holder in self._holders.values():
            if id(layer) in self.calls:
                self._refuse_shared(layer, holder)
        converted = self.clone(model)
        for old, new in self._made.values():
            if not self._has_parts(old):
                _copy_state(old, new)
        return converted

    def layer(self, old, make):
        """Returns the layer that takes the place of another, made at the first request."""
        if id(old) not in self._made:
            self._made[id(old)] = (old, make())
        return self._made[id(old)][1]

    def clone(self, operation):
        """Returns an operation like the given one; models are converted."""
        return self.layer(operation, lambda: self._clone(operation))

    def _survey(self, model):
        """Lists the steps of a model and of those in it, and counts the calls."""
        if id(model) in self._steps:
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
        self._steps[id(model)] = steps
        for step in steps:
            self._survey_call(step.operation)

    def _survey_call(self, operation):
        self.calls[id(operation)] += 1
        if isinstance(operation, keras.Model):
            self._survey(operation)
        elif self._is_opened(operation):
            self._survey_call(operation.layer)
        elif isinstance(operation, keras.Layer):
            for layer in operation._flatten_layers(include_self=False):
                self._survey_held(layer, operation)

    def _survey_held(self, layer, holder):
        if id(layer) not in self._holders:
            self._holders[id(layer)] = layer, holder
            self.keeps(layer, holder)
        elif self._holders[id(layer)][1] is not holder:
            self._refuse_shared(layer, holder)

    def _refuse_shared(self, layer, holder):
        if layer.weights:
            raise ValueError(
                f"{self._verb} cannot keep the weights of layer {layer.name} shared, which is in "
                f"layer {holder.name} of class {type(holder).__name__} and is used outside of it, "
                "too: use tf_fused_ops.accelerate(model) instead."
            )

    def _is_opened(self, operation):
        return type(operation) is keras.layers.TimeDistributed and self.opens(operation)

    def _has_parts(self, operation):
        return id(operation) in self._steps or self._is_opened(operation)

    def _clone(self, operation):
        if isinstance(operation, keras.Sequential):
            return self._sequential(operation)
        if isinstance(operation, keras.Model):
            return self._functional(operation)
        if self._is_opened(operation):
            config = {k: v for k, v in operation.get_config().items() if k != "layer"}
            return type(operation)(self._alone(operation.layer), **config)
        try:
            return type(operation).from_config(operation.get_config())
        except (NotImplementedError, TypeError, ValueError) as error:
            raise ValueError(
                f"Layer {operation.name} of class {type(operation).__name__} cannot be cloned, "
                "since its get_config and from_config do not fit: use "
                f"tf_fused_ops.accelerate(model) instead. ({error})"
            ) from error

    def _alone(self, layer):
        """Returns what takes the place of a layer that has nothing before and after it."""
        step = Step(layer, (object(),), (object(),))
        layers = self.plan_sequence([step]).get(step) or [self.clone(layer)]
        return layers[0] if len(layers) == 1 else keras.Sequential(layers)

    def _sequential(self, model):
        steps = self._steps[id(model)]
        plan = self.plan_sequence(steps)
        layers = [
            layer
            for step in steps
            for layer in (plan[step] if step in plan else [self.clone(step.operation)])
        ]
        if model._layers and isinstance(model._layers[0], keras.layers.InputLayer):
            layers.insert(0, _input(model._layers[0].output))
        new = keras.Sequential(layers, name=model.name, trainable=model.trainable)
        return _compiled(new, model)

    def _functional(self, model):
        steps = self._steps[id(model)]
        plan = self.plan(steps, model.outputs)
        inputs = tree.map_structure(_input, model._inputs_struct)
        tensors = dict(zip(map(id, model.inputs), tree.flatten(inputs), strict=True))
        for step in steps:
            if step not in plan:
                args, kwargs = step.node.arguments.fill_in(tensors)
                made = self.clone(step.operation)(*args, **kwargs)
            elif plan[step] is None:
                continue
            else:
                made = plan[step](tensors)
            for old, new in zip(step.outputs, tree.flatten(made), strict=True):
                tensors[id(old)] = new
        outputs = tree.map_structure(lambda x: tensors[id(x)], model._outputs_struct)
        new = type(model)(inputs, outputs, name=model.name)
        if not model.trainable:
            new.trainable = False
        return _compiled(new, model)


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


def _input(tensor):
    """Returns a new input like the one that made a symbolic tensor."""
    layer = tensor._keras_history.operation
    return type(layer).from_config(layer.get_config()).output


def _compiled(new, old):
    if old.compiled:
        try:
            new.compile_from_config(old.get_compile_config())
        except (TypeError, ValueError) as error:
            warnings.warn(
                f"The new {old.name} is not compiled, since Keras cannot serialise the "
                f"compilation of the old one: call compile. ({error})",
                stacklevel=2,
            )
    return new


def _copy_state(old, new):
    """Copies weights and the other variables, such as the states of random generators."""
    if not isinstance(old, keras.Layer):
        return
    if old.built and not new.built and old.variables:
        new.build_from_config(old.get_build_config())
    for source, target in zip(old.variables, new.variables, strict=True):
        target.assign(source)
    # Layers that keep values derived from their variables.
    if old.built and hasattr(new, "finalize_state"):
        new.finalize_state()
