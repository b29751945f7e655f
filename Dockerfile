# One image for all services; the command names the module to run.
#
#   docker build -t pawl .
#   docker run pawl pawl.job_store

FROM python:3.13-slim AS build
COPY requirements/runtime.txt /tmp/
# Wheels only, each checked against the lock: nothing is compiled, and nothing runs while it installs.
RUN python -m venv /opt/venv \
 && /opt/venv/bin/pip install --no-cache-dir --disable-pip-version-check \
      --only-binary :all: --require-hashes -r /tmp/runtime.txt \
 && /opt/venv/bin/pip uninstall --yes pip

FROM python:3.13-slim
RUN useradd --system --uid 10001 --user-group --home-dir /nonexistent --no-create-home --shell /usr/sbin/nologin pawl
RUN install -d -o pawl -g pawl /var/lib/pawl/outbox /var/lib/pawl/files
COPY --from=build /opt/venv /opt/venv
COPY gen/pawl /opt/pawl/pawl
COPY services/pawl-client/pawl /opt/pawl/pawl
COPY services/pawl /opt/pawl/pawl
COPY deploy/healthcheck.py /opt/pawl/healthcheck.py
ENV PATH=/opt/venv/bin:$PATH PYTHONPATH=/opt/pawl PYTHONUNBUFFERED=1 GRPC_VERBOSITY=NONE
ENV GRPC_EXPERIMENTS=-event_engine_client,-event_engine_listener
# Bytecode is written here, because the process may not write anywhere.
RUN python -m compileall -q /opt/pawl
ENV PYTHONDONTWRITEBYTECODE=1
USER 10001:10001
WORKDIR /opt/pawl
ENTRYPOINT ["python", "-m"]
CMD ["pawl.agent_loop"]
