"""What makes a link between hosts private: TLS 1.3, with a key and a certificate that a relay makes when it starts.

Nobody vouches for the certificate. Its fingerprint is a part of the relay's address, which travels over the control
channel, and who connects accepts no other. That the caller belongs to the run is shown afterwards, by the run's token.
Only relays that listen to other hosts need the package `cryptography`.
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

LOOPBACK = "127.0.0.1"
MEMORY = "/dev/shm"
VALID = datetime.timedelta(days=3650)  # it ends with its relay; this is only not to be the reason why a run ends


class ListenError(ValueError):
    """A relay cannot listen as the settings say; the sentence says why."""


class Identity:
    """The key of one relay, made anew at every start and never stored."""

    def __init__(self) -> None:
        certificate, key = _make_certificate()
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


def _make_certificate() -> tuple[bytes, bytes]:
    """A certificate and its key, in PEM."""
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError:
        raise ListenError(
            "links to other hosts are encrypted, which needs a package: pip install 'tailrace[hosts]'"
        ) from None
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "tailrace relay")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - VALID)
        .not_valid_after(now + VALID)
        .sign(key, hashes.SHA256())
    )
    plain = serialization.NoEncryption()
    pem = serialization.Encoding.PEM
    return certificate.public_bytes(pem), key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain)
