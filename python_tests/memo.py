"""What tests with one instruction set after another need not compute anew."""

import functools
import pickle

_KEPT = 2


def remembered(function):
    """Decorates a function of numbers, arrays and the like, which for the arguments of one of its
    last two calls has the result already.

    It is for what a test compares with: `conftest` has a case's tests with all instruction sets in
    a row. Callers leave the result as it is.
    """
    results = {}

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        key = pickle.dumps((args, kwargs))
        if key not in results:
            if len(results) == _KEPT:
                del results[next(iter(results))]
            results[key] = function(*args, **kwargs)
        return results[key]

    return wrapper
