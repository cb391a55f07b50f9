"""What makes a link between hosts private: TLS 1.3, with a key and a certificate that who listens makes at its start.

Nobody vouches for the certificate. Its fingerprint is a part of a relay's address, which travels over the control
channel, and of the key with which machines join a run; who connects accepts no other. That the caller belongs to the
run is shown afterwards. Only who listens to other hosts needs the package `cryptography`.
"""

from __future__ import annotations

import datetime
import hashlib
import ipaddress
import os
import socket
import ssl
import tempfile
from functools import cache
from pathlib import Path

from tailrace.errors import TailraceError

LOOPBACK = "127.0.0.1"
MEMORY = "/dev/shm"
BEGIN, END = datetime.datetime(2000, 1, 1), datetime.datetime(2100, 1, 1)  # nobody looks: only not to end a run


class ListenError(TailraceError):
    """A relay cannot listen as the settings say; the sentence says why."""


class Identity:
    """The key of who listens, never stored: made anew at every start, or from 32 secret bytes, always the same."""

    def __init__(self, secret: bytes = b"") -> None:
        certificate, key = _make_certificate(secret)
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_3
        self.context.num_tickets = 0  # every connection stands for itself
        self.fingerprint = _load(self.context, certificate, key)


@cache
def caller_context() -> ssl.SSLContext:
    """For those who connect; they compare fingerprints instead of asking an authority."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def fingerprint(certificate: bytes) -> str:
    """Of a certificate in DER."""
    return hashlib.sha256(certificate).hexdigest()


def own_address(listen: str) -> str:
    """The address of this host in a network (`10.1.0.0/16`); a single address is a network of one."""
    network = ipaddress.ip_network(listen, strict=False)
    probe = network[1] if network.num_addresses > 1 else network[0]
    family = socket.AF_INET if network.version == 4 else socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as asking:
            asking.connect((str(probe), 9))  # sends nothing: it only chooses the way there
            found = asking.getsockname()[0]
    except OSError as error:
        raise ListenError(f"this host has no way into {listen} ({error.strerror}); {ADVICE}") from None
    if ipaddress.ip_address(found) not in network:
        raise ListenError(f"this host has no address in {listen}; {ADVICE}")
    return found


ADVICE = "write an address of it, or a network that it is in, as relay.listen"


def is_loopback(host: str) -> bool:
    return ipaddress.ip_address(host).is_loopback


def _load(context: ssl.SSLContext, certificate: bytes, key: bytes) -> str:
    """`ssl` takes keys from files only: one in memory, for us alone, for a moment."""
    with tempfile.TemporaryDirectory(dir=MEMORY if os.path.isdir(MEMORY) else None) as folder:
        path = Path(folder) / "key"
        path.touch(0o600)
        path.write_bytes(key + certificate)
        context.load_cert_chain(path)
    return fingerprint(ssl.PEM_cert_to_DER_cert(certificate.decode()))


def _make_certificate(secret: bytes) -> tuple[bytes, bytes]:
    """A certificate and its key, in PEM. Signatures with Ed25519 are always the same; browsers do not know it."""
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec, ed25519
    except ImportError:
        raise ListenError(
            "links to other hosts are encrypted, which needs a package: pip install 'tailrace[hosts]'"
        ) from None
    fixed = ed25519.Ed25519PrivateKey.from_private_bytes(secret) if secret else None
    key = fixed or ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "tailrace")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1 if fixed else x509.random_serial_number())
        .not_valid_before(BEGIN)
        .not_valid_after(END)
        .sign(key, None if fixed else hashes.SHA256())
    )
    plain = serialization.NoEncryption()
    pem = serialization.Encoding.PEM
    return certificate.public_bytes(pem), key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain)
