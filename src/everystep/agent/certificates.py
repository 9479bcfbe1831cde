"""The certificate of an agent: made anew for each session, signed by itself, known by its hash."""

from __future__ import annotations

import datetime
import hashlib
import importlib.util
import os
import ssl

from everystep.errors import UsageError

_DAYS = 3650
_NAME = "everystep"


def is_installed() -> bool:
    """Whether certificates can be made here: `pip install everystep[peers]`."""
    return importlib.util.find_spec("cryptography") is not None


def server_context() -> tuple[ssl.SSLContext, str]:
    """TLS for an agent that others connect to, and the SHA-256 of its certificate.

    Raises:
        UsageError: the package `cryptography` is not installed.
    """
    if not is_installed():
        raise UsageError(
            "copies on other hosts go through TLS, and the package cryptography is not installed",
            hint="pip install everystep[peers]",
        )
    key, certificate = _made()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    fd = os.memfd_create("everystep-certificate", os.MFD_CLOEXEC)  # never on a disk
    try:
        os.write(fd, key + certificate)
        context.load_cert_chain(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)
    der = ssl.PEM_cert_to_DER_cert(certificate.decode())
    return context, hashlib.sha256(der).hexdigest()


def client_context() -> ssl.SSLContext:
    """TLS for the other end, which compares the certificate's hash with the one it knows: no name
    and no authority says anything of it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def _made() -> tuple[bytes, bytes]:
    """A private key and its certificate, as PEM."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, _NAME)])
    today = datetime.datetime.now(datetime.timezone.utc)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(today - datetime.timedelta(days=1))
        .not_valid_after(today + datetime.timedelta(days=_DAYS))
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    private = key.private_bytes(
        pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return private, certificate.public_bytes(pem)
