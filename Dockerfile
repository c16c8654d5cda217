# The agent's image. Any base with Python 3.11 or newer serves (a distroless one, too: no stage but the first
# needs a shell); the first stage needs pip. `make image` makes both bases itself and needs no engine.
ARG BUILD_BASE=python:3.11-slim-bookworm
ARG BASE=python:3.11-slim-bookworm

FROM ${BUILD_BASE} AS build
# A folder wheels/ in the context, where there is one, stands in for the package index.
COPY requirements.lock wheel[s] /wheels/
RUN set -eu; \
    offline=""; for wheel in /wheels/*.whl; do [ -e "$wheel" ] && offline="--no-index --find-links=/wheels"; done; \
    python3 -m pip install --quiet --no-cache-dir --no-compile --disable-pip-version-check --root-user-action=ignore \
        --require-hashes --only-binary=:all: $offline --target=/opt/gpu-node-agent --requirement=/wheels/requirements.lock; \
    cd /opt/gpu-node-agent; \
    # Of the Kubernetes client only the HTTP layer is used (agent/cluster/lean.py); its models are 30 MB.
    rm -rf bin kubernetes_asyncio/client/models kubernetes_asyncio/client/api
COPY agent /opt/gpu-node-agent/agent
COPY .ci/finish-image /opt/gpu-node-agent/finish-image

FROM ${BASE}
COPY --from=build /opt/gpu-node-agent /opt/gpu-node-agent
# Byte code is made here, by the interpreter that will run it: the root file system is read-only later.
RUN ["python3", "/opt/gpu-node-agent/finish-image"]
ENV PYTHONPATH=/opt/gpu-node-agent \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    MALLOC_ARENA_MAX=2
EXPOSE 9446
# Root, because the kubelet's plugin folders are root's alone (docs/security.md).
USER 0:0
ENTRYPOINT ["/usr/local/bin/gpu-node-agent"]
CMD ["run"]
