"""The stock TensorFlow code of rules, as text, read from their own source."""

import ast
import functools
import inspect
import textwrap

import tensorflow as tf

_MODULES = (("tf.nn", tf.nn), ("tf", tf), ("tf.math", tf.math))


def of_chain(rule):
    """Returns the source of the methods that make up a rule's stock code, `stock` first."""
    return [_without_docstring(text) for text in _methods(rule)]


def of_spelling(spelling, name):
    """Returns the spelling of an activation of this name as an expression of x."""
    if isinstance(spelling, functools.partial):
        return _substituted(spelling)
    if spelling.__name__ == "<lambda>":
        return ast.unparse(_lambda(spelling).body)
    names = (name, spelling.__name__)
    public = ((f"{p}.{n}", getattr(m, n, None)) for n in names for p, m in _MODULES)
    return f"{next((text for text, f in public if f is spelling), spelling.__name__)}(x)"


def _methods(rule):
    """Yields the source of `stock` and, in order, of the methods that it calls."""
    waiting, seen = ["stock"], {"activate"}
    while waiting:
        name = waiting.pop(0)
        if name in seen:
            continue
        seen.add(name)
        for owner in type(rule).__mro__:
            method = vars(owner).get(name)
            if inspect.isfunction(method):
                text = textwrap.dedent(inspect.getsource(method))
                yield text
                waiting += _own_calls(text)
                if "super()" not in text:
                    break


def _own_calls(text):
    """Returns the names of the methods that a method calls on self."""
    return [
        node.func.attr
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "self"
    ]


def _without_docstring(text):
    function = ast.parse(text).body[0]
    if ast.get_docstring(function) is None:
        return text
    lines = text.splitlines()
    string = function.body[0]
    return "\n".join(lines[: string.lineno - 1] + lines[string.end_lineno :])


@functools.cache
def _lambdas(module):
    """Returns {line: lambdas that begin on it} of a module's source."""
    found = {}
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(node, ast.Lambda):
            found.setdefault(node.lineno, []).append(node)
    return found


def _lambda(function):
    """Returns the syntax tree of a lambda; where a line has two, the one of the same length."""
    code = function.__code__
    candidates = _lambdas(inspect.getmodule(function))[code.co_firstlineno]
    for node in candidates:
        compiled = compile(ast.Expression(node), "", "eval").co_consts[0]
        if (compiled.co_code, compiled.co_names) == (code.co_code, code.co_names):
            return node
    return candidates[0]


def _substituted(partial):
    """Writes form(cube, x) with the cube put in."""
    form = ast.parse(textwrap.dedent(inspect.getsource(partial.func))).body[0]
    names = [argument.arg for argument in form.args.args]
    inner = {
        name: _lambda(value).body for name, value in zip(names, partial.args, strict=False)
    }  # fmt: skip

    class Replace(ast.NodeTransformer):
        def visit_Call(self, node):
            self.generic_visit(node)
            return inner.get(getattr(node.func, "id", None), node)

    return ast.unparse(Replace().visit(form.body[-1].value))
