"""Real remote storages on loopback: S3 (moto's server), SSH (asyncssh's) and WebDAV (wsgidav).

with s3(folder) as remote:
    remote.url, remote.settings, remote.env      for `dvc remote add`, `… modify --local`, dvc
"""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import asyncssh
import boto3
from cheroot.wsgi import Server as CherootServer
from moto.server import ThreadedMotoServer
from wsgidav.wsgidav_app import WsgiDAVApp

HOST = "127.0.0.1"
USER, PASSWORD = "someone", "not-the-secret-of-anyone"


@dataclass
class Remote:
    url: str
    settings: dict[str, str] = field(default_factory=dict)  # of .dvc/config.local, not in git
    env: dict[str, str] = field(default_factory=dict)


@contextmanager
def s3(folder: Path) -> Iterator[Remote]:
    """In memory; `folder` stays empty."""
    server = ThreadedMotoServer(HOST, port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    keys = {"AWS_ACCESS_KEY_ID": USER, "AWS_SECRET_ACCESS_KEY": PASSWORD}
    boto3.client(
        "s3",
        endpoint_url=endpoint,
        region_name="us-east-1",
        aws_access_key_id=USER,
        aws_secret_access_key=PASSWORD,
    ).create_bucket(Bucket="drafts")
    try:
        yield Remote(
            "s3://drafts/store",
            env={**keys, "AWS_ENDPOINT_URL": endpoint, "AWS_DEFAULT_REGION": "us-east-1"},
        )
    finally:
        server.stop()


@contextmanager
def ssh(folder: Path) -> Iterator[Remote]:
    key = asyncssh.generate_private_key("ssh-ed25519")
    keyfile = folder / "id_ed25519"
    keyfile.write_bytes(key.export_private_key())
    keyfile.chmod(0o600)
    (folder / "authorized_keys").write_bytes(key.export_public_key())
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()

    async def listen() -> asyncssh.SSHAcceptor:
        return await asyncssh.listen(
            HOST,
            0,
            server_host_keys=[asyncssh.generate_private_key("ssh-ed25519")],
            authorized_client_keys=str(folder / "authorized_keys"),
            sftp_factory=True,
        )

    server = asyncio.run_coroutine_threadsafe(listen(), loop).result(30)
    try:
        yield Remote(
            f"ssh://{USER}@{HOST}:{server.get_port()}{folder}/store",
            settings={"keyfile": str(keyfile)},
        )
    finally:
        loop.call_soon_threadsafe(server.close)
        loop.call_soon_threadsafe(loop.stop)


@contextmanager
def webdav(folder: Path) -> Iterator[Remote]:
    store = folder / "dav"
    (store / "store").mkdir(parents=True)
    app = WsgiDAVApp(
        {
            "provider_mapping": {"/": str(store)},
            "simple_dc": {"user_mapping": {"*": {USER: {"password": PASSWORD}}}},
            "verbose": 0,
            "logging": {"enable": False},
        }
    )
    server = CherootServer((HOST, 0), app)
    server.prepare()
    thread = threading.Thread(target=server.serve, daemon=True)
    thread.start()
    try:
        yield Remote(
            f"webdav://{HOST}:{server.bind_addr[1]}/store",
            settings={"user": USER, "password": PASSWORD},
        )
    finally:
        server.stop()
