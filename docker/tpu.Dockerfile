# keras_dist with TensorFlow for Cloud TPUs. On a TPU VM, in a clone:
#
#     docker build -f docker/tpu.Dockerfile -t keras-dist-tpu .
#     docker run --rm --privileged --net host keras-dist-tpu
#
# UNTESTED: linted only; never run on a TPU. There is no Horovod in it: one process leads all cores (docs/tpu.md).
ARG BASE=debian:12.12-slim

FROM ${BASE} AS build
# The Debian release fixes the versions of its packages: they get only security fixes.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends ca-certificates python3 python3-venv \
 && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/keras_dist
ENV PATH=/opt/keras_dist/bin:$PATH \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1
WORKDIR /build
COPY docker/requirements-tpu.txt docker/
RUN pip install --require-hashes -r docker/requirements-tpu.txt
COPY setup.cfg pyproject.toml README.md LICENSE ./
COPY keras_dist keras_dist
RUN pip install --no-deps .

FROM ${BASE}
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends python3 \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --create-home --uid 1000 trainer
COPY --from=build /opt/keras_dist /opt/keras_dist
ENV PATH=/opt/keras_dist/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    TF_CPP_MIN_LOG_LEVEL=2
USER 1000:1000
WORKDIR /home/trainer
COPY --chown=trainer:trainer examples examples
CMD ["python", "examples/demo.py"]
