"""What carries the bytes of connections: the seam, and stream sockets behind it (`memory.py` is the other one).

An address is a path (a Unix socket) or `host:port`. A Unix socket is private by its folder (0700) and its own mode
(0600). TCP leaves the machine only under mutual TLS.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import ipaddress
import os
import socket
import ssl
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from scheduler.wire.codec import WireError

Address = Path | str
ProtocolFactory = Callable[[], asyncio.Protocol]

SOCKET_PATH_LIMIT = 100  # bytes; the kernel's own limit is 104 to 108, by system
CONNECT_TIMEOUT = 5.0  # seconds
BACKLOG = 128


class AddressError(WireError):
    """An address that cannot be used; the text says why."""


class Listener(Protocol):
    """Accepts connections until closed. `address` is where it really listens (the port, when 0 was asked for)."""

    address: Address

    async def aclose(self) -> None: ...


class Transport(Protocol):
    """A way to reach an address."""

    async def listen(self, address: Address, factory: ProtocolFactory) -> Listener:
        """Raises AddressError when somebody else listens there or the address is not allowed."""
        ...

    async def connect(self, address: Address, factory: ProtocolFactory) -> None:
        """Raises OSError when nobody listens there, AddressError when the address is not allowed."""
        ...


def socket_path(run_dir: Path, name: str) -> Path:
    """Where the Unix socket `name` of this installation is, the same in every process.

    A path too long for the kernel moves to a private folder under the system's temporary directory.
    """
    path = run_dir / f"{name}.sock"
    if len(os.fsencode(path)) <= SOCKET_PATH_LIMIT:
        return path
    digest = hashlib.sha256(os.fsencode(run_dir)).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"harness-{os.getuid()}-{digest}" / f"{name}.sock"


class SocketTransport:
    """Unix sockets, and TCP. The TLS contexts must demand the peer's certificate."""

    def __init__(self, *, server_tls: ssl.SSLContext | None = None, client_tls: ssl.SSLContext | None = None) -> None:
        for context in (server_tls, client_tls):
            if context is not None and context.verify_mode is not ssl.CERT_REQUIRED:
                raise AddressError("TLS between machines must be mutual: set verify_mode to CERT_REQUIRED.")
        self._server_tls = server_tls
        self._client_tls = client_tls

    async def listen(self, address: Address, factory: ProtocolFactory) -> Listener:
        loop = asyncio.get_running_loop()
        if (path := _unix_path(address)) is not None:
            bound = _bind_unix(path)
            return _UnixListener(await loop.create_unix_server(factory, sock=bound), path)
        host, port = _host_port(str(address), encrypted=self._server_tls is not None)
        try:
            server = await loop.create_server(factory, host, port, ssl=self._server_tls, backlog=BACKLOG)
        except OSError as error:
            raise AddressError(f"Cannot listen on {address}: {error.strerror or error}.") from error
        return _TcpListener(server, host)

    async def connect(self, address: Address, factory: ProtocolFactory) -> None:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(CONNECT_TIMEOUT):  # TimeoutError is an OSError
            if (path := _unix_path(address)) is not None:
                _check_owner(path.parent)  # or another user could sit in our place under a shared folder
                await loop.create_unix_connection(factory, str(path))
            else:
                host, port = _host_port(str(address), encrypted=self._client_tls is not None)
                await loop.create_connection(factory, host, port, ssl=self._client_tls)


class _TcpListener:
    def __init__(self, server: asyncio.Server, host: str) -> None:
        self._server = server
        port = server.sockets[0].getsockname()[1]
        self.address: Address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    async def aclose(self) -> None:
        self._server.close()


class _UnixListener:
    def __init__(self, server: asyncio.Server, path: Path) -> None:
        self._server = server
        self.address: Address = path
        self._path = path
        self._inode = path.stat().st_ino

    async def aclose(self) -> None:
        with _locked_folder(self._path.parent):
            self._server.close()
            if self._path.exists() and self._path.stat().st_ino == self._inode:  # not a successor's
                self._path.unlink()


def _unix_path(address: Address) -> Path | None:
    return Path(address) if isinstance(address, Path) or "/" in address else None


def _host_port(address: str, *, encrypted: bool) -> tuple[str, int]:
    host, separator, port = address.rpartition(":")
    host = host.strip("[]")
    if not separator or not host or not port.isdigit():
        raise AddressError(f"{address!r} is not of the form host:port.")
    if not encrypted and not _is_loopback(host):
        raise AddressError(f"{address} leaves this machine, which needs mutual TLS.")
    return host, int(port)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _bind_unix(path: Path) -> socket.socket:
    """A listening socket at `path`, taking over the file of a listener that died."""
    _make_private_folder(path.parent)
    with _locked_folder(path.parent):  # two starters must not both find the file stale
        _remove_stale(path)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.bind(str(path))
            path.chmod(0o600)
            sock.listen(BACKLOG)
        except OSError as error:
            sock.close()
            raise AddressError(f"Cannot listen on {path}: {error.strerror or error}.") from error
    sock.setblocking(False)
    return sock


def _make_private_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        _check_owner(folder)
        folder.chmod(0o700)
    except OSError as error:
        raise AddressError(f"{folder} cannot hold a socket: {error.strerror or error}.") from error


def _check_owner(folder: Path) -> None:
    if not folder.is_dir() or {folder.lstat().st_uid, folder.stat().st_uid} != {os.getuid()}:
        raise AddressError(f"{folder} is not a folder of this user; no socket in it is trusted.")


@contextmanager
def _locked_folder(folder: Path) -> Iterator[None]:
    """Held for microseconds, and given back by the kernel whatever happens to this process."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _remove_stale(path: Path) -> None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise AddressError(f"{path} exists and is not a socket.")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
        except OSError as error:
            raise AddressError(f"{path} is in use: {error.strerror or error}.") from error
        else:
            raise AddressError(f"{path} is in use by another process.")
