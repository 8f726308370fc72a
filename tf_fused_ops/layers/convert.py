"""`convert` and `revert`: models between stock and fused layers."""

import functools
import inspect

import keras
from keras.src.ops.nn import Gelu

from tf_fused_ops.layers import runs
from tf_fused_ops.layers.activation import gelu_tanh
from tf_fused_ops.layers.rebuild import Rebuild


def convert(model):
    """Clones a Keras model into fused layers.

    Convolutions, batch norms and dense layers become fused ones and take in what follows them: a
    residual that is added, and an activation. Between them nothing else may read the values. Layer
    normalizations and recurrent layers become fused ones, too.
    Models inside the model are converted, too, and so are layers in `Bidirectional`, and layers and
    models in `TimeDistributed` if the number of time steps is known; what other layers hold stays
    as it is. Where Keras has to know the name of a layer that was taken in (`get_layer`), the fused
    layer's name is that of the first one.

    Args:
        model: A functional or sequential model. It is not changed.

    Returns:
        A new model with the same weights and the same outputs. If the model is compiled, so is the
        new one, with an optimizer that starts anew.

    Raises:
        ValueError: The model, or one inside it, is a subclassed one, or a layer cannot be cloned;
            for these there is `tf_fused_ops.accelerate`.
    """
    return _Convert("tf_fused_ops.layers.convert").run(model)


def revert(model):
    """Clones a Keras model with fused layers into stock ones.

    Args:
        model: A functional or sequential model. It is not changed.

    Returns:
        A new model with the same weights and the same outputs. It loads without tf_fused_ops, but
        for `gelu_tanh` in a sequential one or with an activity regularizer, which no stock layer
        computes.

    Raises:
        ValueError: The model, or one inside it, is a subclassed one.
    """
    return _Revert("tf_fused_ops.layers.revert").run(model)


class _Convert(Rebuild):
    def opens(self, wrapper):
        nodes = wrapper._inbound_nodes
        # Over an unknown number of steps Keras vectorises, which the fused ops are not made for.
        return bool(nodes) and all(node.input_tensors[0].shape[1] is not None for node in nodes)

    def run(self, model):
        converted = super().run(model)
        for layer, holder in self.survey.held:
            taken = type(holder) is keras.layers.Bidirectional
            if type(layer) in runs.FUSED and not taken:
                runs.tell(layer.name, _why_kept(holder))
        return converted

    def plan(self, steps, outputs):
        plan = {}
        for run in runs.find(steps, outputs, self.survey.calls):
            plan |= dict.fromkeys(run.steps)
            plan[run.steps[-1]] = functools.partial(self._call, run)
        return plan

    def plan_sequence(self, steps):
        plan = {}
        for run in runs.find(steps, steps[-1].outputs if steps else (), self.survey.calls):
            plan |= dict.fromkeys(run.steps, ())
            plan[run.steps[-1]] = [self._fused(run)]
        return plan

    def _call(self, run, tensors):
        inputs, arguments = _arguments(run.steps[0], tensors)
        if run.side is not None:
            arguments["side_input"] = tensors[id(run.side)]
        return self._fused(run)(inputs, **arguments)

    def _fused(self, run):
        layer = run.steps[0].operation

        def make():
            fused, config = runs.FUSED.get(type(layer), type(layer)), layer.get_config()
            if fused.takes_activation:
                own = getattr(layer, "activation", None)
                config["activation"] = _copy(own if run.activation is None else run.activation)
            return fused.from_config(config)

        return self.layer(layer, make)


def _arguments(step, tensors):
    """Returns the first argument of a call and, by name, the others.

    Fused layers have those at other places than stock layers.
    """
    args, kwargs = step.node.arguments.fill_in(tensors)
    names = inspect.signature(step.operation.call).parameters
    arguments = {**dict(zip(names, args, strict=False)), **kwargs}
    return arguments.pop(next(iter(names))), arguments


def _why_kept(holder):
    """Returns why a layer that another one holds is not converted, in words."""
    if type(holder) is keras.layers.TimeDistributed:
        return f"the number of time steps of {holder.name} is not known"
    return (
        f"{holder.name} of class {type(holder).__name__} holds it; "
        "tf_fused_ops.accelerate reaches it"
    )


class _Revert(Rebuild):
    def run(self, model):
        self._model = model
        return super().run(model)

    @functools.cached_property
    def _names(self):
        """The names of all layers, inputs too, and operations."""
        steps = (step for steps in self.survey.steps.values() for step in steps)
        names = {step.operation.name for step in steps}
        return names | {layer.name for layer in self._model._flatten_layers()}

    def plan(self, steps, outputs):
        return {
            step: functools.partial(self._call, step)
            for step in steps
            if type(step.operation) in runs.STOCK
        }

    def plan_sequence(self, steps):
        fused = (step for step in steps if type(step.operation) in runs.STOCK)
        return {step: self._in_sequence(step.operation) for step in fused}

    def _in_sequence(self, layer):
        split = _splits(layer)
        return [self._stock(layer, split), *([self._activation(layer)] if split else [])]

    def _call(self, step, tensors):
        layer = step.operation
        x, arguments = _arguments(step, tensors)
        side = arguments.pop("side_input", None)
        split = _splits(layer)
        y = self._stock(layer, split)(x, **arguments)
        if side is not None:
            # Keras's networks write the shortcut first; the order of layers follows from it.
            y = self._named(lambda: keras.layers.Add(dtype=layer.dtype_policy))([side, y])
        if split and layer.activation is gelu_tanh and layer.activity_regularizer is None:
            # An operation, since no stock layer has a name for it.
            return self._named(lambda: Gelu(approximate=True))(y)
        return self._activation(layer)(y) if split else y

    def _stock(self, layer, split):
        def make():
            config = layer.get_config()
            config.pop("winograd", None)
            if split:
                config.pop("activity_regularizer", None)
            if _adds_activation(layer):
                del config["activation"]
            elif layer.takes_activation:
                config["activation"] = None if split else _copy(layer.activation)
            return runs.STOCK[type(layer)].from_config(config)

        return self.layer(layer, make)

    def _activation(self, layer):
        """Returns a layer with the activation and the activity regularizer of a fused layer."""

        def make():
            made = _copy(layer.activation)
            if not isinstance(made, keras.Layer):
                made = keras.layers.Activation(made, dtype=layer.dtype_policy)
            if layer.activity_regularizer is not None:
                made.activity_regularizer = layer.activity_regularizer
            return made

        if isinstance(layer.activation, keras.Layer):  # which may have weights
            return self.layer(layer.activation, lambda: self._named(make))
        return self._named(make)

    def _named(self, make):
        """Returns a new operation of a name that no other has.

        Keras numbers names without a look at those that came from a file.
        """
        operation = make()
        while operation.name in self._names:
            last, operation = operation, make()
            if operation.name == last.name:  # the class decides
                break
        return operation


def _adds_activation(layer):
    """Whether a fused layer has an activation, but the stock layer none."""
    stock = inspect.signature(runs.STOCK[type(layer)]).parameters
    return layer.takes_activation and "activation" not in stock


def _splits(layer):
    """Whether what becomes of the values needs a layer of its own next to the stock layer."""
    if not layer.takes_activation:
        return False
    active = layer.activation is not keras.activations.linear
    # A layer may be called with a side input in one place and without in another.
    if any(len(node.input_tensors) > 1 for node in layer._inbound_nodes):
        return active or layer.activity_regularizer is not None
    return active and (_adds_activation(layer) or layer.activation is gelu_tanh)


def _copy(activation):
    """Returns an activation for another layer to have."""
    if isinstance(activation, keras.Layer):
        return type(activation).from_config({**activation.get_config(), "name": None})
    # Not by its name: Keras's name for its operation gelu is that of another function.
    return activation
