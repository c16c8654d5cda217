# The agent's image: one build stage, and a root file system with nothing but Python and the agent in it, no shell
# and no package manager (.ci/slim-root). `make image` builds it without an engine and without a registry.
#
# Any base with glibc, Python 3.11 or newer and pip serves to build on. From a registry it is pinned by its digest:
# a tag may change what is built. This one is Python 3.11.16 on Debian 12.
ARG BUILD_BASE=python:3.11-slim-bookworm@sha256:a36c24f9cbdf4fd0f52d67f0823eeac19c2028c637cecc392d97f980d4fec56b

FROM ${BUILD_BASE} AS toolkit
# nvidia-ctk and nvidia-cdi-hook, which make the CDI specification of the GPUs (docs/injection.md). A folder
# toolkit/ in the context, where there is one, stands in for the Go module proxy.
COPY .ci/build-toolkit .ci/container-toolkit/go.mod .ci/container-toolkit/go.sum .ci/container-toolkit/go.lock \
     toolki[t] /toolkit/
RUN sh /toolkit/build-toolkit /toolkit /usr/libexec/gpu-node-agent

FROM ${BUILD_BASE} AS build
# A folder wheels/ in the context, where there is one, stands in for the package index, and a folder lib/ for building
# the enforcement library.
COPY requirements.lock wheel[s] li[b] /wheels/
RUN set -eu; \
    offline=""; for wheel in /wheels/*.whl; do [ -e "$wheel" ] && offline="--no-index --find-links=/wheels"; done; \
    python3 -m pip install --quiet --no-cache-dir --no-compile --disable-pip-version-check --root-user-action=ignore \
        --require-hashes --only-binary=:all: $offline --target=/image/opt/gpu-node-agent \
        --requirement=/wheels/requirements.lock; \
    cd /image/opt/gpu-node-agent; \
    # Of the Kubernetes client only the HTTP layer is used (agent/cluster/lean.py); its models are 30 MB.
    rm -rf bin kubernetes_asyncio/client/models kubernetes_asyncio/client/api
COPY agent /image/opt/gpu-node-agent/agent
COPY .ci/clib /image/opt/gpu-node-agent/.ci/clib
COPY --from=toolkit /usr/libexec/gpu-node-agent /image/usr/libexec/gpu-node-agent
# The library that vGPU containers preload, in C; the compiler and NVIDIA's headers, pinned by hash, stay in this stage.
RUN set -eu; cd /image/opt/gpu-node-agent; mkdir lib; \
    if [ -e /wheels/libgna-limits.so ]; then cp /wheels/libgna-limits.so lib/; \
    else PYTHONPATH=.ci python3 -m clib.build_library lib; fi; \
    rm -rf agent/vgpu/clib .ci
COPY .ci/slim-root .ci/finish-image /build/
# Byte code is made here, by the interpreter that will run it: the root file system is read-only later.
# `.ci/release version --package` says it; without it the image says what agent/__init__.py does.
ARG VERSION=""
RUN if [ -n "$VERSION" ]; then \
        sed -i "s/^__version__ = .*/__version__ = \"$VERSION\"/" /image/opt/gpu-node-agent/agent/__init__.py; fi; \
    mv /build/finish-image /image/opt/gpu-node-agent/ && python3 /build/slim-root /image

FROM scratch
COPY --from=build /image /
ENV PATH=/usr/local/bin:/usr/bin \
    PYTHONPATH=/opt/gpu-node-agent \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    PYTHONNODEBUGRANGES=1 \
    MALLOC_ARENA_MAX=2
EXPOSE 9446
# Root, because the kubelet's plugin folders are root's alone (docs/security.md).
USER 0:0
ENTRYPOINT ["/usr/local/bin/gpu-node-agent"]
CMD ["run"]
