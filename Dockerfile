# An image for NVIDIA GPUs, with the versions of requirements/constraints.txt:
#
#   docker build --tag swjax .                          # CUDA 13; --build-arg CUDA=12 for older drivers
#   docker run --gpus all --volume "$PWD/runs:/swjax/runs" swjax \
#     --config=configs/openmoji.py --workdir=runs/openmoji
#
# jax's wheels bring CUDA, so that a plain Python is enough; the host has the driver and NVIDIA's container
# toolkit. jax-triton needs Python 3.12.
FROM python:3.12-slim-bookworm

ARG CUDA=13
WORKDIR /swjax
COPY . .
RUN pip install --no-cache-dir --no-compile --constraint requirements/constraints.txt \
      --editable ".[train,cuda${CUDA}]"

ENTRYPOINT ["python", "train.py"]
