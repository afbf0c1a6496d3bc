"""A certificate for loopback, made on the spot, which is its own CA."""

import subprocess
from dataclasses import dataclass
from pathlib import Path

NAMES = "DNS:localhost,IP:127.0.0.1"


@dataclass(frozen=True)
class Certificate:
    file: Path
    key: Path

    @property
    def flags(self) -> dict[str, object]:
        """Of a server."""
        return {"tls_cert": self.file, "tls_key": self.key}

    @property
    def trusted(self) -> dict[str, str]:
        """The environment of a client that trusts it."""
        return {"SSL_CERT_FILE": str(self.file)}


def make_certificate(folder: Path, *, password: str = "", names: str = NAMES) -> Certificate:
    """With a password, its key is encrypted."""
    made = Certificate(folder / "cert.pem", folder / "key.pem")
    locked = ["-passout", f"pass:{password}"] if password else ["-nodes"]
    kind = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
    line = ["openssl", "req", "-x509", *kind, *locked, "-days", "2", "-subj", "/CN=localhost"]
    line += ["-addext", f"subjectAltName={names}"]
    subprocess.run([*line, "-keyout", made.key, "-out", made.file], check=True, capture_output=True, timeout=60)
    made.key.chmod(0o600)
    return made
