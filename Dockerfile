# The GPU image is the default:  docker build -t hotshelf .
# The CPU image:                 docker build --target cpu -t hotshelf:cpu .
# Run: docker run --gpus all -p 127.0.0.1:8000:8000 -v "$PWD/demo:/repository" hotshelf

FROM scratch AS source
COPY pyproject.toml constraints.txt README.md LICENSE /app/
COPY server /app/server
COPY cache /app/cache
COPY models /app/models
COPY loadtests /app/loadtests

FROM python:3.11-slim-bookworm AS cpu-packages
COPY --from=source /app /app
RUN python3 -m venv /opt/hotshelf \
    && /opt/hotshelf/bin/pip install --no-cache-dir -c /app/constraints.txt -e '/app[cpu]'

FROM nvidia/cuda:13.0.1-cudnn-runtime-ubuntu24.04 AS gpu-packages
COPY --from=source /app /app
RUN apt-get update && apt-get install --yes --no-install-recommends python3-venv \
    && python3 -m venv /opt/hotshelf \
    && /opt/hotshelf/bin/pip install --no-cache-dir -c /app/constraints.txt -e '/app[gpu]'

FROM python:3.11-slim-bookworm AS cpu
ENV PATH=/opt/hotshelf/bin:$PATH PYTHONPATH=/app PYTHONUNBUFFERED=1 \
    NUMBA_CACHE_DIR=/var/cache/hotshelf HOTSHELF_REPOSITORY=/repository HOTSHELF_HOST=0.0.0.0
WORKDIR /app
COPY --from=source /app /app
COPY --from=cpu-packages /opt/hotshelf /opt/hotshelf
# The compiled index stays in the image, so that a start does not compile it again.
RUN useradd --system --uid 10001 hotshelf && mkdir -p /repository /var/cache/hotshelf \
    && python -c "import cache; cache.warm_up()" && chown -R hotshelf /repository /var/cache/hotshelf
USER hotshelf
VOLUME /repository
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=3s --start-period=60s CMD ["python", "-c", \
    "import urllib.request as r; r.build_opener(r.ProxyHandler({})).open('http://127.0.0.1:8000/v2/health/ready')"]
ENTRYPOINT ["python", "-m", "server", "serve"]

FROM nvidia/cuda:13.0.1-cudnn-runtime-ubuntu24.04 AS gpu
ENV PATH=/opt/hotshelf/bin:$PATH PYTHONPATH=/app PYTHONUNBUFFERED=1 \
    NUMBA_CACHE_DIR=/var/cache/hotshelf HOTSHELF_REPOSITORY=/repository HOTSHELF_HOST=0.0.0.0
WORKDIR /app
RUN apt-get update && apt-get install --yes --no-install-recommends python3 \
    && rm -rf /var/lib/apt/lists/*
COPY --from=source /app /app
COPY --from=gpu-packages /opt/hotshelf /opt/hotshelf
RUN useradd --system --uid 10001 hotshelf && mkdir -p /repository /var/cache/hotshelf \
    && python -c "import cache; cache.warm_up()" && chown -R hotshelf /repository /var/cache/hotshelf
USER hotshelf
VOLUME /repository
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=3s --start-period=60s CMD ["python", "-c", \
    "import urllib.request as r; r.build_opener(r.ProxyHandler({})).open('http://127.0.0.1:8000/v2/health/ready')"]
ENTRYPOINT ["python", "-m", "server", "serve"]
