#!/bin/sh
# Makes a role for each service, the owner of its own schema and of nothing else. PostgreSQL's image runs this once, when
# it makes its files; with an older volume, run it by hand as a superuser.
set -eu
psql --set=ON_ERROR_STOP=1 --no-psqlrc --quiet --username "$POSTGRES_USER" --dbname "$POSTGRES_DB" <<'SQL'
\getenv database POSTGRES_DB
\getenv job_store POSTGRES_JOB_STORE_PASSWORD
\getenv tool_registry POSTGRES_TOOL_REGISTRY_PASSWORD
\getenv notifier POSTGRES_NOTIFIER_PASSWORD
CREATE ROLE job_store LOGIN PASSWORD :'job_store';
CREATE ROLE tool_registry LOGIN PASSWORD :'tool_registry';
CREATE ROLE notifier LOGIN PASSWORD :'notifier';
REVOKE ALL ON DATABASE :"database" FROM PUBLIC;
GRANT CONNECT ON DATABASE :"database" TO job_store, tool_registry, notifier;
REVOKE ALL ON SCHEMA public FROM PUBLIC;
CREATE SCHEMA job_store AUTHORIZATION job_store;
CREATE SCHEMA tool_registry AUTHORIZATION tool_registry;
CREATE SCHEMA notifier AUTHORIZATION notifier;
SQL
