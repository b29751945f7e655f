"""An empty service for tests of the launcher: it answers 200, writes its address file, and stops on a signal.

It writes its environment next to the address file. STAND_IN selects a fault: `usage` ends with exit code 2, `mute`
never becomes ready, `waiting` becomes ready once the process `second` runs, `stubborn` ignores SIGTERM, `broken` logs a
module of tools that cannot be loaded, `late` answers 503 three times, and `alone` answers 503 always.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import ssl
import sys
import time
from pathlib import Path


def main(address_file: Path, fault: str | None) -> None:
    def stop(*_: object) -> None:
        # A test may have removed the folder.
        with contextlib.suppress(FileNotFoundError), address_file.with_name("stopped").open("a") as order:
            order.write(f"{address_file.stem}\n")
        sys.exit(0)

    signal.signal(signal.SIGTERM, signal.SIG_IGN if fault == "stubborn" else stop)
    host, _, port = os.environ["PAWL_LISTEN"].rpartition(":")
    server = socket.create_server((host, int(port)))
    address_file.with_suffix(".environment").write_text(json.dumps(dict(os.environ)))
    while fault == "waiting" and not address_file.with_name("second.environment").exists():
        time.sleep(0.01)
    if fault != "mute":
        address = f"{host}:{server.getsockname()[1]}"
        draft = address_file.with_suffix(".draft")
        draft.write_text(json.dumps({"grpc": address, "http": address, "metrics": address}))
        draft.replace(address_file)
    if certificate := os.environ.get("PAWL_TLS_CERTIFICATE_FILE"):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, os.environ["PAWL_TLS_KEY_FILE"])
        server = context.wrap_socket(server, server_side=True)
    refusals = {"late": 3, "alone": 10**9}.get(fault or "", 0)
    while True:
        with contextlib.suppress(OSError), server.accept()[0] as connection:
            connection.recv(4096)
            refusals -= 1
            if refusals < 0:
                address_file.with_suffix(".well").touch()
            connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n" if refusals < 0 else b"HTTP/1.1 503 No\r\n\r\n")


if __name__ == "__main__":
    wanted = os.environ.get("STAND_IN")
    if wanted == "usage":
        sys.stderr.write("PAWL_NONSENSE is required\n")
        sys.exit(2)
    if wanted == "broken":
        line = {"event": "tool.module_broken", "tool_module": "shop", "error": "shop.py:1: SyntaxError"}
        sys.stderr.write(json.dumps(line) + "\n")
    main(Path(os.environ["PAWL_ADDRESS_FILE"]), wanted)
