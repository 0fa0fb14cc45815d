#!/usr/bin/env bash
# Tests, conformance and quick figures on a GPU, on a machine without a package index.
#
#   benchmarks/gpu.sh [--device cuda|cpu] [--quick] [--stages vllm-v2,steps] [--limit SECONDS] [--shapes 135m,1b,8b] [--out FILE]
#
# Python with torch, transformers, peft, pluggy, attrs, structlog, hypothesis and pytest must be there;
# PYTHON names another one than `python`. Our sources go on PYTHONPATH. Entry points are found through
# metadata that this script writes. Conformance needs a tokenizer (tools/smollm2.py) in ~/.cache/genlm.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python}
metadata=$(mktemp -d)
trap 'rm -rf "$metadata"' EXIT

"$python" tools/entry_points.py "$metadata"
sources=$(printf "%s:" "$PWD"/{core,kit,conformance}/src "$PWD"/plugins/*/src)
export PYTHONPATH="$sources$PWD:$metadata${PYTHONPATH:+:$PYTHONPATH}"
exec "$python" -m tools.gpu "$@"
