# An image for training: on a CPU by default, with EXTRA=gpu on NVIDIA GPUs
# (CUDA comes with JAX's wheels; the host needs the driver and NVIDIA's container
# toolkit).
#
#   docker build -t jaxrl_llm .
#   docker run --rm -v "$PWD/runs:/train/runs" jaxrl_llm \
#     jaxrl-train --config=vapo --workdir=runs/first
#
#   docker build -t jaxrl_llm:gpu --build-arg EXTRA=gpu .
#   docker run --rm --gpus=all --shm-size=2g -v "$PWD/runs:/train/runs" \
#     jaxrl_llm:gpu jaxrl-train --config=grpo:gsm8k ...
FROM python:3.12-slim
ARG EXTRA=plot
COPY . /src
RUN pip install --no-cache-dir "/src[plot,$EXTRA]" && rm -r /src
# A stopped run saves first; docker stop sends SIGTERM and waits.
STOPSIGNAL SIGTERM
# Compiled programs survive a restart if this folder is a volume.
ENV JAX_COMPILATION_CACHE_DIR=/train/.jax_cache
WORKDIR /train
CMD ["jaxrl-train", "--help"]
