"""A network of its own in which every address there is leads to one server. A program; prints JSON.

It is run in a new network namespace, where each packet counts: those of TCP and
UDP that were sent are read from the kernel before and after what is refused.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import subprocess
from pathlib import Path
from typing import Any

import httpx2

from pawl.chassis.egress import GuardedEgress
from pawl.chassis.egress_requests import OutboundRequest
from pawl.chassis.egress_rules import EgressRefused
from pawl.chassis.ids import StoreId
from pawl.chassis.lookups import Lookups
from tests.web_server import Asked, Names, Reply, web_server

METADATA = "169.254.169.254"
PUBLIC = "93.184.216.34"
REFUSED = [
    "http://127.0.0.1/",
    "http://localhost/",
    "http://10.0.0.1/",
    "http://172.16.0.1/",
    "http://192.168.1.1/",
    "http://100.64.0.1/",
    "http://224.0.0.1/",
    "http://0.0.0.0/",
    f"http://{METADATA}/latest/meta-data/",
    "http://2852039166/",
    "http://0xa9fea9fe/",
    "http://0251.0376.0251.0376/",
    "http://169.16689662/",
    f"http://[::ffff:{METADATA}]/",
    f"http://[64:ff9b::{METADATA}]/",
    "http://[2002:a9fe:a9fe::1]/",
    "http://[::1]/",
    "http://[fe80::1]/",
    "http://[fd00:ec2::254]/",
    f"http://{PUBLIC}@{METADATA}/",
    f"http://{PUBLIC}:8080/",
    "http://metadata.example/",
    "http://mixed.example/",
    "http://mapped.example/",
]
NAMES = {
    "localhost": ["127.0.0.1", "::1"],
    "metadata.example": [METADATA],
    "mixed.example": [PUBLIC, METADATA],
    "mapped.example": [f"::ffff:{METADATA}"],
    "redirects.example": [PUBLIC],
    # Means the public address when it is judged, and the other one for who asks again.
    "rebinds.example": [[PUBLIC], [METADATA]],
}


def packets() -> int:
    """Segments and datagrams sent so far, as the kernel counts them for this namespace."""
    lines = [line.split() for line in Path("/proc/net/snmp").read_text().splitlines()]
    counted = 0
    for names, values in zip(lines[::2], lines[1::2], strict=True):
        table = dict(zip(names[1:], values[1:], strict=True))
        counted += sum(int(table.get(name, "0")) for name in ("OutSegs", "ActiveOpens", "OutDatagrams"))
    datagrams = [line.split() for line in Path("/proc/net/snmp6").read_text().splitlines()]
    return counted + sum(int(value) for name, value in datagrams if name == "Udp6OutDatagrams")


def answer(asked: Asked) -> Reply:
    """Redirect from one host, greet at all others."""
    if asked.headers["host"] == "redirects.example":
        return Reply(status=302, headers={"Location": f"http://{METADATA}/latest/meta-data/"})
    return Reply(b"hello")


async def main() -> dict[str, Any]:
    """Try everything, and return what happened."""
    for command in ("link set lo up", "route add local 0.0.0.0/0 dev lo", "-6 route add local ::/0 dev lo"):
        subprocess.run(["ip", *command.split()], check=True, capture_output=True)  # noqa: ASYNC221  # before anything runs
    names = Names(NAMES)  # type: ignore[arg-type]  # a mapping does not vary in what it holds
    egress = GuardedEgress({}, lookups=Lookups(names), tls=ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))

    async def reached(url: str) -> str:
        try:
            return (await egress.send(StoreId("acme"), OutboundRequest(url=url, timeout_seconds=60))).body.decode()
        except EgressRefused:
            return "refused"

    async with web_server(answer, host=["0.0.0.0", "::"], port=80) as server:  # noqa: S104  # of a network without a way out
        before = packets()
        refused = {url: await reached(url) for url in REFUSED}
        sent_to_refused = packets() - before
        # The kernel counts, the server is there, and without the guard all of it is reached.
        public = await reached(f"http://{PUBLIC}/")
        sent_to_public = packets() - before
        async with httpx2.AsyncClient(trust_env=False, timeout=60.0) as client:
            unguarded = (await client.get(f"http://{METADATA}/")).text
        controls, server.addresses = server.addresses, []
        redirected = await reached("http://redirects.example/")
        rebound = await reached("http://rebinds.example/")
        return {
            "refused": sorted(set(refused.values())),
            "sent_to_refused": sent_to_refused,
            "sent_to_public": sent_to_public,
            "public": public,
            "unguarded": unguarded,
            "controls": [address.removeprefix("::ffff:") for address in controls],
            "redirected": redirected,
            "rebound": rebound,
            "reached": [address.removeprefix("::ffff:") for address in server.addresses],
            "rebinds_asked": names.asked.count("rebinds.example"),
        }


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main())))  # noqa: T201
