# fl-lightning on CPUs: docker build -t fl-lightning . && docker run fl-lightning fit --config quickstart
# Runs are in /srv/runs: mount a folder there to keep them.
FROM python:3.11-slim

# the compiler is for local steps as one graph, and for kernels; everything runs without it, slower
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
COPY . /source
RUN pip install --no-cache-dir /source && rm -r /source
RUN useradd --create-home user && chown user /srv
USER user
WORKDIR /srv
ENTRYPOINT ["fl-lightning"]
CMD ["--help"]
