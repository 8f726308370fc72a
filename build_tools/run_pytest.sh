#!/bin/bash
# Runs pytest on the package that lies in the current folder (`bazel test //:pytest`); arguments go to pytest.
set -eu
# Bazel lays out links into the source tree; a test that resolves one would find the package without its libraries.
cp -RL . "$TEST_TMPDIR/tree"
cd "$TEST_TMPDIR/tree"
exec "${PYTHON_BIN_PATH:-python3}" -m pytest -p no:cacheprovider "${@:-python_tests}"
