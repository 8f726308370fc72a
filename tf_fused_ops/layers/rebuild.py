"""Builds a Keras model anew with some of its layers replaced, keeping its state."""

import warnings

import keras
from keras import tree

from tf_fused_ops.layers.survey import Step, Survey


class Rebuild:
    """One conversion of a model with the models in it.

    A subclass says what becomes of the layers of one model.

    Attributes:
        survey: The `Survey` of the model, once it runs.
    """

    def __init__(self, verb):
        """Starts with nothing converted.

        Args:
            verb: What the conversion does, for messages.
        """
        self._verb = verb
        self._made = {}

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

    def run(self, model):
        """Returns the converted model, with the state and the compilation of the given one."""
        self.survey = Survey(model, self._is_opened, self._verb)
        converted = self.clone(model)
        for old, new in self._made.values():
            if isinstance(old, keras.Layer) and not self._has_parts(old):
                _copy_state(old, new)
        for old, new in self._made.values():
            # An optimizer asks which variables are trained.
            if isinstance(old, keras.Model) and old.compiled:
                _compile(old, new)
        return converted

    def layer(self, old, make):
        """Returns the layer that takes the place of another, made at the first request."""
        if id(old) not in self._made:
            self._made[id(old)] = (old, make())
        return self._made[id(old)][1]

    def clone(self, operation):
        """Returns an operation like the given one; models are converted."""
        return self.layer(operation, lambda: self._clone(operation))

    def _is_opened(self, operation):
        return type(operation) is keras.layers.TimeDistributed and self.opens(operation)

    def _has_parts(self, operation):
        return isinstance(operation, keras.Model) or self._is_opened(operation)

    def _clone(self, operation):
        if isinstance(operation, keras.Sequential):
            return self._sequential(operation)
        if isinstance(operation, keras.Model):
            return self._functional(operation)
        if self._is_opened(operation):
            config = {k: v for k, v in operation.get_config().items() if k != "layer"}
            return type(operation)(self._alone(operation.layer), **config)
        if type(operation) is keras.layers.Bidirectional:
            return self._bidirectional(operation)
        try:
            return type(operation).from_config(operation.get_config())
        except (NotImplementedError, TypeError, ValueError) as error:
            raise ValueError(
                f"Layer {operation.name} of class {type(operation).__name__} cannot be cloned, "
                "since its get_config and from_config do not fit: use "
                f"tf_fused_ops.accelerate(model) instead. ({error})"
            ) from error

    def _bidirectional(self, wrapper):
        # It makes a forward layer of its own, so its state is copied with the wrapper's.
        config = wrapper.get_config()
        parts = {
            "layer": self._alone(wrapper.forward_layer),
            "backward_layer": self._alone(wrapper.backward_layer),
        }
        return type(wrapper)(**{**config, **parts})

    def _alone(self, layer):
        """Returns what takes the place of a layer that has nothing before and after it."""
        step = Step(layer, (object(),), (object(),))
        layers = self.plan_sequence([step]).get(step) or [self.clone(layer)]
        return layers[0] if len(layers) == 1 else keras.Sequential(layers)

    def _sequential(self, model):
        steps = self.survey.steps[id(model)]
        plan = self.plan_sequence(steps)
        layers = [
            layer
            for step in steps
            for layer in (plan[step] if step in plan else [self.clone(step.operation)])
        ]
        if model._layers and isinstance(model._layers[0], keras.layers.InputLayer):
            layers.insert(0, _input(model._layers[0].output))
        return keras.Sequential(layers, name=model.name, trainable=model.trainable)

    def _functional(self, model):
        steps = self.survey.steps[id(model)]
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
        # Not by the property, which sets the layers', too: they may have been set after the model.
        new._trainable = model.trainable
        # Losses and labels go by them, also where what made an output was taken in.
        new.output_names = model.output_names
        return new


def _input(tensor):
    """Returns a new input like the one that made a symbolic tensor."""
    layer = tensor._keras_history.operation
    return type(layer).from_config(layer.get_config()).output


def _compile(old, new):
    try:
        new.compile_from_config(old.get_compile_config())
    except (TypeError, ValueError) as error:
        warnings.warn(
            f"The new {old.name} is not compiled, since Keras cannot serialise the "
            f"compilation of the old one: call compile. ({error})",
            stacklevel=2,
        )


def _copy_state(old, new):
    """Copies weights and other variables, such as the states of random generators, and flags."""
    # The activation of a fused layer may be a layer of its own in the new model.
    for source, target in zip(old._flatten_layers(), new._flatten_layers(), strict=False):
        if source.built:
            # Activations are built in the first call.
            if not target.built and source.variables:
                target.build_from_config(source.get_build_config())
            for given, variable in zip(_own(source), _own(target), strict=True):
                variable.assign(given)
                variable.trainable = given.trainable
            # Keras does not list these among the variables.
            if isinstance(source, keras.layers.RNN) and source.stateful:
                for given, state in zip(_states(source), _states(target), strict=True):
                    state.assign(given)
        target._trainable = source.trainable
    # Layers that keep values derived from their variables.
    if old.built and hasattr(new, "finalize_state"):
        new.finalize_state()


def _states(layer):
    """Returns the states that a recurrent layer keeps from batch to batch."""
    return tree.flatten(layer.states or [])


def _own(layer):
    """Returns the variables of a layer that are not those of layers in it."""
    inner = {id(v) for held in layer._flatten_layers(include_self=False) for v in held.variables}
    return [variable for variable in layer.variables if id(variable) not in inner]
