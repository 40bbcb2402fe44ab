# syntax=docker/dockerfile:1
# Router and worker images. docker-bake.json builds all of them:
#
#   docker buildx bake                    router, worker-cpu, worker-cuda, worker-ascend
#   docker build --target router .        one of them

ARG PYTHON_IMAGE=python:3.11-slim-bookworm
# Where workers run: needs Python 3.11 to 3.13, and the libraries of its accelerator that torch does not bring along.
ARG WORKER_BASE=python:3.11-slim-bookworm

FROM ${PYTHON_IMAGE} AS wheels
WORKDIR /src
ARG PIP_FLAGS=""
COPY pyproject.toml LICENSE ./
COPY sdk sdk
COPY common common
COPY services services
COPY checkpoints checkpoints
# hadolint ignore=SC2086
RUN python -m pip wheel --no-cache-dir --no-deps ${PIP_FLAGS} --wheel-dir /wheels ./sdk .

FROM ${PYTHON_IMAGE} AS router-packages
ARG PIP_FLAGS=""
RUN --mount=from=wheels,source=/wheels,target=/wheels \
    python -m venv /opt/dspark && \
    /opt/dspark/bin/pip install --no-cache-dir ${PIP_FLAGS} \
        /wheels/dspark_client-*.whl "$(echo /wheels/dspark_serving-*.whl)[tracing]"

FROM ${WORKER_BASE} AS worker-packages
ARG PIP_FLAGS=""
# An exact version, and what has to fit it, such as torch-npu; PIP_FLAGS may name an index with other builds of it.
ARG TORCH="torch==2.13.0"
ARG EXTRAS="engine,nixl,tracing"
RUN --mount=from=wheels,source=/wheels,target=/wheels \
    python3 -m venv /opt/dspark && \
    /opt/dspark/bin/pip install --no-cache-dir ${PIP_FLAGS} ${TORCH} && \
    /opt/dspark/bin/pip install --no-cache-dir ${PIP_FLAGS} ${TORCH} \
        /wheels/dspark_client-*.whl "$(echo /wheels/dspark_serving-*.whl)[${EXTRAS}]"

FROM ${PYTHON_IMAGE} AS router
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="dspark-serving-router" \
      org.opencontainers.image.description="Router and client of DSpark Serving; without torch" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.licenses="MIT"
RUN groupadd --gid 10001 dspark && useradd --uid 10001 --gid 10001 --create-home dspark
COPY --from=router-packages /opt/dspark /opt/dspark
COPY --chmod=0755 docker/entrypoint.sh /usr/local/bin/dspark-entrypoint
COPY --chmod=0755 docker/healthcheck.py /usr/local/bin/dspark-healthcheck
ENV PATH="/opt/dspark/bin:${PATH}" PYTHONUNBUFFERED=1
USER 10001:10001
EXPOSE 50051 9090
HEALTHCHECK --interval=5s --timeout=5s --start-period=10m --retries=6 CMD ["/opt/dspark/bin/python", "/usr/local/bin/dspark-healthcheck"]
ENTRYPOINT ["dspark-entrypoint"]
CMD ["router", "--router.host=0.0.0.0", "--router.admin-port=9090"]

FROM ${WORKER_BASE} AS worker
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="dspark-serving-worker" \
      org.opencontainers.image.description="Prefill and decode workers of DSpark Serving" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.licenses="MIT"
# Such as a compiler, for kernels that are compiled where they run.
ARG PACKAGES=""
# The others are what transfer engines need to speak to network cards.
# hadolint ignore=DL3008,SC2086
RUN apt-get update && \
    apt-get install --yes --no-install-recommends ibverbs-providers libibverbs1 librdmacm1 ${PACKAGES} && \
    rm -rf /var/lib/apt/lists/* && \
    groupadd --gid 10001 dspark && useradd --uid 10001 --gid 10001 --create-home dspark
COPY --from=worker-packages /opt/dspark /opt/dspark
COPY --chmod=0755 docker/entrypoint.sh /usr/local/bin/dspark-entrypoint
COPY --chmod=0755 docker/healthcheck.py /usr/local/bin/dspark-healthcheck
ENV PATH="/opt/dspark/bin:${PATH}" PYTHONUNBUFFERED=1
USER 10001:10001
EXPOSE 50052 50053 9090
# Large checkpoints load for long.
HEALTHCHECK --interval=5s --timeout=5s --start-period=1h --retries=6 CMD ["/opt/dspark/bin/python", "/usr/local/bin/dspark-healthcheck"]
ENTRYPOINT ["dspark-entrypoint"]
CMD ["decode", "--decode.host=0.0.0.0", "--decode.admin-port=9090"]
