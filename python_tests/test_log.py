"""The log: TensorFlow's own format and switch."""

import re

import pytest

PROGRAM = """
import tensorflow as tf
from tf_fused_ops.function import function

@function
def step(x, w, b):
    with tf.GradientTape() as tape:
        tape.watch([w, b])
        y = tf.nn.relu(tf.nn.bias_add(tf.nn.conv2d(x, w, 1, "SAME"), b))
    z = tf.nn.bias_add(tf.nn.conv2d(x + 1.0, w, 1, "SAME"), b)
    return y, tape.gradient(y, [w, b]), z, tf.nn.relu(z)

step(tf.ones([1, 4, 4, 2]), tf.ones([3, 3, 2, 2]), tf.ones([2]))
"""

PREFIX = r"I0000 00:00:[\d.]+ +\d+ remapper\.cc:\d+\] "
FORWARD = "Fuse Conv2D with BiasAdd and Relu: activation=Relu bias_add=BiasAdd contraction=Conv2D"
GRADIENT = "Fuse gradient of Conv2D with BiasAdd and Relu: input=<none> filters="
NEAR_MISS = (
    "Not fused: Conv2D with BiasAdd and Relu at Relu_1: BiasAdd_1:0 is an output of the graph"
)


@pytest.fixture
def log_lines(run_python):
    """Runs the program and returns what the remapper logged."""

    def run(vmodule):
        wrapped = (
            "import os, sys, tempfile\n"
            "log = tempfile.TemporaryFile()\nsaved = os.dup(2)\nos.dup2(log.fileno(), 2)\n"
            f"{PROGRAM}\n"
            "os.dup2(saved, 2)\nlog.seek(0)\nprint(log.read().decode())\n"
        )
        output = run_python(wrapped, TF_CPP_VMODULE=vmodule, TF_CPP_MIN_LOG_LEVEL="0")
        return [line for line in output.splitlines() if " remapper.cc:" in line]

    return run


def test_fusions(log_lines):
    lines = log_lines("remapper=2")
    assert any(re.fullmatch(PREFIX + re.escape(FORWARD), line) for line in lines)
    assert any(re.match(PREFIX + re.escape(GRADIENT), line) for line in lines)
    assert not any("Not fused" in line for line in lines)


def test_near_misses(log_lines):
    lines = log_lines("remapper=3")
    assert any(re.fullmatch(PREFIX + re.escape(FORWARD), line) for line in lines)
    assert any(re.fullmatch(PREFIX + re.escape(NEAR_MISS), line) for line in lines)


def test_silent_unless_asked(log_lines):
    assert log_lines("remapper=0") == []
    assert log_lines("other=3") == []


def test_level_at_run_time(capfd):
    from tf_fused_ops import _logging

    before = _logging.set_vlog_level("remapper", 3)
    try:
        assert _logging.vlog_level("remapper.cc") == 3
    finally:
        _logging.set_vlog_level("remapper", before)
    assert not _logging.vlog("remapper.cc", 1, 2, "hidden")
