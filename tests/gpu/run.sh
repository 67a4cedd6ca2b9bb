#!/usr/bin/env bash
# Runs every test that needs a CUDA device. From the repository root, in an environment with the package's test extra.
set -euo pipefail
exec python -m pytest -m gpu tests/gpu -q "$@"
