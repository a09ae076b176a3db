"""Opens the journal that a configuration names, and the place of pushed adapters beside it."""

import asyncio
from typing import TYPE_CHECKING

from deployments.config import ClusterSettings
from deployments.journal import Journal
from deployments.push_store import PushStore
from deployments.state_store import SqliteStateStore, StateStore

if TYPE_CHECKING:
    from deployments.journal_object import JournalObject


async def open_journal(settings: ClusterSettings, model_id: str) -> StateStore:
    """Take the journal of a base model, wherever the settings put it."""
    uri = settings.journal_uri(model_id)
    if uri is None:
        return SqliteStateStore(settings.journal_path(model_id))
    from deployments.s3_state_store import S3StateStore

    return await S3StateStore.open(await _place(settings, uri))


async def read_journal(settings: ClusterSettings, model_id: str) -> Journal:
    """Open a journal to read it; one in an object stays with the controller that has it."""
    uri = settings.journal_uri(model_id)
    if uri is None:
        path = settings.journal_path(model_id)
        if not path.is_file():
            raise ValueError(f"there is no journal {path}")
        return SqliteStateStore(path).journal
    from deployments.s3_state_store import read_object

    return await read_object(await _place(settings, uri))


async def open_pushes(settings: ClusterSettings, model_id: str) -> PushStore:
    """The controller's pushed adapters."""
    uri = settings.push_archive_uri(model_id)
    if uri is None:
        return PushStore(settings.push_path)
    from deployments.push_archive import S3PushArchive

    archive = await asyncio.to_thread(S3PushArchive, uri, endpoint_url=settings.state_endpoint_url)
    return PushStore(settings.push_path, archive)


async def _place(settings: ClusterSettings, uri: str) -> "JournalObject":
    # Here, because who keeps the journal on a disk need not load boto3.
    from deployments.journal_object import JournalObject

    return await asyncio.to_thread(JournalObject, uri, endpoint_url=settings.state_endpoint_url)
