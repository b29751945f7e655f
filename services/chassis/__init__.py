"""What every process needs and no service owns.

Server, channels, status mapping, authentication, health, logs, metrics,
settings, start and stop, database, bus, strict JSON, ids and clock. The chassis
knows no service; services hand it their servicers, checks and method names.
"""
