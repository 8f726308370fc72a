"""Training, comparing and timing of two versions of the same program."""

import statistics
import time

import numpy as np


def train(training, batches, on_step):
    """Trains over `batches`, calling `on_step()` after each, and returns the losses as an array."""
    losses = []
    for images, labels in batches:
        losses.append(float(training.train_step(images, labels)))
        on_step()
    return np.array(losses)


def accuracy(training, images, labels):
    """Returns the share of `images` whose class is predicted right."""
    return float(np.mean(training.predict(images).numpy() == labels))


def interleaved_times(functions, repetitions, on_step, warm_up=3):
    """Times functions in turns, so that a change of the machine's load meets all of them.

    Args:
        functions: callables without arguments whose result has been computed when they return.
        repetitions: number of timed calls of each.
        on_step: called after each round.
        warm_up: rounds that are not timed.

    Returns:
        The median seconds of each function, in order.
    """
    seconds = [[] for _ in functions]
    for round_number in range(warm_up + repetitions):
        for function, times in zip(functions, seconds, strict=True):
            start = time.perf_counter()
            function()
            if round_number >= warm_up:
                times.append(time.perf_counter() - start)
        on_step()
    return [statistics.median(times) for times in seconds]


def relative_difference(actual, expected):
    """Returns the greatest difference, as a share of the greatest magnitude of `expected`."""
    return float(np.max(np.abs(actual - expected)) / np.max(np.abs(expected)))
