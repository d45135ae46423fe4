"""A certificate for the loopback hub, made anew each time, so that no key lies in the
repository."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from pathlib import Path

OPENSSL = shutil.which("openssl")
CERTIFICATE, _KEY = "hub.crt", "hub.key"


def server_context(folder: Path) -> ssl.SSLContext:
    """Make a certificate for the names of this machine in `folder`; clients are to trust
    `folder / CERTIFICATE`."""
    assert OPENSSL is not None
    certificate, key = folder / CERTIFICATE, folder / _KEY
    names = "subjectAltName=DNS:localhost,IP:127.0.0.1"
    usage = "keyUsage=critical,digitalSignature,keyCertSign"
    command = (
        "req -x509 -nodes -days 2 -subj /CN=localhost -newkey ec -pkeyopt"
        " ec_paramgen_curve:prime256v1"
    )
    more = ["-addext", names, "-addext", usage, "-keyout", str(key), "-out", str(certificate)]
    subprocess.run([OPENSSL, *command.split(), *more], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    return context
