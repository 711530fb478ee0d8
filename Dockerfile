# fl-lightning on CPUs: docker build -t fl-lightning . && docker run -v "$PWD/runs:/work/runs" fl-lightning fit --config quickstart
FROM python:3.11-slim

# the compiler is for local steps as one graph, and for kernels; everything runs without it, slower
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
# wheels of PyTorch without CUDA are smaller: --build-arg TORCH_INDEX=<their index>
ARG TORCH_INDEX=""
RUN pip install --no-cache-dir torch torchvision ${TORCH_INDEX:+--index-url "$TORCH_INDEX"}
COPY . /source
RUN pip install --no-cache-dir /source && rm -r /source
RUN useradd --create-home user && mkdir /work && chown user /work
USER user
WORKDIR /work
ENTRYPOINT ["fl-lightning"]
CMD ["--help"]
