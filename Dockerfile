# The GPU image is the default:  docker build -t hotshelf .
# The CPU image:                 docker build --target cpu -t hotshelf:cpu .
# Run: docker run --gpus all -p 127.0.0.1:8000:8000 -v "$PWD/demo:/repository" hotshelf
# Ask: docker run --rm --gpus all --entrypoint hotshelf hotshelf doctor --device cuda:0

FROM scratch AS source
COPY pyproject.toml constraints.txt constraints-gpu.txt README.md LICENSE /app/
COPY server /app/server
COPY cache /app/cache
COPY models /app/models
COPY loadtests /app/loadtests

FROM python:3.11-slim-bookworm AS cpu-packages
COPY --from=source /app /app
RUN python3 -m venv /opt/hotshelf \
    && /opt/hotshelf/bin/pip install --no-cache-dir -c /app/constraints.txt -e '/app[cpu]'

# CUDA 13, cuDNN 9, NVRTC and the headers that CuPy compiles with are packages of the extra `gpu`.
# Only the driver comes from the machine: release 580 or newer.
FROM python:3.11-slim-bookworm AS gpu-packages
COPY --from=source /app /app
RUN python3 -m venv /opt/hotshelf \
    && /opt/hotshelf/bin/pip install --no-cache-dir -c /app/constraints.txt -c /app/constraints-gpu.txt \
        -e '/app[gpu]'

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

FROM python:3.11-slim-bookworm AS gpu
# The driver's libraries for CUDA (compute) and NVML (utility) are put into the container at its
# start. ONNX Runtime finds its own by the library path. Kernels are compiled for the GPU at the
# first start and kept in the cache; a volume there keeps them for the next container.
ENV PATH=/opt/hotshelf/bin:$PATH PYTHONPATH=/app PYTHONUNBUFFERED=1 \
    NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    LD_LIBRARY_PATH=/opt/hotshelf/lib/python3.11/site-packages/nvidia/cu13/lib:/opt/hotshelf/lib/python3.11/site-packages/nvidia/cudnn/lib \
    CUPY_CACHE_DIR=/var/cache/hotshelf/cupy CUDA_CACHE_PATH=/var/cache/hotshelf/cuda \
    NUMBA_CACHE_DIR=/var/cache/hotshelf \
    HOTSHELF_DEVICE=auto HOTSHELF_REPOSITORY=/repository HOTSHELF_HOST=0.0.0.0
WORKDIR /app
COPY --from=source /app /app
COPY --from=gpu-packages /opt/hotshelf /opt/hotshelf
RUN useradd --system --uid 10001 hotshelf \
    && mkdir -p /repository "$CUPY_CACHE_DIR" "$CUDA_CACHE_PATH" \
    && python -c "import cache; cache.warm_up()" && chown -R hotshelf /repository /var/cache/hotshelf
USER hotshelf
VOLUME /repository
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=3s --start-period=60s CMD ["python", "-c", \
    "import urllib.request as r; r.build_opener(r.ProxyHandler({})).open('http://127.0.0.1:8000/v2/health/ready')"]
ENTRYPOINT ["python", "-m", "server", "serve"]
