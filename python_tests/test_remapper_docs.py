"""The documentation of the rules agrees with the table, and its code runs."""

import re
from pathlib import Path

import pytest
import tensorflow as tf

import tf_fused_ops as tfo
from tf_fused_ops.remapper import caches, recurrent, rules, slices, variable_updates

TEXT = (Path(__file__).resolve().parent.parent / "docs" / "rules.md").read_text()


def test_every_family_is_listed():
    listed = re.findall(r"^\| `(\w+)_\*` \|", TEXT, re.MULTILINE)
    assert sorted(listed) == sorted({rule.family for rule in rules.RULES})
    listed = re.findall(r"^\| `(\w+)` \|", TEXT, re.MULTILINE)
    others = (caches.UPDATE_CACHE, slices.JOINED, *variable_updates.UPDATES, *recurrent.LOOPS)
    assert listed == [rule.name for rule in others]


@pytest.mark.parametrize("code", re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL))
def test_code_runs(code):
    names = {"tf": tf, "tfo": tfo}
    exec(code, names)
