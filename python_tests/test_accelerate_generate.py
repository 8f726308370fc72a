"""`accelerate` of models that generate as KerasHub's do: fused in `generate`, else as they were."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops
from remapping import op_counts
from test_accelerate import STEPS, functional

import tf_fused_ops as tfo
from tf_fused_ops.remapper import RemapOptions

TOKENS, LENGTH = 23, 9
PRODUCTS = {"TfFusedOps>MatMulBiasAct": 2}


class Generator(keras.Model):
    """Makes and calls its functions as `keras_hub.models.CausalLM` does."""

    def __init__(self):
        super().__init__()
        self.embedding = keras.layers.Embedding(TOKENS, 16)
        self.hidden = keras.layers.Dense(32, "gelu")
        self.logits = keras.layers.Dense(TOKENS)
        self.compile()

    def compile(self, optimizer="sgd", loss="sparse_categorical_crossentropy", **options):
        super().compile(optimizer=optimizer, loss=loss, **options)
        self.generate_function = None

    def call(self, tokens):
        return self.logits(self.hidden(self.embedding(tokens)))

    def generate_step(self, inputs, stop_token_ids=None):
        """The likeliest token after the one before, again and again."""
        tokens = inputs["token_ids"]

        def body(index, tokens):
            last = ops.slice(tokens, [0, index - 1], [tokens.shape[0], 1])
            logits = self.logits(self.hidden(self.embedding(last)[:, 0]))
            chosen = ops.cast(ops.argmax(logits, axis=-1)[:, None], tokens.dtype)
            return index + 1, ops.slice_update(tokens, [0, index], chosen)

        start = ops.convert_to_tensor(2), tokens
        _, tokens = ops.while_loop(lambda index, _: index < LENGTH, body, start)
        padding = ops.ones_like(tokens, dtype="bool")
        if stop_token_ids is not None:
            for token in stop_token_ids:
                padding = ops.logical_and(padding, tokens != token)
        return {"token_ids": tokens, "padding_mask": padding}

    def make_generate_function(self):
        if self.generate_function is not None:
            return self.generate_function
        self.generate_function = self.generate_step
        if not self.run_eagerly:
            jit_compile = getattr(self, "jit_compile", True)
            self.generate_function = tf.function(self.generate_step, jit_compile=jit_compile)
        return self.generate_function

    def generate(self, inputs, stop_token_ids=(1,)):
        function = self.make_generate_function()
        outputs = function({"token_ids": inputs}, stop_token_ids=stop_token_ids)
        return {name: ops.convert_to_numpy(value) for name, value in outputs.items()}


def prompts(batch=3):
    tokens = np.random.default_rng(0).integers(0, TOKENS, (batch, LENGTH))
    return tokens.astype("int32")


def make(**options):
    keras.utils.set_random_seed(3)
    model = Generator()
    model(prompts())
    if options:
        model.compile(**options)
    return model


def expected(batch=3):
    """What stock generates."""
    return make(jit_compile=False).generate(prompts(batch))


def assert_generates(model, fused=True, batch=3):
    """Asserts stock's tokens, by a function with or without fused ops."""
    found = model.generate(prompts(batch))
    for name, value in expected(batch).items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)
    counts = op_counts(function_of(model, batch))
    ours = {op: n for op, n in counts.items() if op.startswith("TfFusedOps>")}
    assert ours == (PRODUCTS if fused else {})


def function_of(model, batch=3):
    inputs = {"token_ids": prompts(batch)}
    return model.generate_function.get_concrete_function(inputs, stop_token_ids=(1,))


def counts(model):
    """Returns the fusions of the last trace of `generate_step`, in bodies of loops."""
    found = {}
    for report in model.generate_step.remap_reports:
        found |= report.counts()
    return found


JIT = pytest.mark.parametrize("jit_compile", [False, True])


@JIT
def test_after_compile(jit_compile):
    model = make(jit_compile=jit_compile)
    assert tfo.accelerate(model) is model
    assert_generates(model)
    assert counts(model) == {"matmul_bias_gelu_erf": 1, "matmul_bias": 1}
    assert model.jit_compile is jit_compile
    assert not model.generate_function._jit_compile


@JIT
def test_before_compile(jit_compile):
    model = tfo.accelerate(make())
    model.compile(jit_compile=jit_compile)
    assert_generates(model)
    assert model.jit_compile is jit_compile


@JIT
def test_compile_afterwards_makes_the_function_anew(jit_compile):
    model = tfo.accelerate(make(jit_compile=jit_compile))
    assert_generates(model)
    before = model.generate_function
    model.compile("adam", jit_compile=not jit_compile)
    assert model.generate_function is None
    assert_generates(model)
    assert model.generate_function is not before
    assert model.jit_compile is not jit_compile


@JIT
def test_after_stock_has_generated(jit_compile):
    """And back again."""
    model = make(jit_compile=jit_compile)
    assert_generates(model, fused=False)
    tfo.accelerate(model)
    assert model.generate_function is None
    assert_generates(model)
    tfo.accelerate(model, False)
    assert_generates(model, fused=False)
    assert not hasattr(model.generate_step, "remap_reports")
    assert bool(model.generate_function._jit_compile) == model.jit_compile == jit_compile


def test_functions_are_kept():
    """Of which one generates as long as nothing is compiled."""
    model = tfo.accelerate(make(jit_compile=True))
    assert_generates(model)
    function, traces = model.generate_function, len(model.generate_step.remap_reports)
    assert_generates(model)
    assert model.generate_function is function
    assert len(model.generate_step.remap_reports) == traces
    assert_generates(model, batch=1)
    assert len(model.generate_step.remap_reports) == 2 * traces


def test_other_stop_tokens():
    model, stock = tfo.accelerate(make(jit_compile=True)), make(jit_compile=False)
    for stop in (None, (2, 3), (5,)):
        found, wanted = (m.generate(prompts(), stop_token_ids=stop) for m in (model, stock))
        for name in wanted:
            np.testing.assert_array_equal(found[name], wanted[name])


@JIT
def test_undone_completely(jit_compile):
    model = make(jit_compile=jit_compile)
    before = dict(vars(model))
    tfo.accelerate(model)
    tfo.accelerate(model)
    assert {*STEPS, "generate_step", "make_generate_function"} <= vars(model).keys()
    model.generate(prompts())
    assert tfo.accelerate(model, False) is model
    assert vars(model) == before
    assert model.make_generate_function.__func__ is Generator.make_generate_function


def test_twice():
    """The step is rewritten once, and XLA chosen as it was."""
    model = tfo.accelerate(tfo.accelerate(make(jit_compile=True)))
    assert_generates(model)
    assert counts(model) == {"matmul_bias_gelu_erf": 1, "matmul_bias": 1}
    assert model.jit_compile


def test_undone_gives_back_functions_of_the_instance():
    model = make(jit_compile=True)
    step, make_function = model.generate_step, model.make_generate_function
    model.generate_step, model.make_generate_function = step, make_function
    assert_generates(tfo.accelerate(model))
    tfo.accelerate(model, False)
    assert model.generate_step is step and model.make_generate_function is make_function


def test_never_accelerated():
    model = make()
    before = dict(vars(model))
    tfo.accelerate(model, False)
    assert vars(model) == before


def test_verbose_prints_once(capsys):
    model = tfo.accelerate(make(jit_compile=True), verbose=1)
    model.generate(prompts())
    model.generate(prompts(1))
    told = "2 fused, 0 with gradients: 1 matmul_bias, 1 matmul_bias_gelu_erf"
    assert capsys.readouterr().out.splitlines() == [
        f"tf_fused_ops: generate_step of {model.name}: {told}"
    ]


def test_nothing_is_told_otherwise(capsys):
    model = tfo.accelerate(make(jit_compile=True))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        model.generate(prompts())
    assert capsys.readouterr().out == ""


def test_options():
    model = tfo.accelerate(make(), remap=RemapOptions(disable=["matmul_bias_*"]))
    model.generate(prompts())
    assert counts(model) == {"matmul_bias": 2, "act_gelu_erf": 1}


def test_run_eagerly_runs_stock_ops():
    model = tfo.accelerate(make(run_eagerly=True))
    found = model.generate(prompts())
    np.testing.assert_array_equal(found["token_ids"], expected()["token_ids"])
    assert model.generate_step.remap_reports == []
    assert model.run_eagerly and not model.jit_compile


@JIT
def test_trains_and_generates(jit_compile):
    """Training by XLA is left alone, generation is not."""
    curves, tokens = [], []
    for prepare in (lambda model: model, tfo.accelerate):
        model = prepare(make(jit_compile=jit_compile))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            history = model.fit(prompts(24), prompts(24), batch_size=8, epochs=2, verbose=0)
        curves.append(history.history["loss"])
        tokens.append(model.generate(prompts())["token_ids"])
    np.testing.assert_allclose(*curves, rtol=1e-4)
    np.testing.assert_array_equal(*tokens)
    fused = sum(len(report.fused) for report in model.train_step.remap_reports)
    assert (fused == 0) == jit_compile
    assert counts(model) == {"matmul_bias_gelu_erf": 1, "matmul_bias": 1}
    assert model.jit_compile is jit_compile


def test_choice_of_xla_where_making_fails():
    class Broken(Generator):
        def make_generate_function(self):
            assert not self.jit_compile
            raise RuntimeError("broken")

    model = Broken()
    model.compile(jit_compile=True)
    tfo.accelerate(model)
    with pytest.raises(RuntimeError, match="broken"):
        model.generate(prompts())
    assert model.jit_compile is True


def test_weights_that_change():
    """Are those of the model, as in any function."""
    model, stock = tfo.accelerate(make()), make(jit_compile=False)
    model.generate(prompts())
    for each in (model, stock):
        each.logits.kernel.assign(-each.logits.kernel)
        each.generate_function = each.generate_function if each is model else None
    found, wanted = (each.generate(prompts())["token_ids"] for each in (model, stock))
    np.testing.assert_array_equal(found, wanted)
    assert (wanted != expected()["token_ids"]).any()


class StepAlone(keras.Sequential):
    """Has a function of that name, but none that makes it."""

    def generate_step(self):
        return "own"


@pytest.mark.parametrize("model", [functional, lambda: StepAlone([keras.layers.Dense(2)])])
def test_models_that_do_not_generate(model):
    model = model()
    model.compile("sgd", "mse")
    before = dict(vars(model))
    tfo.accelerate(model)
    assert not any("generate" in name for name in vars(model))
    assert not isinstance(model, StepAlone) or model.generate_step() == "own"
    tfo.accelerate(model, False)
    assert vars(model) == before


def test_saved_like_any_model(tmp_path):
    model = tfo.accelerate(make(jit_compile=True))
    model.generate(prompts())
    model.save_weights(tmp_path / "model.weights.h5")
    other = make()
    for variable in other.variables:
        variable.assign(tf.zeros_like(variable))
    other.load_weights(tmp_path / "model.weights.h5")
    assert_generates(other, fused=False)
