from pawl.chassis.process.imports import without

# nats-py would load aiohttp for WebSockets, which Pawl does not use: 9 MiB in each process.
with without("aiohttp"):
    import nats.aio.client  # noqa: F401
