"""`stepwell link` as a process, with a certificate and a secret of its own."""

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rig.certificates import Certificate, make_certificate
from rig.gateways import LOOPBACK, free_port
from rig.waiting import wait_until


@dataclass(frozen=True)
class LinkFiles:
    certificate: Certificate
    secret: Path

    @property
    def server_flags(self) -> dict[str, object]:
        return {**self.certificate.flags, "secret_file": self.secret}


@dataclass(frozen=True)
class ServedLink:
    host: str
    port: int
    files: LinkFiles
    process: "subprocess.Popen[bytes]"
    log: Path

    @property
    def client_flags(self) -> dict[str, object]:
        """Of a gateway, a dashboard or an Atropos server."""
        return {
            "ray_address": f"link://{self.host}:{self.port}",
            "link_secret_file": self.files.secret,
            "link_ca_file": self.files.certificate.file,
        }


def make_link_files(folder: Path, host: str = LOOPBACK) -> LinkFiles:
    folder.mkdir(exist_ok=True)
    secret = folder / "secret"
    secret.write_text(f"{secrets.token_hex(32)}\n")
    secret.chmod(0o600)
    return LinkFiles(make_certificate(folder, names=f"DNS:localhost,IP:{host}"), secret)


@contextmanager
def served_link(
    folder: Path, ray_address: str, namespace: str, *, host: str = LOOPBACK, port: int | None = None
) -> Iterator[ServedLink]:
    """Once it has joined Ray."""
    files, port, log = make_link_files(folder, host), port or free_port(), folder / "link.log"
    flags = {"listen": f"{host}:{port}", "ray_address": ray_address, "ray_namespace": namespace, **files.server_flags}
    line = [sys.executable, "-m", "stepwell", "link"]
    for name, value in flags.items():
        line += [f"--{name.replace('_', '-')}", str(value)]
    with log.open("ab") as output:
        process = subprocess.Popen(line, stdout=output, stderr=output, env=dict(os.environ))
    try:
        wait_until(lambda: process.poll() is not None or "Ray is joined" in log.read_text(), "the link to join Ray")
        assert process.poll() is None, log.read_text()
        yield ServedLink(host, port, files, process, log)
    finally:
        process.terminate()
        try:
            process.wait(60)
        finally:
            process.kill()
            process.wait()
