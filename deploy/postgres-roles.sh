#!/bin/sh
# Creates two roles per service: <service>_owner, which creates and owns its schema, and <service>, which uses it with the
# privileges that the owner grants. Neither can access anything else. PostgreSQL's image runs this once, when it creates its
# files. With an older volume, stop the services and run it by hand as a superuser: existing roles keep their passwords,
# and objects that services own in this database go to the owners.
set -eu
for service in job_store tool_registry notifier; do
    upper=$(printf %s "$service" | tr '[:lower:]' '[:upper:]')
    eval "PAWL_PASSWORD=\$POSTGRES_${upper}_PASSWORD PAWL_OWNER_PASSWORD=\$POSTGRES_${upper}_OWNER_PASSWORD"
    export PAWL_PASSWORD PAWL_OWNER_PASSWORD
    psql --set=ON_ERROR_STOP=1 --no-psqlrc --quiet --single-transaction --set=service="$service" \
        --set=owner="${service}_owner" --username "$POSTGRES_USER" --dbname "$POSTGRES_DB" <<'SQL'
\getenv database POSTGRES_DB
\getenv password PAWL_PASSWORD
\getenv owner_password PAWL_OWNER_PASSWORD
SELECT format('CREATE ROLE %I LOGIN PASSWORD %L', role, password)
    FROM (VALUES (:'service', :'password'), (:'owner', :'owner_password')) roles (role, password)
    WHERE to_regrole(role) IS NULL \gexec
REVOKE ALL ON DATABASE :"database" FROM PUBLIC;
REVOKE ALL ON SCHEMA public FROM PUBLIC;
GRANT CONNECT ON DATABASE :"database" TO :"service", :"owner";
CREATE SCHEMA IF NOT EXISTS :"service" AUTHORIZATION :"owner";
REASSIGN OWNED BY :"service" TO :"owner";
SQL
done
