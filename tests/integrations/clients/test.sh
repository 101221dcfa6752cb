#!/bin/sh
# Runs real clients against the server, in an environment of their own (build/clients, 1 GB) beside the project's.
# Where they cannot be installed it says so and succeeds. --record writes what they send to requests.json.
set -eu
cd "$(dirname "$0")/../../.."

CLIENTS="openai==3.57.0 langchain-openai==1.7.4 litellm==1.110.2 guidellm==0.8.1 lm-eval[api]==0.4.13"
ENVIRONMENT=build/clients/.venv

if [ "$(cat $ENVIRONMENT/.installed 2>/dev/null)" != "$CLIENTS" ]; then
    .venv/bin/python -m venv --clear $ENVIRONMENT
    # The project's packages come after those of the clients: torch and transformers are not installed again.
    site='import site; print(site.getsitepackages()[0])'
    echo "import site; site.addsitedir('$(.venv/bin/python -c "$site")')" \
        > "$($ENVIRONMENT/bin/python -c "$site")/project.pth"
    # shellcheck disable=SC2086
    if ! $ENVIRONMENT/bin/pip install --quiet --retries 1 --timeout 60 $CLIENTS 2>build/clients/install.log; then
        echo "skipped: clients cannot be installed here: $(grep ERROR build/clients/install.log | tail -n 1)"
        exit 0
    fi
    echo "$CLIENTS" > $ENVIRONMENT/.installed
fi
PYTHONPATH=tests:benchmarks exec $ENVIRONMENT/bin/python tests/integrations/clients/matrix.py "$@"
