#!/bin/sh
# Check the encoder's device time on a machine with a GPU.  Needs Python 3.11+, torch and pytest; no vLLM.
# PYTHON=python3.12 tests/device/run.sh
set -eu
cd "$(dirname "$0")/../.."
export PYTHONPATH="$PWD:$PWD/instrumentation${PYTHONPATH:+:$PYTHONPATH}"
# Warnings of the machine's own torch are not ours to judge.
"${PYTHON:-python3}" -m pytest tests/device -s -W default
"${PYTHON:-python3}" tests/device/encoder_cost.py
