#!/bin/sh
# Runs the tests on the package that lies in the current folder (`bazel test //:pytest`).
exec "${PYTHON_BIN_PATH:-python3}" -m pytest -p no:cacheprovider python_tests "$@"
