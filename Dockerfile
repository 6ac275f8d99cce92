# The commands, with all that they need: docs/install.md says how to build and run this.
FROM python:3.11-slim
RUN apt-get update && apt-get install -y --no-install-recommends g++ git && rm -rf /var/lib/apt/lists/*
# Empty: PyTorch with CUDA, in the version of requirements.lock; else an index that has another build of it.
ARG TORCH_INDEX=
RUN if [ -n "$TORCH_INDEX" ]; then python -m pip install --no-cache-dir torch torchvision --index-url "$TORCH_INDEX"; fi
WORKDIR /smoothadv
COPY . .
RUN PIP_NO_CACHE_DIR=1 bash -euo pipefail -c "source scripts/environment.sh"
ENV PATH=/smoothadv/.venv/bin:$PATH
ENTRYPOINT ["smoothadv"]
CMD ["--help"]
