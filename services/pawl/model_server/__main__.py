"""Runs the scripted model server: `python -m pawl.model_server --listen 127.0.0.1:7622`."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import uvloop

from pawl.chassis.process import logs
from pawl.model_server.script import Script, ScriptError, load_script
from pawl.model_server.server import ModelServer
from pawl.server.process import log_setup

_USAGE_ERROR = 2


def main() -> int:
    """Serve until SIGTERM or SIGINT. Return 2 and print one sentence if the server cannot start."""
    options = _parser().parse_args()
    log_setup.configure(
        service="model-server", instance_id=str(os.getpid()), level=options.log_level, log_format="auto"
    )
    try:
        script = load_script(options.script) if options.script else Script()
        uvloop.run(_serve(options, script))
    except (ScriptError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return _USAGE_ERROR
    return 0


async def _serve(options: argparse.Namespace, script: Script) -> None:
    host, _, port = options.listen.rpartition(":")
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    log = logs.get_logger(__name__)
    async with ModelServer(
        script=script, host=host.strip("[]"), port=int(port), reasoning_echo=options.require_reasoning_echo
    ) as server:
        if options.address_file:
            _write_whole(options.address_file, json.dumps({"http": server.address}))
        log.info("http.listening", address=server.address, steps=len(script.steps))
        await stop.wait()
    log.info("http.stopped", requests=server.request_count)


def _write_whole(path: Path, text: str) -> None:
    """Write the file atomically, so that readers see either the whole file or none of it."""
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    draft.write_text(text)
    draft.replace(path)


def _listen(text: str) -> str:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal():
        raise argparse.ArgumentTypeError(f"expected host:port, got {text!r}")
    return text


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m pawl.model_server",
        description="A scripted model server with the OpenAI chat-completions protocol. No language model inside.",
    )
    add = parser.add_argument
    add("--listen", type=_listen, default="127.0.0.1:7622", metavar="HOST:PORT", help="port 0: any free port")
    add("--script", type=Path, metavar="FILE", help="a JSON script of answers that replaces the rules")
    add("--address-file", type=Path, metavar="FILE", help='write {"http": "host:port"} here when listening')
    add(
        "--require-reasoning-echo",
        action="store_true",
        help="refuse assistant tool-call messages without their reasoning_content",
    )
    add("--log-level", choices=("debug", "info", "warning", "error"), default="info")
    return parser


if __name__ == "__main__":
    sys.exit(main())
