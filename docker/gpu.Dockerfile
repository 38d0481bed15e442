# keras_dist with TensorFlow and Horovod for NVIDIA GPUs. In a clone:
#
#     docker build -f docker/gpu.Dockerfile -t keras-dist-gpu .
#     docker run --rm --gpus all keras-dist-gpu
#
# UNTESTED: linted only; never built, never run on a GPU.
#
# By default the GPUs compute and the CPU reduces. With `--build-arg HOROVOD_OPTIONS=--gpu` Horovod is built with NCCL
# and reduces on the GPUs, but its NCCL operations do not compile with TensorFlow 2.19 and later without changes
# (horovod#4302, #4313, #4314), which keras_dist does not make yet.
ARG BUILD_BASE=nvidia/cuda:12.6.3-devel-ubuntu24.04
ARG BASE=nvidia/cuda:12.6.3-runtime-ubuntu24.04

FROM ${BUILD_BASE} AS build
# Horovod's copy of Gloo does not compile with GCC 13, the default of this release.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends ca-certificates g++-12 libnccl-dev make python3 python3-venv \
 && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/keras_dist
ENV PATH=/opt/keras_dist/bin:$PATH \
    CC=gcc-12 \
    CXX=g++-12 \
    CUDAHOSTCXX=g++-12 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1
WORKDIR /build
COPY docker/requirements-gpu.txt docker/
RUN pip install --require-hashes -r docker/requirements-gpu.txt
ARG HOROVOD_OPTIONS=""
ENV HOROVOD_CUDA_HOME=/usr/local/cuda
COPY setup.cfg pyproject.toml README.md LICENSE ./
COPY keras_dist keras_dist
# Not quoted: there may be several options.
# hadolint ignore=SC2086
RUN pip install --no-deps . \
 && keras-dist install-horovod ${HOROVOD_OPTIONS}

FROM ${BASE}
# Ubuntu's images already have a user with ID 1000.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends libnccl2 python3 \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --create-home --uid 1001 trainer
COPY --from=build /opt/keras_dist /opt/keras_dist
ENV PATH=/opt/keras_dist/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    TF_CPP_MIN_LOG_LEVEL=2
USER 1001:1001
WORKDIR /home/trainer
COPY --chown=trainer:trainer examples examples
CMD ["python", "examples/demo.py"]
